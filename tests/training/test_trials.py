"""The trials of norm modes with pretrained weights: `frozen` has a pretraining of its own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import certvol
from certvol.errors import Interrupted
from certvol.nn.small_cnn import SmallCNN
from certvol.runs.checkpoint import read_about
from certvol.training import trials
from certvol.training.step import Stepper
from support.images import tiny
from support.reporter import RecordingReporter
from support.run_folders import weights
from support.stop_at import StopAt

FILES = ("history.jsonl", "predictions.csv", "cycles/scores.jsonl", "pretrained.safetensors")


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights with statistics of their own."""
    file = tmp_path_factory.mktemp("weights") / "backbone.safetensors"
    torch.manual_seed(0)
    network = SmallCNN().train()
    with torch.no_grad():
        for _ in range(50):
            network(torch.randn(16, 3, 8, 8))
    save_file(network.state_dict(), file)
    return file


def settings_for(backbone: Path, **changed: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "training__cycles": 4,
        "guard__trial_cycles": 2,
        "model__norm": "auto",
        "model__train": "all",
        **changed,
    }
    return tiny(model__weights=str(backbone), **given)


def choosing(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setattr(trials, "preferred_mode", lambda scores, classes: mode)


@pytest.mark.parametrize("mode", ["frozen", "mixed", "per_domain"])
def test_a_chosen_trial_is_the_run_of_that_mode(
    mode: str,
    folders: tuple[Path, Path],
    tmp_path: Path,
    backbone: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pretraining, history and weights are those of a run that was given the mode."""
    choosing(monkeypatch, mode)
    reporter = RecordingReporter()
    tried = certvol.adapt(
        *folders, out=tmp_path / "auto", reporter=reporter, **settings_for(backbone)
    )
    given = settings_for(backbone, model__norm=mode)
    told = certvol.adapt(*folders, out=tmp_path / "told", **given).path
    assert tried.delivery.mode == mode
    for name in FILES[:-1]:
        assert weights(tried.path, name) == weights(told, name), name
    for name in ("pretrained.safetensors", "model.safetensors"):
        first, second = load_file(tried.path / name), load_file(told / name)
        assert all(torch.equal(first[key], second[key]) for key in second), name
    (sentence,) = [text for text in reporter.said if text.startswith("norm mode")]
    assert sentence.startswith(f"norm mode `{mode}` chosen after 2 trial cycles. Entropy, mutual ")
    assert "classes in use: frozen " in sentence
    rule = "by 0.055 in entropy, or in mutual information with at least 2.8 classes in use."
    assert sentence.endswith(f"leads the others {rule}")  # log 3 / 20
    states = [path for path in (tried.path / "checkpoint").iterdir() if path.is_dir()]
    assert states == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "steps"), [("frozen", [5, 13, 4]), ("mixed", [13, 30, 9, 5]), ("frozen", [26, 9, 3])]
)
def test_a_run_stopped_anywhere_ends_with_the_same_bytes(
    mode: str,
    steps: list[int],
    folders: tuple[Path, Path],
    tmp_path: Path,
    backbone: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    choosing(monkeypatch, mode)
    settings = settings_for(backbone, training__cycles=2, guard__trial_cycles=1)
    whole = certvol.adapt(*folders, out=tmp_path / "whole", **settings).path
    parts = tmp_path / "parts"
    begin: dict[str, Any] = {"source": folders[0], "target": folders[1], "out": parts, **settings}
    stopped = 0
    for asked in steps:
        try:
            certvol.adapt(stop_signal=StopAt(asked), **begin)
        except Interrupted:
            begin, stopped = {"resume": parts}, stopped + 1
        else:
            break
    assert stopped > 1
    certvol.adapt(resume=parts)
    for file in (*FILES, "model.safetensors", "metrics.json"):
        assert weights(parts, file) == weights(whole, file), file


def test_frozen_keeps_the_statistics_of_the_weights(
    folders: tuple[Path, Path], tmp_path: Path, backbone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choosing(monkeypatch, "frozen")
    run = certvol.adapt(*folders, out=tmp_path / "run", **settings_for(backbone)).path
    given, model = load_file(backbone), load_file(run / "model.safetensors")
    means = [name for name in given if name.endswith("running_mean")]
    assert means
    for name in means:
        kept = model[f"network.backbone.{name}_2C"]
        assert all(torch.equal(row, given[name]) for row in kept), name


@pytest.mark.parametrize("method", ["cvp", "source_only", "coral"])
def test_frozen_is_tried_only_where_there_is_a_choice(
    method: str, folders: tuple[Path, Path], tmp_path: Path, backbone: Path
) -> None:
    """It is not tried for random weights, or for a method that does not adapt in cycles."""
    given = tiny() if method == "cvp" else tiny(model__weights=str(backbone))
    settings: dict[str, Any] = {**given, "model.norm": "auto", "method.name": method}
    if method != "cvp":
        settings.pop("method.num_samples")
    run = certvol.adapt(*folders, out=tmp_path / "run", **settings).path
    assert not (run / "cycles" / "trial-frozen").exists()
    assert read_about(run / "model.safetensors")["norm"] in ("mixed", "per_domain", "frozen")
    history = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    assert sum(line["phase"] == "pretrain" for line in history) == 6


def test_a_frozen_candidate_that_diverges_does_not_end_the_run(
    folders: tuple[Path, Path], tmp_path: Path, backbone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Stepper.step

    def exploding(self: Stepper, *given: Any) -> Any:
        frozen = self.method.network.domains.mode == "frozen"
        changed = (*given[:-1], 1e30) if frozen else given
        return step(self, *changed)

    monkeypatch.setattr(Stepper, "step", exploding)
    reporter = RecordingReporter()
    run = certvol.adapt(*folders, out=tmp_path / "run", reporter=reporter, **settings_for(backbone))
    assert run.delivery.mode in ("mixed", "per_domain")
    assert any("norm mode frozen is left out" in text for text in reporter.warned)
    assert any("frozen collapsed" in text for text in reporter.said)


@pytest.mark.parametrize(("steps", "warned"), [(1, True), (60, False)])
def test_pretraining_that_failed_is_warned_of_and_noted(
    steps: int, warned: bool, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    for method in ("cvp", "source_only"):
        settings = tiny(
            method__name=method,
            training__pretrain_steps=steps,
            data__holdout=0.5,
            training__learning_rate=0.02,
        )
        run = certvol.adapt(*folders, out=tmp_path / method, **settings).path
        file = run / "warnings.jsonl"
        text = file.read_text() if file.exists() else ""
        assert ("pretraining reached only" in text) is warned
