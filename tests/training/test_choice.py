"""The choice of a cycle by label-free scores: alone, and in whole runs."""

import json
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from safetensors.torch import load_file

import certvol
from certvol.config import GuardConfig, Selector
from certvol.errors import Interrupted, UserError
from certvol.selection import SELECTORS
from certvol.training.choice import Choice
from certvol.training.delivery import decide
from certvol.training.guard import Guard
from certvol.training.position import Position
from images import tiny, write_domain
from stop_at import StopAt

ONE = np.ones((1, 2), np.float32)


def _labels(*labels: int) -> np.ndarray:
    return np.eye(3, dtype=np.float32)[list(labels)]


def test_settings_name_every_selector() -> None:
    assert set(get_args(Selector)) == {"last", *SELECTORS}


def test_the_best_so_far_and_among_equals_the_newest() -> None:
    choice = Choice(("bnm", "entropy"))
    won = [
        choice.look(c + 1, {"bnm": b, "entropy": e}, ONE) for c, (b, e) in enumerate([(1, 5), (3, 4), (3, 4.5), (2, 4)])
    ]
    assert won == [["bnm", "entropy"], ["bnm", "entropy"], ["bnm"], ["entropy"]]
    assert choice.best == {"bnm": (3, 3), "entropy": (4, -4)}


def test_the_guards_own_score_chooses_alike() -> None:
    guard = Guard(GuardConfig())
    scores = {"mutual_information": 1.0, "classes_in_use": 3.0, "source_accuracy": None}
    guard.start(scores)
    won = [
        guard.look(cycle, {**scores, "mutual_information": value})[1] for cycle, value in ((1, 1.0), (2, 1.0), (3, 0.9))
    ]
    assert won == [True, True, False]
    assert guard.best_cycle == 2


@pytest.mark.parametrize(
    ("select", "collapse", "healthy", "model", "score"),
    [
        ("last", [], 2, "last", None),
        ("mutual_information", [], 2, "cycle 2", "mutual_information"),
        ("mutual_information", [], 3, "last", None),
        ("bnm", [], 2, "cycle 1", "bnm"),
        ("sigma", [], 2, "last", None),  # a score that no cycle had
        ("last", ["it fell"], 2, "cycle 2", "mutual_information"),
        ("bnm", ["it fell"], 2, "cycle 1", "bnm"),
        ("last", ["it fell"], None, "pretrained", None),
    ],
)
def test_what_is_delivered(
    select: str, collapse: list[str], healthy: int | None, model: str, score: str | None
) -> None:
    guard, choice = Guard(GuardConfig()), Choice(("bnm",), best={"bnm": (1, 0.5)})
    guard.best_cycle = healthy
    position = Position(phase="done", mode="per_domain", cycle=3, collapse=collapse)
    delivery, kept = decide(select, position, guard, choice, "mixed")
    assert (delivery.model, kept) == (model, score)
    assert delivery.mode == ("mixed" if model == "pretrained" else "per_domain")
    assert ("collapsed at cycle 3 (it fell)" in delivery.why) is bool(collapse)


def test_a_score_that_is_missing_chooses_nothing() -> None:
    choice = Choice(("sigma",))
    assert choice.look(1, {"sigma": None}, ONE) == choice.look(2, {}, ONE) == []
    assert choice.best == {}


def test_the_ensemble_of_all_cycles_decides_between_the_kept_and_the_new() -> None:
    choice = Choice(("ensv",))
    assert choice.look(1, {}, _labels(0, 0, 0, 0)) == ["ensv"]
    assert choice.look(2, {}, 0.9 * _labels(0, 1, 1, 1)) == []  # the mean of both is the first's
    # Now the mean says 0 1 1 1: the kept cycle 1 agrees on a quarter, the new one on three quarters.
    assert choice.look(3, {}, 0.9 * _labels(0, 1, 1, 2)) == ["ensv"]
    assert choice.best["ensv"] == (3, 0.75)
    copy = Choice(("ensv",))
    copy.restore(json.loads(json.dumps(choice.facts())), choice.tensors())
    assert copy.look(4, {}, _labels(0, 1, 1, 1)) == choice.look(4, {}, _labels(0, 1, 1, 1)) == ["ensv"]
    choice.start()
    assert choice.look(1, {}, _labels(2, 2, 2, 2)) == ["ensv"]


def test_facts_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match="none that there is"):
        Choice(("bnm",)).restore({"../x": [1, 1.0]}, {})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("domains")
    return write_domain(root / "source"), write_domain(root / "target", shift=20, seed=1)


def test_the_selectors_best_cycle_is_delivered(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from certvol.training import trainer

    honest = trainer.label_free_scores
    told = iter([{}, {"bnm": 1, "corr_c": 9}, {"bnm": 2, "corr_c": 8}, {"bnm": 1, "corr_c": 7}])
    monkeypatch.setattr(trainer, "label_free_scores", lambda *given: {**honest(*given), **next(told)})
    run = certvol.adapt(*folders, out=tmp_path / "run", **tiny(guard__keep="all", guard__select="bnm"))
    assert run.delivery.model == "cycle 2"
    assert "by bnm" in run.delivery.why
    best = {path.stem.removeprefix("best-"): load_file(path) for path in (run.path / "cycles").glob("best-*")}
    assert set(best) == set(SELECTORS)
    model = load_file(run.path / "model.safetensors")
    assert all(bool((model[key] == best["bnm"][key]).all()) for key in model)
    assert any(bool((model[key] != best["corr_c"][key]).any()) for key in model)


@pytest.mark.parametrize("mode", ["per_domain", "auto"])
def test_a_run_that_chooses_ends_with_the_same_bytes_when_stopped(
    folders: tuple[Path, Path], tmp_path: Path, mode: str
) -> None:
    settings = tiny(
        guard__keep="all", guard__select="ensv", training__cycles=4, model__norm=mode, guard__trial_cycles=2
    )
    whole = certvol.adapt(*folders, out=tmp_path / "whole", **settings).path
    parts = tmp_path / "parts"
    begin = {"source": folders[0], "target": folders[1], "out": parts, **settings}
    for asked in (15, 3, 4, 5):
        with pytest.raises(Interrupted):
            certvol.adapt(stop_signal=StopAt(asked), **begin)
        begin = {"resume": parts}
    certvol.adapt(resume=parts)
    files = [
        "model.safetensors",
        "metrics.json",
        "cycles/scores.jsonl",
        *(f"cycles/best-{s}.safetensors" for s in SELECTORS),
    ]
    for file in files:
        assert (whole / file).read_bytes() == (parts / file).read_bytes(), file


def test_metrics_tell_the_accuracy_of_every_cycle_on_the_watched_images(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    run = certvol.adapt(*folders, out=tmp_path / "run", **tiny())
    assert run.metrics is not None
    watched = run.metrics["watched"]
    assert watched["cycles"] == [0, 1, 2, 3]
    assert watched["images"] == 36  # all of them, so that the last is what the whole target gives
    for metric in ("accuracy", "mean_class_accuracy"):
        assert watched[metric][-1] == pytest.approx(run.metrics["adapted"][metric])
        assert len(watched[metric]) == 4


def test_a_score_that_the_run_cannot_have_is_refused_before_it_begins(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="basic has not"):
        certvol.adapt(*folders, out=tmp_path / "a", **tiny(method__name="basic", guard__select="sigma"))
    with pytest.raises(UserError, match="held-out source"):
        certvol.adapt(*folders, out=tmp_path / "b", **tiny(data__holdout=0.0, guard__select="source_accuracy"))
    few = write_domain(tmp_path / "few", per_class=4)
    with pytest.raises(UserError, match="none of the 3 classes has the 5 images"):
        certvol.adapt(few, folders[1], out=tmp_path / "c", **tiny(guard__select="source_accuracy"))
    assert not [name for name in "abc" if (tmp_path / name).exists()]
