"""The guard, the choice by a validator and the delivery, alone and in whole runs."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

import certvol
from certvol import api
from certvol.errors import Interrupted, RunFailed, UserError
from certvol.scores.validators import VALIDATORS, WatchedOutputs, label_free_scores
from certvol.settings import GuardConfig
from certvol.training import named_choices
from certvol.training.model_choice import ModelChoice, Scores
from support.images import tiny
from support.reporter import RecordingReporter
from support.stop_at import StopAt


def _labels(*labels: int) -> NDArray[np.float32]:
    return np.eye(3, dtype=np.float32)[list(labels)]


def _choice(select: str, action: Any = "back", **scores: float) -> ModelChoice:
    choice = ModelChoice(GuardConfig(select=select, action=action))
    choice.start(_scores(**scores))
    return choice


def _scores(**scores: float | None) -> Scores:
    return {"classes_in_use": 3.0, "source_accuracy": None, "mutual_information": None, **scores}


ONE = _labels(0)


def test_every_validator_can_be_chosen() -> None:
    assert set(named_choices()["guard.select"]) == {"last", *VALIDATORS}
    assert api.resolve_settings(settings={"guard.select": "bnm"}).guard.select == "bnm"
    with pytest.raises(
        UserError, match=r"`guard\.select` should be one of last, mutual_information"
    ):
        api.resolve_settings(settings={"guard.select": "bmn"})


def test_the_best_cycle_is_the_newest_among_equals() -> None:
    choice = ModelChoice(GuardConfig(keep="all"))
    choice.start(_scores())
    won = [
        choice.note_cycle(cycle + 1, _scores(bnm=bnm, entropy=entropy), ONE)
        for cycle, (bnm, entropy) in enumerate([(1, 5), (3, 4), (3, 4.5), (2, 4)])
    ]
    kept = [[name for name in names if name in ("bnm", "entropy")] for names in won]
    assert kept == [["bnm", "entropy"], ["bnm", "entropy"], ["bnm"], ["entropy"]]
    assert choice.best["bnm"] == (3, 3)
    assert choice.best["entropy"] == (4, -4)


def test_a_collapsed_cycle_is_never_the_best_and_patience_counts_them() -> None:
    choice = _choice("last", mutual_information=1.0)
    assert choice.note_cycle(1, _scores(mutual_information=1.0), ONE) == ["mutual_information"]
    for cycle in (2, 3):
        assert not choice.has_collapsed
        assert (
            choice.note_cycle(cycle, _scores(mutual_information=2.0, classes_in_use=1.0), ONE) == []
        )
        assert "only 1.0 classes" in choice.signs_of_collapse()[0]
    assert choice.has_collapsed
    assert choice.best == {"mutual_information": (1, 1.0)}
    choice.note_cycle(4, _scores(mutual_information=0.5), ONE)
    assert not choice.has_collapsed


def test_an_unfounded_change_counts_at_the_end_and_not_for_a_fitted_model() -> None:
    choice = _choice("last", mutual_information=1.0)
    worse = _scores(mutual_information=0.5, agreement_with_pretrained=0.3)
    assert choice.note_cycle(1, worse, ONE) == ["mutual_information"]
    assert choice.signs_of_collapse() == choice.final_signs(fitted=True) == []
    assert "70 % of the predictions changed" in choice.final_signs(fitted=False)[0]
    choice.note_cycle(2, {**worse, "classes_in_use": 1.0}, ONE)
    assert choice.final_signs(fitted=False) == choice.signs_of_collapse()


@pytest.mark.parametrize(
    ("select", "collapse", "healthy", "model", "validator"),
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
def test_which_model_is_delivered(
    select: str, collapse: list[str], healthy: int | None, model: str, validator: str | None
) -> None:
    choice = _choice(select)
    choice.best = {"bnm": (1, 0.5)}
    if healthy is not None:
        choice.best["mutual_information"] = (healthy, 0.5)
    delivery, chosen = choice.deliver(3, collapse, False, "per_domain", "mixed")
    assert (delivery.model, chosen) == (model, validator)
    assert delivery.mode == ("mixed" if model == "pretrained" else "per_domain")
    assert ("collapsed at cycle 3 (it fell)" in delivery.why) is bool(collapse)


def test_after_a_collapse_the_pretrained_model_is_delivered_unless_asked_otherwise() -> None:
    choice = _choice("last", action=GuardConfig().action)
    choice.best = {"mutual_information": (2, 0.5)}
    delivery, validator = choice.deliver(3, ["it fell"], False, "per_domain", "mixed")
    assert (delivery.model, delivery.mode, validator) == ("pretrained", "mixed", None)
    assert delivery.why.startswith("adaptation collapsed at cycle 3 (it fell)")


def test_settled_labels_are_the_reason_for_the_last_cycle() -> None:
    delivery, _ = _choice("last").deliver(7, [], True, "mixed", "mixed")
    assert (delivery.model, delivery.why) == ("last", "cycle 7, labels settled")


def test_a_missing_score_chooses_nothing() -> None:
    choice = _choice("sigma")
    assert (
        choice.note_cycle(1, _scores(sigma=None), ONE) == choice.note_cycle(2, _scores(), ONE) == []
    )
    assert choice.best == {}


def test_ensv_compares_the_best_and_the_newest_cycle_with_the_mean_of_all() -> None:
    choice = _choice("ensv")
    assert choice.note_cycle(1, _scores(), _labels(0, 0, 0, 0)) == ["ensv"]
    # The mean of both is the first's labels.
    assert choice.note_cycle(2, _scores(), 0.9 * _labels(0, 1, 1, 1)) == []
    # Now the mean says 0 1 1 1: cycle 1 agrees on a quarter, the newest on three quarters.
    assert choice.note_cycle(3, _scores(), 0.9 * _labels(0, 1, 1, 2)) == ["ensv"]
    assert choice.best["ensv"] == (3, 0.75)
    copy = _choice("ensv")
    copy.restore(json.loads(json.dumps(choice.facts())), choice.tensors())
    for each in (copy, choice):
        assert each.note_cycle(4, _scores(), _labels(0, 1, 1, 1)) == ["ensv"]
    choice.start(_scores())
    assert choice.note_cycle(1, _scores(), _labels(2, 2, 2, 2)) == ["ensv"]


def test_an_unknown_validator_in_a_checkpoint_is_refused() -> None:
    facts = {**_choice("bnm").facts(), "best": {"../x": [1, 1.0]}}
    with pytest.raises(ValueError, match="unknown validator"):
        _choice("bnm").restore(facts, {})


def test_the_validators_best_cycle_is_delivered(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = label_free_scores
    told = iter([{}, {"bnm": 1, "corr_c": 9}, {"bnm": 2, "corr_c": 8}, {"bnm": 1, "corr_c": 7}])
    monkeypatch.setattr(
        "certvol.training.model_choice.label_free_scores",
        lambda *given: {**honest(*given), **next(told)},
    )
    run = certvol.adapt(
        *folders, out=tmp_path / "run", **tiny(guard__keep="all", guard__select="bnm")
    )
    assert run.delivery.model == "cycle 2"
    assert "by bnm" in run.delivery.why
    best = {
        path.stem.removeprefix("best-"): load_file(path)
        for path in (run.path / "cycles").glob("best-*")
    }
    assert set(best) == set(VALIDATORS)
    model = load_file(run.path / "model.safetensors")
    assert all(bool((model[key] == best["bnm"][key]).all()) for key in model)
    assert any(bool((model[key] != best["corr_c"][key]).any()) for key in model)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["per_domain", "auto"])
def test_a_stopped_run_with_a_validator_ends_with_the_same_bytes(
    folders: tuple[Path, Path], tmp_path: Path, mode: str
) -> None:
    settings = tiny(
        guard__keep="all",
        guard__select="ensv",
        training__cycles=4,
        model__norm=mode,
        guard__trial_cycles=2,
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
        *(f"cycles/best-{s}.safetensors" for s in VALIDATORS),
    ]
    for file in files:
        assert (whole / file).read_bytes() == (parts / file).read_bytes(), file


def test_metrics_hold_the_accuracy_of_every_cycle_on_the_watched_images(
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


def _collapsing(monkeypatch: pytest.MonkeyPatch, after_cycle: int) -> None:
    """Let every later cycle look collapsed."""
    honest = label_free_scores

    def scores(seen: WatchedOutputs, pretrained: np.ndarray) -> dict[str, float | None]:
        found = honest(seen, pretrained)
        calls.append(1)
        return {**found, "classes_in_use": 1.0} if len(calls) > after_cycle + 1 else found

    calls: list[int] = []
    monkeypatch.setattr("certvol.training.model_choice.label_free_scores", scores)


def test_after_a_collapse_the_best_healthy_cycle_is_delivered(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _collapsing(monkeypatch, after_cycle=2)
    reporter = RecordingReporter()
    run = certvol.adapt(
        *folders,
        out=tmp_path / "run",
        reporter=reporter,
        **tiny(training__cycles=8, guard__action="back"),
    )
    assert run.delivery.model in ("cycle 1", "cycle 2")
    assert "collapsed at cycle 4" in run.delivery.why
    assert any("classes" in text for text in reporter.warned)
    kept = load_file(run.path / "cycles" / "best-mutual_information.safetensors")
    assert all(
        torch.equal(kept[key], value)
        for key, value in load_file(run.path / "model.safetensors").items()
    )


def test_a_collapse_in_the_last_cycle_needs_no_patience(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _collapsing(monkeypatch, after_cycle=2)
    run = certvol.adapt(
        *folders, out=tmp_path / "run", **tiny(training__cycles=3, guard__action="back")
    )
    assert run.delivery.model in ("cycle 1", "cycle 2")
    assert "collapsed at cycle 3" in run.delivery.why


def test_after_a_collapse_the_pretrained_model_is_delivered_by_default(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _collapsing(monkeypatch, after_cycle=2)
    run = certvol.adapt(*folders, out=tmp_path / "run", **tiny(training__cycles=3))
    assert run.delivery.model == "pretrained"
    assert "collapsed at cycle 3" in run.delivery.why
    assert "the model before adaptation is safer" in run.delivery.why
    pretrained = load_file(run.path / "pretrained.safetensors")
    delivered = load_file(run.path / "model.safetensors")
    assert all(torch.equal(value, delivered[key]) for key, value in pretrained.items())


@pytest.mark.parametrize("method", ["cvp", "coral"])
def test_a_collapse_in_the_only_cycle_is_not_delivered(
    method: str, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _collapsing(monkeypatch, after_cycle=0)
    settings = tiny(method__name=method, training__cycles=1, training__pretrain_steps=40)
    run = certvol.adapt(*folders, out=tmp_path / "run", **settings)
    assert run.delivery.model == "pretrained"


def test_a_collapse_in_the_only_cycle_can_fail_the_run(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _collapsing(monkeypatch, after_cycle=0)
    with pytest.raises(RunFailed, match="collapsed at cycle 1"):
        certvol.adapt(
            *folders, out=tmp_path / "run", **tiny(training__cycles=1, guard__action="stop")
        )


def test_a_collapse_from_the_start_delivers_the_pretrained_model(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _collapsing(monkeypatch, after_cycle=0)
    run = certvol.adapt(*folders, out=tmp_path / "run", **tiny(training__cycles=8))
    assert run.delivery.model == "pretrained"
    assert run.metrics is not None
    assert run.metrics["adapted"] == run.metrics["source_only"]


def test_the_guard_can_fail_the_run(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _collapsing(monkeypatch, after_cycle=0)
    with pytest.raises(RunFailed, match=r"collapsed at cycle 2.*pretrained model is kept"):
        certvol.adapt(*folders, out=tmp_path / "stop", **tiny(guard__action="stop"))
    with pytest.raises(RunFailed, match="collapsed at cycle 2"):
        certvol.adapt(resume=tmp_path / "stop")


def test_the_guard_can_fail_the_run_if_every_trial_collapsed(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = tiny(model__norm="auto", guard__action="stop", guard__patience=1, guard__spread=1.5)
    with pytest.raises(RunFailed, match="collapsed at cycle 1"):
        certvol.adapt(*folders, out=tmp_path / "run", **settings)


def test_a_target_that_lacks_classes_gives_a_warning(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Balanced batches spread the predictions of a target of one class; the user must be warned."""
    shutil.copytree(folders[1] / "sky", tmp_path / "target" / "sky")
    reporter = RecordingReporter()
    run = certvol.adapt(
        folders[0],
        tmp_path / "target",
        out=tmp_path / "run",
        reporter=reporter,
        **tiny(training__pretrain_steps=60, training__cycles=20),
    )
    assert run.metrics is not None
    harmed = run.metrics["adapted"]["accuracy"] < run.metrics["source_only"]["accuracy"] - 0.25
    assert any("lacks classes" in text for text in reporter.warned) or not harmed


def test_the_guard_can_only_warn(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _collapsing(monkeypatch, after_cycle=0)
    reporter = RecordingReporter()
    run = certvol.adapt(
        *folders, out=tmp_path / "warn", reporter=reporter, **tiny(guard__action="warn")
    )
    assert run.delivery.model == "last"
    assert reporter.warned
