"""Without a terminal, progress is plain lines, with the time left at the speed so far."""

import io

import pytest
from rich.console import Console

from certvol.cli._console import ConsoleReporter

Reporting = tuple[ConsoleReporter, io.StringIO, list[float]]


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Reporting:
    now = [100.0]
    monkeypatch.setattr("certvol.cli._console.time.monotonic", lambda: now[0])
    out = io.StringIO()
    return ConsoleReporter(Console(file=out, highlight=False, soft_wrap=True)), out, now


def test_the_time_left_follows_from_the_speed_so_far(lines: Reporting) -> None:
    reporter, out, now = lines
    reporter.start("adapting", 100)
    now[0] += 10
    reporter.advance(20)
    now[0] += 40
    reporter.advance(80)
    reporter.finish()
    assert out.getvalue().splitlines() == ["adapting: 20/100, 40 s left", "adapting: 100/100, 50 s"]


def test_steps_of_an_earlier_process_do_not_count_for_the_speed(lines: Reporting) -> None:
    reporter, out, now = lines
    reporter.start("pretraining", 500, 400)
    now[0] += 10
    reporter.advance(20)
    assert out.getvalue() == "pretraining: 420/500, 40 s left\n"


def test_the_first_steps_which_are_slow_give_no_estimate(lines: Reporting) -> None:
    reporter, out, now = lines
    reporter.start("adapting", 2000)
    now[0] += 10
    reporter.advance(1)
    assert out.getvalue() == "adapting: 1/2000\n"


def test_no_time_is_printed_before_the_first_step(lines: Reporting) -> None:
    reporter, out, now = lines
    reporter.start("runs", 32, 3)
    now[0] += 10
    reporter.note("A-W basic seed 0: pretrain step 110")
    reporter.advance(0)
    assert out.getvalue() == "runs: 3/32  A-W basic seed 0: pretrain step 110\n"
