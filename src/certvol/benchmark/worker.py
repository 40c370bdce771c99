"""A process that does jobs: started, watched, and the end of each job put into words."""

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
from typing import IO

from certvol.benchmark.plan import Job

LAUNCHER = [sys.executable, "-m", "certvol.benchmark.launcher"]
STOP_CODES = (130, 143, -signal.SIGINT, -signal.SIGTERM)
GRACE = 60.0  # seconds that a run gets to save its state when it is asked to stop


@dataclass(frozen=True)
class Outcome:
    code: int
    """0 done; negative: killed by that signal."""
    seconds: float
    reason: str | None
    """In one sentence, where it is not done."""
    tried_again: bool = False
    """It will be: this is not the job's end."""
    asked_to_stop: bool = False
    """By the benchmark, which is stopping itself."""

    @property
    def is_death(self) -> bool:
        """Nothing that the run did ended it: it is worth trying again."""
        return not self.asked_to_stop and (self.code < 0 or self.code in STOP_CODES)


class Worker:
    """A process for one job after the other. Where one ends in any way but well, the next job gets a new process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.popen: subprocess.Popen[bytes] | None = None
        self.job: Job | None = None
        """Under way."""
        self.asked = False

    def start(self, job: Job, log: Path) -> None:
        self.log, self.started = log, time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        self.begins_at = log.stat().st_size if log.exists() else 0
        if self.popen is None or self.popen.poll() is not None:
            self.popen = self._launch()
        self.job = job
        words = [log, job.folder, job.settings, job.source, job.target, job.seed]
        with contextlib.suppress(BrokenPipeError):  # of a process that has just died: its outcome will say so
            _pipe(self.popen.stdin).write(json.dumps([str(word) for word in words]).encode() + b"\n")
            _pipe(self.popen.stdin).flush()

    def _launch(self) -> subprocess.Popen[bytes]:
        self._close_pipes()
        self.asked = False
        with self.log.open("ab") as file:
            # In a session of its own: Ctrl-C is for the benchmark, which then asks its runs to stop.
            return subprocess.Popen(
                [*LAUNCHER, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env={**os.environ, **self.environment},
                start_new_session=True,
            )

    def outcome(self) -> Outcome | None:
        """Of the job; None while it is under way."""
        code = self._code()
        if code is None:
            return None
        self.job = None
        if code != 0:
            self._wait()
        seconds, reason = time.monotonic() - self.started, None if code == 0 else self._reason(code)
        return Outcome(code, seconds, reason, asked_to_stop=self.asked)

    def _code(self) -> int | None:
        """What the process replied, or how it ended without a reply."""
        assert self.popen is not None
        ended = self.popen.poll()
        replies = _pipe(self.popen.stdout)
        if select.select([replies], [], [], 0)[0] and (reply := replies.readline()):
            return int(reply)
        return ended

    def _reason(self, code: int) -> str:
        with self.log.open("rb") as file:
            file.seek(self.begins_at)
            lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
        told = [line.removeprefix("certvol: ") for line in lines if line.startswith("certvol: ")]
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        if code in STOP_CODES and not self.asked:
            return f"stopped by a {signal.Signals(code - 128).name} from elsewhere"
        return told[-1] if told else lines[-1] if lines else f"exit code {code}"

    def ask_to_stop(self) -> None:
        """Once: a run that is asked again stops at once, with nothing saved."""
        if not self.asked and self.popen is not None and self.popen.poll() is None:
            self.asked = True
            self.popen.terminate()

    def end(self) -> None:
        """Asked to stop, given time to save, and then ended."""
        if self.popen is not None:
            self.ask_to_stop()
            self._wait()

    def _wait(self) -> None:
        assert self.popen is not None
        try:
            self.popen.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()

    def _close_pipes(self) -> None:
        for pipe in () if self.popen is None else (self.popen.stdin, self.popen.stdout):
            with contextlib.suppress(BrokenPipeError):
                _pipe(pipe).close()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def standing(folder: Path) -> str:
    """How far a run is, in a few words: from the last line of its history."""
    try:
        with (folder / "history.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2048))
            last = file.read().splitlines()[-1]
    except (OSError, IndexError):
        return "starting"
    try:
        line = json.loads(last)
        return f"{line['phase']} step {line['step']}"
    except (ValueError, KeyError, TypeError):
        return "under way"
