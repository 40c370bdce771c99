"""Progress where there is no terminal: plain lines, and how long is left by what was done here."""

import io

import pytest
from rich.console import Console

from certvol import console
from certvol.console import ConsoleReporter


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> tuple[ConsoleReporter, io.StringIO, list[float]]:
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    return ConsoleReporter(Console(file=out, highlight=False, soft_wrap=True)), out, now


def test_time_left_is_by_the_pace_so_far(lines: tuple[ConsoleReporter, io.StringIO, list[float]]) -> None:
    reporter, out, now = lines
    reporter.start("adapting", 100)
    now[0] += 10
    reporter.advance(20)
    now[0] += 40
    reporter.advance(80)
    reporter.finish()
    assert out.getvalue().splitlines() == ["adapting: 20/100, 40 s left", "adapting: 100/100, 50 s"]


def test_what_was_done_before_says_nothing_of_the_pace(lines: tuple[ConsoleReporter, io.StringIO, list[float]]) -> None:
    reporter, out, now = lines
    reporter.start("pretraining", 500, 400)
    now[0] += 10
    reporter.advance(1)
    assert out.getvalue() == "pretraining: 401/500, 16 min left\n"


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 s"), (119.4, "119 s"), (120, "2 min"), (7199, "120 min"), (19_080, "5.3 h")]
)
def test_long_times_are_told_in_minutes_and_hours(seconds: float, words: str) -> None:
    assert console.duration(seconds) == words


def test_without_a_pace_no_time_is_told(lines: tuple[ConsoleReporter, io.StringIO, list[float]]) -> None:
    reporter, out, now = lines
    reporter.start("runs", 32, 3)
    now[0] += 10
    reporter.note("A-W basic seed 0: pretrain step 110")
    reporter.advance(0)
    assert out.getvalue() == "runs: 3/32  A-W basic seed 0: pretrain step 110\n"
