"""Run jobs one after another in a process, and report how each job ended."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from certvol.benchmark.plan import BenchmarkJob

COMMAND = [sys.executable, "-m", "certvol.cli._benchmark_worker"]
STOP_CODES = (130, 143, -signal.SIGINT, -signal.SIGTERM)
GRACE = 60.0  # seconds for a run to save its state when it is asked to stop


@dataclass(frozen=True)
class JobOutcome:
    """The end of an attempt at a job."""

    status: Literal["done", "failed", "died", "retried", "stopped"]
    """`died`: ended from outside; `retried`: died and will be tried again; `stopped`: by us."""
    code: int
    """The exit code; negative: killed by that signal."""
    seconds: float
    reason: str = ""


class Worker:
    """A process that runs one job after another; after a failure the next job gets a new one."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.process: subprocess.Popen[bytes] | None = None
        self.job: BenchmarkJob | None = None
        """The job that is running."""
        self.asked_to_stop = False

    def start(self, job: BenchmarkJob) -> None:
        self.job, self.started = job, time.monotonic()
        job.log.parent.mkdir(parents=True, exist_ok=True)
        self.log_start = job.log.stat().st_size if job.log.exists() else 0
        if self.process is None or self.process.poll() is not None:
            self.process = self._launch(job.log)
        sources = [str(source) for source in job.sources]
        places = [str(place) for place in (job.log, job.folder, job.settings)]
        order = [*places, sources, str(job.target), str(job.seed)]
        with contextlib.suppress(BrokenPipeError):  # it has just died: `outcome` will say so
            _pipe(self.process.stdin).write(json.dumps(order).encode() + b"\n")

    def _launch(self, log: Path) -> subprocess.Popen[bytes]:
        if self.process is not None:
            _pipe(self.process.stdin).close()
            _pipe(self.process.stdout).close()
        self.asked_to_stop = False
        with log.open("ab") as file:
            return subprocess.Popen(
                [*COMMAND, str(os.getpid())],
                bufsize=0,  # an order is sent at once, and no reply is read ahead of `select`
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env={**os.environ, **self.environment},
                start_new_session=True,  # Ctrl-C reaches the benchmark only, which stops its runs
            )

    def outcome(self) -> JobOutcome | None:
        """Return how the job ended; None while it runs."""
        code = self._exit_code()
        if code is None or self.job is None:
            return None
        if code != 0:
            self._wait()
        seconds, job, self.job = time.monotonic() - self.started, self.job, None
        if code == 0:
            return JobOutcome("done", code, seconds)
        if code < 0 or code in STOP_CODES:
            if self.asked_to_stop:
                return JobOutcome("stopped", code, seconds)
            by = signal.Signals(-code if code < 0 else code - 128).name
            return JobOutcome("died", code, seconds, f"killed by {by}")
        return JobOutcome("failed", code, seconds, self._last_message(job.log))

    def _exit_code(self) -> int | None:
        """Return the exit code that the process replied, or its own if it ended without a reply."""
        if self.process is None:
            return None
        ended = self.process.poll()
        replies = _pipe(self.process.stdout)
        if select.select([replies], [], [], 0)[0] and (reply := replies.readline()):
            return int(reply)
        return ended

    def _last_message(self, log: Path) -> str:
        with log.open("rb") as file:
            file.seek(self.log_start)
            lines = file.read().decode("utf-8", "replace").splitlines()
        lines = [line.strip() for line in lines if line.strip()]
        messages = [line for line in lines if line.startswith("certvol: ")]
        return (messages or lines or ["see its log"])[-1].removeprefix("certvol: ")

    def ask_to_stop(self) -> None:
        """Ask once: a run that is asked twice stops without saving."""
        if not self.asked_to_stop and self.process is not None and self.process.poll() is None:
            self.asked_to_stop = True
            self.process.terminate()

    def end(self) -> None:
        """Ask the process to stop, give it time to save, then kill it."""
        if self.process is not None:
            self.ask_to_stop()
            self._wait()

    def _wait(self) -> None:
        assert self.process is not None
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def progress_of(folder: Path) -> str:
    """Describe the progress of a run, from the last line of its history."""
    try:
        with (folder / "history.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2048))
            line = json.loads(file.read().splitlines()[-1])
            return f"{line['phase']} step {line['step']}"
    except (OSError, IndexError):
        return "starting"
    except ValueError:  # half a line
        return "running"
