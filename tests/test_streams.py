"""Streams that a caller closed, or that cannot be written: exit codes stay right, and nothing ends in a traceback."""

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from certvol.cli import ACTIONS, _Signals, run
from certvol.console import ConsoleReporter
from images import write_domain

needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
COMMAND = f"{sys.executable} -m certvol"


def shell(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)


def test_a_closed_stdout_is_no_fault() -> None:
    done = shell(f"{COMMAND} list presets >&-")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_stderr_leaves_the_exit_code() -> None:
    assert shell(f"{COMMAND} list nothing 2>&-").returncode == 2


def test_names_that_the_encoding_has_no_letters_for_are_escaped(tmp_path: Path) -> None:
    write_domain(tmp_path / "source")
    (tmp_path / "source" / "apple").rename(tmp_path / "source" / "äpple")
    done = shell(f"cd {tmp_path} && LC_ALL=C PYTHONIOENCODING=ascii {COMMAND} check --source source --target source")
    assert done.returncode == 0, done.stderr
    assert r"\xe4pple" in done.stdout


def test_the_version_is_told() -> None:
    assert re.fullmatch(r"certvol \d+\.\d+\.\d+\S*\n", shell(f"{COMMAND} --version").stdout)


@needs_full
def test_a_full_stdout_is_said_in_one_sentence() -> None:
    done = shell(f"{COMMAND} list presets >/dev/full")
    assert done.returncode == 2
    assert done.stderr.startswith("certvol: cannot print on: no space left")
    assert done.stderr.count("\n") == 1


@needs_full
def test_a_full_stderr_leaves_the_exit_code() -> None:
    assert shell(f"{COMMAND} list nothing 2>/dev/full").returncode == 2


def test_progress_that_nobody_can_read_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", buffering=1) as broken:  # noqa: PTH123
        monkeypatch.setattr(sys, "stderr", broken)
        reporter = ConsoleReporter()
        for _ in range(3):
            reporter.warn("nobody sees this")
        reporter.start("work", 2)
        reporter.advance(2)
        reporter.finish()


@pytest.mark.parametrize("fault", [RuntimeError("reentrant call"), BrokenPipeError(32, "Broken pipe")])
def test_a_signal_is_remembered_whatever_stderr_does(fault: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise fault

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        signals = _Signals()
        monkeypatch.setattr(sys, "stderr", Broken())
        with signals.deferred():
            signal.raise_signal(signal.SIGTERM)
        assert signals() == signal.SIGTERM
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_an_unknown_file_system_error_is_not_taken_for_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(options: object) -> int:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setitem(ACTIONS, "list", broken)
    with pytest.raises(ConnectionRefusedError):
        run(["list", "presets"])
