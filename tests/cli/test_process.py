"""Broken streams and signals leave the exit code right and never end in a traceback."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from certvol.cli import list_
from certvol.cli._console import ConsoleReporter
from certvol.cli._main import run
from certvol.cli._process import Signals
from support.images import write_domain

needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
COMMAND = f"{sys.executable} -m certvol"


def shell(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)


def test_a_reader_that_closes_the_pipe_early_gets_no_traceback() -> None:
    done = shell(f"{COMMAND} list settings | head -1; echo ${{PIPESTATUS[0]}}")
    assert done.stderr == ""
    assert done.stdout.splitlines()[1] in ("0", "1")


def test_letters_that_the_encoding_lacks_are_escaped(tmp_path: Path) -> None:
    write_domain(tmp_path / "source")
    (tmp_path / "source" / "apple").rename(tmp_path / "source" / "äpple")
    command = f"{COMMAND} check --source source --target source"
    done = shell(f"cd {tmp_path} && LC_ALL=C PYTHONIOENCODING=ascii {command}")
    assert done.returncode == 0, done.stderr
    assert r"\xe4pple" in done.stdout


@needs_full
def test_a_full_stdout_is_reported_in_one_sentence() -> None:
    done = shell(f"{COMMAND} list presets >/dev/full")
    assert done.returncode == 2
    assert done.stderr.startswith("certvol: cannot write to stdout: no space left")
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


@pytest.mark.parametrize(
    "fault", [RuntimeError("reentrant call"), BrokenPipeError(32, "Broken pipe")]
)
def test_a_signal_is_remembered_even_if_stderr_fails(
    fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise fault

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        signals = Signals()
        monkeypatch.setattr(sys, "stderr", Broken())
        with signals.deferred():
            signal.raise_signal(signal.SIGTERM)
        assert signals() == signal.SIGTERM
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_fault_of_no_stream_or_file_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(list_, "run", broken)
    with pytest.raises(ConnectionRefusedError):
        run(["list", "presets"])
