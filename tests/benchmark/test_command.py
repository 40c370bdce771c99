"""The benchmark command: its tables, exit codes and messages, with played runs."""

import json
import os
from pathlib import Path

import pytest

from certvol.benchmark.pool import JobOutcome
from certvol.cli._main import run as run_command
from support.played import Played

COMMAND = "benchmark digits --tasks T-B --device cpu".split()


def _command(out: str | Path, digits: Path, *more: str) -> list[str]:
    return [*COMMAND, "--data", str(digits), "--out", str(out), *more]


def test_the_command_prints_the_tables(
    tmp_path: Path, digits: Path, played: Played, capsys: pytest.CaptureFixture[str]
) -> None:
    words = _command(tmp_path, digits, "--methods", "basic,cvp", "--select", "bnm")
    assert run_command([*words, "--seeds", "0,1,01, 1", "--training.cycles", "7"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for text in ("digits: target accuracy", "70.5 ± 0.7", "(bnm)", "too few", "table.md"):
        assert text in out
    assert "2 seeds per cell" in out, "a seed given twice counts once"
    assert "cycles: 7" in played.jobs[0].settings.read_text()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--seeds", "a"], "whole numbers"),
        (["--tusks", "1"], "did you mean `--tasks`"),
        (["--methods", "a,,b"], "commas"),
    ],
)
def test_mistakes_on_the_command_line_are_explained(
    tmp_path: Path, digits: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert run_command(_command(tmp_path, digits, *more)) == 2
    assert message in capsys.readouterr().err


def test_a_folder_name_that_is_not_unicode_is_printed(
    tmp_path: Path, digits: Path, played: Played, capsys: pytest.CaptureFixture[str]
) -> None:
    out = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    assert run_command(_command(out, digits, "--methods", "cvp")) == 0
    assert r"caf\xe9/table.md" in capsys.readouterr().out


def test_a_failed_run_gives_exit_code_1(
    tmp_path: Path, digits: Path, played: Played, capsys: pytest.CaptureFixture[str]
) -> None:
    played.ends["T-B cvp seed 0"] = JobOutcome("failed", 1, 1.0, "it broke")
    words = _command(tmp_path, digits, "--methods", "basic,cvp")
    assert run_command(words) == 1
    assert "failed: T-B cvp seed 0: it broke" in capsys.readouterr().err
    played.ends.clear()
    assert run_command(words) == 0
    attempts = (tmp_path / "attempts.jsonl").read_text().splitlines()
    assert [json.loads(line)["status"] for line in attempts] == ["done", "failed", "done"]
