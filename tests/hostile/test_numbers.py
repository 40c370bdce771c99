"""Numbers that go wrong: noticed, told in a sentence, and never delivered."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

import certvol
from certvol.errors import RunFailed
from certvol.methods.cvp import Method
from certvol.nn.small_cnn import SmallCNN
from certvol.reporting import Silent
from certvol.training import labeller
from images import HUES, tiny, write_domain


class Ear(Silent):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def say(self, text: str) -> None:
        self.heard.append(text)

    def warn(self, text: str) -> None:
        self.heard.append(f"warning: {text}")

    @property
    def warned(self) -> list[str]:
        return [text for text in self.heard if text.startswith("warning: ")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("domains")
    return write_domain(root / "source"), write_domain(root / "target", shift=20, seed=1)


def run_or_sentence(*folders: Path, **settings: Any) -> tuple[certvol.Run | None, str]:
    try:
        return certvol.adapt(*folders, **settings), ""
    except RunFailed as error:
        return None, str(error)


def whole(run: certvol.Run, images: int = 36) -> None:
    """A delivered model is finite in every number, and so are its predictions."""
    assert all(t.isfinite().all() for t in load_file(run.path / "model.safetensors").values() if t.is_floating_point())
    with (run.path / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == images
    assert all(np.isfinite([float(row["probability"]), float(row["sigma"])]).all() for row in rows)
    for line in (run.path / "history.jsonl").read_text().splitlines():
        assert all(np.isfinite(value) for value in json.loads(line).values() if isinstance(value, float))


# --- half precision


@pytest.mark.parametrize("norm", ["per_domain", "mixed"])
def test_bf16_trains_on_a_cpu(norm: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    settings = tiny(training__precision="bf16", model__norm=norm, training__pretrain_steps=40)
    run = certvol.adapt(*folders, out=tmp_path / "run", **settings)
    whole(run)
    assert run.metrics is not None
    assert run.metrics["adapted"]["accuracy"] > 0.8  # colours: anything that learns gets them
    kinds = {tensor.dtype for tensor in load_file(run.path / "model.safetensors").values()}
    assert kinds <= {torch.float32, torch.int64}


def test_bf16_repeats(folders: tuple[Path, Path], tmp_path: Path) -> None:
    settings = tiny(training__precision="bf16")
    paths = [certvol.adapt(*folders, out=tmp_path / name, **settings).path for name in ("a", "b")]
    assert (paths[0] / "model.safetensors").read_bytes() == (paths[1] / "model.safetensors").read_bytes()


# --- a backbone that goes wrong


def spoilt(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Tensor, bool], Tensor], after: int = 0) -> None:
    """From its call number `after` on, the backbone's features are `spoil(features, training)`."""
    healthy = SmallCNN.forward
    calls = [0]

    def forward(self: SmallCNN, images: Tensor) -> Tensor:
        calls[0] += 1
        features = healthy(self, images)
        return spoil(features, self.training) if calls[0] > after else features

    monkeypatch.setattr(SmallCNN, "forward", forward)


def _one_row(features: Tensor, value: float) -> Tensor:
    return torch.cat([features[:1] * 0 + value, features[1:]])


SPOILT: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "nan": lambda features, _: features * float("nan"),
    "inf": lambda features, _: features + float("inf"),
    "nan in one image": lambda features, _: _one_row(features, float("nan")),
    "inf in one image": lambda features, _: _one_row(features, float("-inf")),
    "nan in training only": lambda features, training: features * float("nan") if training else features,
    "nan in evaluation only": lambda features, training: features if training else features * float("nan"),
    "overflow": lambda features, _: features * 1e38 * 1e38,
}


@pytest.mark.parametrize(
    ("kind", "after"),  # in pretraining, and after it
    [*((kind, 0) for kind in SPOILT), ("nan", 16), ("inf in one image", 16), ("nan in evaluation only", 16)],
)
def test_features_that_are_not_finite_stop_the_run(
    kind: str, after: int, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt(monkeypatch, SPOILT[kind], after)
    with pytest.raises(RunFailed) as caught:
        certvol.adapt(*folders, out=tmp_path / "run", **tiny())
    sentence = str(caught.value)
    assert "no longer finite" in sentence
    assert "\n" not in sentence
    run = tmp_path / "run"
    assert not (run / "model.safetensors").exists()
    for kept in run.rglob("*.safetensors"):
        assert all(t.isfinite().all() for t in load_file(kept).values() if t.is_floating_point()), kept


def test_a_run_goes_on_once_the_cause_is_mended(folders: tuple[Path, Path], tmp_path: Path) -> None:
    settings = tiny(training__checkpoint_seconds=0)
    expected = certvol.adapt(*folders, out=tmp_path / "whole", **settings)
    with pytest.MonkeyPatch.context() as patch:
        spoilt(patch, SPOILT["nan"], 18)
        with pytest.raises(RunFailed, match="The last good state is in"):
            certvol.adapt(*folders, out=tmp_path / "run", **settings)
    run = certvol.adapt(resume=tmp_path / "run")
    assert (run.path / "model.safetensors").read_bytes() == (expected.path / "model.safetensors").read_bytes()


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e15])
def test_features_without_any_difference_or_out_of_scale_end_in_numbers_or_a_sentence(
    scale: float, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt(monkeypatch, lambda features, _: features * scale)
    run, sentence = run_or_sentence(*folders, out=tmp_path / "run", **tiny())
    assert run is not None or "no longer finite" in sentence
    if run is not None:
        whole(run)


# --- sigma


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_sigma_that_is_not_finite_stops_the_run(
    value: float, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Method.sigma
    monkeypatch.setattr(Method, "sigma", lambda self, features: honest(self, features) * value)
    with pytest.raises(RunFailed, match="finite"):
        certvol.adapt(*folders, out=tmp_path / "run", **tiny())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_sigma_that_is_not_finite_in_evaluation_only_is_not_delivered(
    value: float, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Method.sigma

    def sigma(self: Method, features: Tensor) -> Tensor:
        found = honest(self, features)
        assert found is not None
        return found if self.training else found * value

    monkeypatch.setattr(Method, "sigma", sigma)
    with pytest.raises(RunFailed, match="finite"):
        certvol.adapt(*folders, out=tmp_path / "run", **tiny())


def test_a_sigma_that_explodes_is_said_or_stops_the_run(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Method.sigma
    monkeypatch.setattr(Method, "sigma", lambda self, features: honest(self, features) * 1e12)
    ear = Ear()
    _, sentence = run_or_sentence(*folders, out=tmp_path / "run", reporter=ear, **tiny())
    assert [text for text in (*ear.warned, sentence) if "sigma" in text or "finite" in text], ear.heard


# --- images without a difference


def constant(root: Path, colour: tuple[int, int, int], per_class: int = 6) -> Path:
    for name in HUES:
        (root / name).mkdir(parents=True)
        for number in range(per_class):
            Image.new("RGB", (12, 12), colour).save(root / name / f"{number}.png")
    return root


@pytest.mark.parametrize(
    ("which", "norm"),
    [("both", "per_domain"), ("both", "mixed"), ("both", "auto"), ("source", "per_domain"), ("target", "per_domain")],
)
def test_images_that_are_all_black_end_in_numbers_or_a_sentence(
    which: str, norm: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    black = constant(tmp_path / "black", (0, 0, 0))
    source, target = black if which != "target" else folders[0], black if which != "source" else folders[1]
    run, sentence = run_or_sentence(source, target, out=tmp_path / "run", **tiny(model__norm=norm))
    assert "\n" not in sentence
    if run is not None:
        whole(run, 36 if which == "source" else 18)


# --- too high a learning rate


@pytest.mark.parametrize("method", ["cvp", "basic", "source_only"])
@pytest.mark.parametrize("phase", ["learning_rate", "adapt_learning_rate"])
@pytest.mark.parametrize("seed", range(3))
def test_a_learning_rate_a_thousand_times_too_high_is_noticed(
    seed: int, phase: str, method: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    if (phase, method) == ("adapt_learning_rate", "source_only"):
        pytest.skip("does not adapt")
    settings = tiny(method__name=method, training__seed=seed) | {f"training.{phase}": 10.0}
    ear = Ear()
    run, sentence = run_or_sentence(*folders, out=tmp_path / "run", reporter=ear, **settings)
    if run is None:
        assert "learning_rate" in sentence
        assert not (tmp_path / "run" / "model.safetensors").exists()
    else:
        assert ear.warned, (run.delivery, run.metrics)


# --- pseudo-labels that leave a class


def relabelled(monkeypatch: pytest.MonkeyPatch, change: Callable[[np.ndarray], np.ndarray]) -> list[np.ndarray]:
    """Pseudo-labels become `change` of what they are. What is filed in each cycle is collected."""
    honest = labeller.file_by_label
    counts: list[np.ndarray] = []

    def file_by_label(label_chunk: Callable[..., Callable[[], np.ndarray]], *rest: object, **more: object) -> object:
        def changed(images: np.ndarray, number: int) -> Callable[[], np.ndarray]:
            labels = label_chunk(images, number)
            return lambda: change(labels())

        filed = honest(changed, *rest, **more)
        counts.append(filed.counts_C)
        return filed

    monkeypatch.setattr(labeller, "file_by_label", file_by_label)
    return counts


@pytest.mark.parametrize("labelling", ["on_demand", "full"])
def test_a_class_that_loses_all_its_pseudo_labels_keeps_training(
    labelling: str, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = relabelled(monkeypatch, lambda labels: np.where(labels == 2, 0, labels))
    run = certvol.adapt(*folders, out=tmp_path / "run", **tiny(training__labelling=labelling))
    assert len(counts) == 3
    assert all(count[2] == 0 for count in counts)
    whole(run)
    with (run.path / "history.jsonl").open() as file:
        cycles = {line["cycle"] for line in map(json.loads, file)}
    assert cycles == {0, 1, 2, 3}


def test_pseudo_labels_that_all_fall_onto_one_class_are_said(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    relabelled(monkeypatch, np.zeros_like)
    ear = Ear()
    run = certvol.adapt(*folders, out=tmp_path / "run", reporter=ear, **tiny())
    assert [text for text in ear.warned if "pseudo-labels fall onto 1 of 3 classes" in text]
    whole(run)
