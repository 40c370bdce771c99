from pathlib import Path

import pytest

import certvol
from certvol.errors import Interrupted
from certvol.training import pace
from certvol.training.pace import LONG, TIMED, Pace
from ear import Ear
from images import tiny, write_domain
from stop_at import StopAt


def long(ear: Ear) -> list[str]:
    return [text for text in ear.said if "that are left" in text]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("seconds", "spoken"), [(1.001 * LONG / 94, 1), (0.99 * LONG / 94, 0)])
def test_a_long_run_is_told_once_and_a_short_one_not(seconds: float, spoken: int) -> None:
    listener, clock = Ear(), Clock()
    run = Pace(100, True, listener, clock)
    for step in range(100):
        clock.now += 1000.0 if step == 0 else seconds  # the first one prepares, and does not count
        run.step()
    assert len(listener.said) == spoken
    if spoken:
        assert "a step takes 38.3 s on this CPU: at least 1.0 hours for the 94 that are left" in listener.said[0]
        assert "--model.train head" in listener.said[0]


def test_a_backbone_of_random_weights_is_not_to_be_frozen() -> None:
    listener, clock = Ear(), Clock()
    run = Pace(100, False, listener, clock)
    for _ in range(100):
        clock.now += LONG
        run.step()
    assert len(listener.said) == 1
    assert "--model.train" not in listener.said[0]


def test_too_few_steps_say_nothing() -> None:
    listener, clock = Ear(), Clock()
    run = Pace(TIMED, True, listener, clock)
    for _ in range(TIMED):
        clock.now += 10 * LONG
        run.step()
    assert listener.said == []


def test_a_run_counts_what_is_left_of_both_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 + 3 x 4 steps; where it goes on after three, 21 are left to it."""
    monkeypatch.setattr(pace, "LONG", 0.0)
    source, target = write_domain(tmp_path / "source"), write_domain(tmp_path / "target", shift=20, seed=1)
    first, second = Ear(), Ear()
    with pytest.raises(Interrupted):
        certvol.adapt(source, target, out=tmp_path / "run", reporter=first, stop_signal=StopAt(3), **tiny())
    certvol.adapt(resume=tmp_path / "run", reporter=second)
    assert long(first) == []
    assert len(long(second)) == 1
    assert f"for the {24 - 3 - 1 - TIMED} that are left" in long(second)[0]


def test_a_frozen_backbone_has_nothing_to_wait_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "LONG", 0.0)
    source, target = write_domain(tmp_path / "source"), write_domain(tmp_path / "target", shift=20, seed=1)
    listener = Ear()
    certvol.adapt(source, target, out=tmp_path / "run", reporter=listener, **tiny(model__train="head"))
    assert long(listener) == []
