"""Lines of history, warnings about sigma, and the warning about long runs."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import certvol
from certvol.errors import Interrupted
from certvol.methods._base import Batch
from certvol.training import log as training_log
from certvol.training.keeper import Keeper
from certvol.training.log import (
    LONG,
    TIMED_STEPS,
    Pace,
    TrainingLog,
    in_words,
    medians,
    sigma_warnings,
)
from support.images import tiny
from support.methods import make_batch, make_method
from support.reporter import RecordingReporter
from support.stop_at import StopAt


def watched_batch(sigma: list[float], num_source: int) -> Batch:
    batch = make_batch(adapting=False, n=len(sigma))
    batch = dataclasses.replace(batch, num_source=num_source)
    batch.logged["sigma"] = torch.tensor(sigma)
    return batch


def test_medians_of_each_domain() -> None:
    assert medians(watched_batch([1.0, 2.0, 9.0, 0.5, 0.25], 3)) == {
        "sigma_source": 2.0,
        "sigma_target": 0.25,
    }
    assert medians(watched_batch([1.0, 3.0, 2.0], 3)) == {"sigma_source": 2.0, "sigma_target": None}
    assert medians(watched_batch([1.0], 0)) == {"sigma_source": None, "sigma_target": 1.0}


def test_a_line_in_words() -> None:
    assert (
        in_words({"loss": 2.314, "sigma_source": 1.2, "sigma_target": 0.8})
        == "loss 2.31 sigma 1.20 source 0.80 target"
    )
    assert (
        in_words({"loss": 2.0, "sigma_source": None, "sigma_target": 0.8})
        == "loss 2.00 sigma 0.80 target"
    )
    assert in_words({"loss": 0.5}) == "loss 0.50"


def test_a_sigma_that_says_nothing_gives_one_warning_of_each_kind() -> None:
    assert sigma_warnings({"sigma_source": 3 * math.log(10), "sigma_target": 1e-3}, 10) == {}
    found = sigma_warnings({"sigma_source": 7.0, "sigma_target": 1e-4}, 10)
    assert set(found) == {"large sigma", "small sigma"}
    assert (
        "sigma of the source has grown to 7.0, far above its largest target log C = 2.3"
        in found["large sigma"]
    )
    assert "sigma of the target has collapsed to 1.0e-04" in found["small sigma"]
    assert (
        "of the source"
        in sigma_warnings({"sigma_source": 7.0, "sigma_target": 8.0}, 10)["large sigma"]
    )
    assert sigma_warnings({"sigma_source": 1.0, "sigma_target": None}, 10) == {}
    assert sigma_warnings({}, 10) == {}


class _RecordingKeeper(Keeper):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []

    def log(self, line: Mapping[str, Any]) -> None:
        self.lines.append(dict(line))


def test_a_line_holds_the_weighted_loss_and_an_infinite_term_is_refused() -> None:
    method, keeper, reporter = make_method("cvp"), _RecordingKeeper(), RecordingReporter()
    log, batch = TrainingLog(method, keeper, reporter), watched_batch([1.0, 99.0], 1)
    for step in (99, 100, 101):
        log.step({"ce": 1.0, "samples_ce": 2.0}, batch, 0, step, 0.1)
    line = keeper.lines[2]
    assert line["loss"] == pytest.approx(1.0 + 2.0 * method.term_weights["samples_ce"])
    assert (line["phase"], line["cycle"], line["step"], line["lr"]) == ("pretrain", 0, 101, 0.1)
    assert (line["sigma_source"], line["sigma_target"]) == (1.0, 99.0)
    assert len(reporter.warned) == 1
    assert reporter.warned[0].startswith("step 100: sigma of the target has grown to 99.0")
    with pytest.raises(FloatingPointError, match="step 5 of pretrain loss term `ce`"):
        log.step({"ce": math.inf}, batch, 0, 5, 0.1)


def warnings_of(reporter: RecordingReporter) -> list[str]:
    return [text for text in reporter.said if "remaining" in text]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("seconds", "spoken"), [(1.001 * LONG / 94, 1), (0.99 * LONG / 94, 0)])
def test_a_long_run_is_reported_once_and_a_short_one_not(seconds: float, spoken: int) -> None:
    listener, clock = RecordingReporter(), Clock()
    run = Pace(100, True, listener, clock)
    for step in range(100):
        clock.now += 1000.0 if step == 0 else seconds  # the first one prepares, and does not count
        run.step()
    assert len(listener.said) == spoken
    if spoken:
        assert (
            "a step takes 38.3 s on this CPU: at least 60 min for the remaining 94 steps"
            in listener.said[0]
        )
        assert "--model.train head" in listener.said[0]


def test_a_run_that_may_settle_is_given_the_most_it_takes() -> None:
    listener, clock = RecordingReporter(), Clock()
    run = Pace(100, False, listener, clock, may_settle=True)
    for _ in range(10):
        clock.now += 60.0
        run.step()
    assert "up to about 94 min for the remaining 94 steps, less if" in listener.said[0]


def test_freezing_is_not_advised_for_a_backbone_of_random_weights() -> None:
    listener, clock = RecordingReporter(), Clock()
    run = Pace(100, False, listener, clock)
    for _ in range(100):
        clock.now += LONG
        run.step()
    assert len(listener.said) == 1
    assert "--model.train" not in listener.said[0]


def test_too_few_steps_give_no_estimate() -> None:
    listener, clock = RecordingReporter(), Clock()
    run = Pace(TIMED_STEPS, True, listener, clock)
    for _ in range(TIMED_STEPS):
        clock.now += 10 * LONG
        run.step()
    assert listener.said == []


def test_the_estimate_counts_the_remaining_steps_of_both_phases(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has 12 + 3 x 4 steps; if it resumes after three, 21 are left."""
    monkeypatch.setattr(training_log, "LONG", 0.0)
    first, second = RecordingReporter(), RecordingReporter()
    with pytest.raises(Interrupted):
        certvol.adapt(
            *folders, out=tmp_path / "run", reporter=first, stop_signal=StopAt(3), **tiny()
        )
    certvol.adapt(resume=tmp_path / "run", reporter=second)
    assert warnings_of(first) == []
    assert len(warnings_of(second)) == 1
    assert f"for the remaining {24 - 3 - 1 - TIMED_STEPS} steps" in warnings_of(second)[0]


def test_a_frozen_backbone_gives_no_estimate(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_log, "LONG", 0.0)
    listener = RecordingReporter()
    frozen = tiny(model__train="head")
    certvol.adapt(*folders, out=tmp_path / "run", reporter=listener, **frozen)
    assert warnings_of(listener) == []


def test_a_collapsed_sigma_gives_a_warning(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from certvol.methods.cvp import Method

    monkeypatch.setattr(Method, "sigma", lambda self, features: features.sum(1) * 0)
    reporter = RecordingReporter()
    certvol.adapt(*folders, out=tmp_path / "run", reporter=reporter, **tiny())
    assert [text for text in reporter.warned if "sigma of the source has collapsed" in text]


def test_an_exploding_sigma_gives_a_warning(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from certvol.methods.cvp import Method

    monkeypatch.setattr(Method, "sigma", lambda self, features: features.sum(1) * 0 + 50)
    reporter = RecordingReporter()
    certvol.adapt(*folders, out=tmp_path / "run", reporter=reporter, **tiny())
    assert [text for text in reporter.warned if "sigma of the source has grown to 50.0" in text]
