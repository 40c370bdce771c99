"""Numbers that go wrong are noticed, reported in a sentence and never delivered."""

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
from certvol.training.pseudo_labels import _labeller
from certvol.training.pseudo_labels._pools import fill_pools
from support.images import HUES, tiny
from support.reporter import RecordingReporter


def run_or_sentence(*folders: Path, **settings: Any) -> tuple[certvol.Run | None, str]:
    try:
        return certvol.adapt(*folders, **settings), ""
    except RunFailed as error:
        return None, str(error)


def assert_finite(file: Path) -> None:
    for name, tensor in load_file(file).items():
        assert not tensor.is_floating_point() or tensor.isfinite().all(), (file, name)


def assert_all_finite(run: certvol.Run, images: int = 36) -> None:
    """Check the model, the predictions and the history of a run."""
    assert_finite(run.path / "model.safetensors")
    with (run.path / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == images
    assert all(np.isfinite([float(row["probability"]), float(row["sigma"])]).all() for row in rows)
    for line in (run.path / "history.jsonl").read_text().splitlines():
        numbers = [value for value in json.loads(line).values() if isinstance(value, float)]
        assert np.isfinite(numbers).all()


@pytest.mark.parametrize("norm", ["per_domain", "mixed"])
def test_bf16_trains_on_a_cpu(norm: str, folders: tuple[Path, Path], tmp_path: Path) -> None:
    settings = tiny(training__precision="bf16", model__norm=norm, training__pretrain_steps=40)
    run = certvol.adapt(*folders, out=tmp_path / "run", **settings)
    assert_all_finite(run)
    assert run.metrics is not None
    assert run.metrics["adapted"]["accuracy"] > 0.8  # colours: anything that learns gets them
    kinds = {tensor.dtype for tensor in load_file(run.path / "model.safetensors").values()}
    assert kinds <= {torch.float32, torch.int64}


def spoil_features(
    monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Tensor, bool], Tensor], after: int = 0
) -> None:
    """Replace the backbone's features by `spoil(features, training)` after so many calls."""
    healthy = SmallCNN.forward
    calls = [0]

    def forward(self: SmallCNN, images: Tensor) -> Tensor:
        calls[0] += 1
        features = healthy(self, images)
        return spoil(features, self.training) if calls[0] > after else features

    monkeypatch.setattr(SmallCNN, "forward", forward)


def _one_row(features: Tensor, value: float) -> Tensor:
    return torch.cat([features[:1] * 0 + value, features[1:]])


NAN = float("nan")
SPOILT: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "nan": lambda features, _: features * float("nan"),
    "inf": lambda features, _: features + float("inf"),
    "nan in one image": lambda features, _: _one_row(features, float("nan")),
    "inf in one image": lambda features, _: _one_row(features, float("-inf")),
    "nan in training only": lambda features, training: features * (NAN if training else 1),
    "nan in evaluation only": lambda features, training: features * (1 if training else NAN),
    "overflow": lambda features, _: features * 1e38 * 1e38,
}


@pytest.mark.parametrize(
    ("kind", "after"),  # in pretraining, and after it
    [
        *((kind, 0) for kind in SPOILT),
        ("nan", 16),
        ("inf in one image", 16),
        ("nan in evaluation only", 16),
    ],
)
def test_features_that_are_not_finite_stop_the_run(
    kind: str,
    after: int,
    folders: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil_features(monkeypatch, SPOILT[kind], after)
    with pytest.raises(RunFailed) as caught:
        certvol.adapt(*folders, out=tmp_path / "run", **tiny())
    sentence = str(caught.value)
    assert "no longer finite" in sentence
    assert "\n" not in sentence
    run = tmp_path / "run"
    assert not (run / "model.safetensors").exists()
    for kept in run.rglob("*.safetensors"):
        assert_finite(kept)


def test_a_run_can_be_resumed_once_the_cause_is_fixed(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = tiny(training__checkpoint_seconds=0)
    expected = certvol.adapt(*folders, out=tmp_path / "whole", **settings)
    with pytest.MonkeyPatch.context() as patch:
        spoil_features(patch, SPOILT["nan"], 18)
        with pytest.raises(RunFailed, match="the last good state is in"):
            certvol.adapt(*folders, out=tmp_path / "run", **settings)
    run = certvol.adapt(resume=tmp_path / "run")
    delivered = [(each.path / "model.safetensors").read_bytes() for each in (run, expected)]
    assert delivered[0] == delivered[1]


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e15])
def test_constant_or_huge_features_give_finite_numbers_or_a_failed_run(
    scale: float, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_features(monkeypatch, lambda features, _: features * scale)
    run, sentence = run_or_sentence(*folders, out=tmp_path / "run", **tiny())
    assert run is not None or "no longer finite" in sentence
    if run is not None:
        assert_all_finite(run)


@pytest.mark.parametrize("in_training", [True, False])
@pytest.mark.parametrize("value", [NAN, float("inf")])
def test_a_sigma_that_is_not_finite_stops_the_run(
    value: float,
    in_training: bool,
    folders: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = Method.sigma

    def sigma(self: Method, features: Tensor) -> Tensor:
        found = original(self, features)
        assert found is not None
        return found * value if in_training or not self.training else found

    monkeypatch.setattr(Method, "sigma", sigma)
    with pytest.raises(RunFailed, match="finite"):
        certvol.adapt(*folders, out=tmp_path / "run", **tiny())


def test_a_sigma_that_explodes_warns_or_stops_the_run(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Method.sigma
    monkeypatch.setattr(Method, "sigma", lambda self, features: original(self, features) * 1e12)
    reporter = RecordingReporter()
    _, sentence = run_or_sentence(*folders, out=tmp_path / "run", reporter=reporter, **tiny())
    assert any("sigma" in text or "finite" in text for text in (*reporter.warned, sentence))


@pytest.mark.parametrize(
    ("which", "norm"),
    [
        *(("both", norm) for norm in ("per_domain", "mixed", "auto")),
        ("source", "per_domain"),
        ("target", "per_domain"),
    ],
)
def test_black_images_give_finite_numbers_or_a_failed_run(
    which: str, norm: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    black = tmp_path / "black"
    for name in HUES:
        (black / name).mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (12, 12)).save(black / name / f"{number}.png")
    source = black if which != "target" else folders[0]
    target = black if which != "source" else folders[1]
    run, sentence = run_or_sentence(source, target, out=tmp_path / "run", **tiny(model__norm=norm))
    assert "\n" not in sentence
    if run is not None:
        assert_all_finite(run, 36 if which == "source" else 18)


@pytest.mark.parametrize("method", ["cvp", "basic", "source_only"])
@pytest.mark.parametrize("phase", ["learning_rate", "adapt_learning_rate"])
@pytest.mark.parametrize("seed", range(3))
def test_a_learning_rate_a_thousand_times_too_high_is_noticed(
    seed: int, phase: str, method: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    if (phase, method) == ("adapt_learning_rate", "source_only"):
        pytest.skip("does not adapt")
    settings = tiny(method__name=method, training__seed=seed) | {f"training.{phase}": 10.0}
    reporter = RecordingReporter()
    run, sentence = run_or_sentence(*folders, out=tmp_path / "run", reporter=reporter, **settings)
    if run is None:
        assert "learning_rate" in sentence
        assert not (tmp_path / "run" / "model.safetensors").exists()
    else:
        assert reporter.warned, (run.delivery, run.metrics)


def relabelled(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[np.ndarray], np.ndarray]
) -> list[np.ndarray]:
    """Change all pseudo-labels, and collect how many images of each class every cycle has."""
    counts: list[np.ndarray] = []

    def changed_pools(
        label_chunk: Callable[..., Callable[[], np.ndarray]], *rest: Any, **more: Any
    ) -> object:
        def changed(images: np.ndarray, number: int) -> Callable[[], np.ndarray]:
            labels = label_chunk(images, number)
            return lambda: change(labels())

        pools = fill_pools(changed, *rest, **more)
        counts.append(pools.counts_C)
        return pools

    monkeypatch.setattr(_labeller, "fill_pools", changed_pools)
    return counts


@pytest.mark.parametrize("labelling", ["on_demand", "full"])
def test_training_continues_if_a_class_loses_all_its_pseudo_labels(
    labelling: str, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = relabelled(monkeypatch, lambda labels: np.where(labels == 2, 0, labels))
    run = certvol.adapt(*folders, out=tmp_path / "run", **tiny(training__labelling=labelling))
    assert len(counts) == 3
    assert all(count[2] == 0 for count in counts)
    assert_all_finite(run)
    with (run.path / "history.jsonl").open() as file:
        cycles = {line["cycle"] for line in map(json.loads, file)}
    assert cycles == {0, 1, 2, 3}


def test_pseudo_labels_of_one_class_only_are_reported(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    relabelled(monkeypatch, np.zeros_like)
    reporter = RecordingReporter()
    run = certvol.adapt(*folders, out=tmp_path / "run", reporter=reporter, **tiny())
    (text,) = (text for text in reporter.warned if "pseudo-labels use only" in text)
    assert "use only 1 of 3 classes; if the target has more, lower `training.learning_rate`" in text
    assert_all_finite(run)


@pytest.mark.parametrize("allowed", ["apple", "apple,leaf"])
def test_classes_that_the_prior_rules_out_are_not_missed(
    allowed: str, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    relabelled(monkeypatch, np.zeros_like)
    reporter = RecordingReporter()
    settings = tiny(data__target_classes=allowed)
    certvol.adapt(*folders, out=tmp_path / "run", reporter=reporter, **settings)
    warned = [text for text in reporter.warned if "pseudo-labels use only" in text]
    assert len(warned) == (allowed != "apple")
    assert all("use only 1 of 2 classes" in text for text in warned)
