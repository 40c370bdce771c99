"""Weights with a changed bit, of another format or with other numbers are never used."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import certvol
from certvol.errors import RunFailed, UserError
from certvol.predict.verdict import read_verdict
from certvol.report.records import read_record
from certvol.runs import checkpoint
from certvol.runs.checkpoint import load_with_about, read_about, read_tensors, write_tensors
from certvol.runs.tables import json_text
from support.commands import refused
from support.images import tiny


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def test_a_change_of_any_byte_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    write_tensors(file, {"x": torch.arange(3.0)}, {"classes": ["a", "b"]})
    for place in range(file.stat().st_size):
        flip(file, place)
        with pytest.raises(ValueError):  # noqa: PT011 (the header may be unreadable in many ways)
            read_about(file)
        with pytest.raises(RunFailed):
            read_tensors(file)
        flip(file, place)
    assert read_about(file) == {"classes": ["a", "b"]}


@pytest.mark.parametrize("name", ["model", "pretrained"])
def test_weights_with_a_flipped_bit_predict_nothing(
    name: str, runs: Path, made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = runs / "complete" / f"{name}.safetensors"
    flip(file, file.stat().st_size - 100)
    use = {"model": "delivered", "pretrained": "pretrained"}[name]
    words = ["predict", str(runs / "complete"), str(made / "target"), "--use", use]
    assert "checksum" in refused(capsys, *words, "--out", str(runs / "p.csv"))
    assert not (runs / "p.csv").exists()


def test_pretrained_weights_with_a_flipped_bit_are_not_delivered(runs: Path) -> None:
    flip(runs / "stopped" / "pretrained.safetensors", -100)
    with pytest.raises(RunFailed, match="checksum"):
        certvol.adapt(resume=runs / "stopped")
    assert not (runs / "stopped" / "model.safetensors").exists()


@pytest.mark.parametrize(("number", "word"), [("1", "older"), ("3", "newer"), ("x", "older")])
def test_another_format_is_refused_in_one_sentence(
    number: str, word: str, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("complete/model", "stopped/pretrained"):
        tensors, about = load_with_about(runs / f"{name}.safetensors")
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "FORMAT", f"certvol/{number}")
            write_tensors(runs / f"{name}.safetensors", tensors, about)
    with pytest.raises(UserError, match=f"by an? {word} certvol") as caught:
        certvol.load(runs / "complete")
    assert "\n" not in str(caught.value)
    with pytest.raises(RunFailed, match=f"by an? {word} certvol"):
        certvol.adapt(resume=runs / "stopped")
    assert any(word in note for note in read_record(runs / "complete").notes)


def test_a_checkpoint_of_another_format_is_not_taken_for_a_damaged_one(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged one is passed over, which would throw the work away."""
    monkeypatch.setattr(checkpoint, "FORMAT", "certvol/3")
    with pytest.raises(UserError, match="by an older certvol"):
        certvol.adapt(resume=runs / "stopped")


def test_a_verdict_of_another_format_is_refused(runs: Path) -> None:
    file = runs / "complete" / "verdict.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": "certvol/9"}))
    with pytest.raises(UserError, match="by a newer certvol"):
        read_verdict(file)


def test_weights_that_are_not_finite_are_refused(runs: Path) -> None:
    file = runs / "complete" / "model.safetensors"
    tensors, about = load_with_about(file)
    name = next(name for name, tensor in tensors.items() if tensor.is_floating_point())
    write_tensors(file, {**tensors, name: tensors[name] * float("nan")}, about)
    with pytest.raises(UserError, match="not finite"):
        certvol.load(runs / "complete")


@pytest.fixture(scope="module")
def of_features(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, rng = tmp_path_factory.mktemp("features"), np.random.default_rng(0)
    labels_N = np.arange(60) % 3
    features_ND = (4 * np.eye(8)[labels_N] + rng.normal(size=(60, 8))).astype(np.float32)
    for name in ("source", "target"):
        np.savez(root / f"{name}.npz", features=features_ND, labels=labels_N)
    huge_ND = features_ND.copy()
    huge_ND[7] = np.where(np.arange(8) % 2, 3e38, -3e38)
    np.savez(root / "huge.npz", features=huge_ND, labels=labels_N)
    settings = {k: v for k, v in tiny().items() if k not in ("model.backbone", "data.image_size")}
    certvol.adapt(root / "source.npz", root / "target.npz", out=root / "run", **settings)
    return root


def test_outputs_that_are_not_finite_are_refused(
    of_features: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, huge, out = str(of_features / "run"), str(of_features / "huge.npz"), tmp_path / "out"
    for words in (["predict", run, huge, "--out", str(out)], ["evaluate", run, "--data", huge]):
        more = ["--json", str(out)] if words[0] == "evaluate" else []
        sentence = refused(capsys, *words, *more)
        assert "1 of 60 inputs" in sentence
        assert "not a finite number" in sentence
        assert not out.exists()
    with np.load(huge) as file, pytest.raises(UserError, match="row 7"):
        certvol.load(run).predict(file["features"])


def test_json_holds_no_number_that_is_not_finite() -> None:
    with pytest.raises(RunFailed, match="not a finite number"):
        json_text({"accuracy": float("nan")})
