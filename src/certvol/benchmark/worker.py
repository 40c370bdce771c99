"""One job in a process of its own: started, watched, and its end put into words."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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


class Process:
    """A job under way."""

    def __init__(self, job: Job, log: Path, environment: Mapping[str, str]) -> None:
        self.job, self.log, self.started = job, log, time.monotonic()
        self.asked = False
        log.parent.mkdir(parents=True, exist_ok=True)
        self.begins_at = log.stat().st_size if log.exists() else 0
        words = [job.folder, job.settings, job.source, job.target, job.seed, os.getpid()]
        with log.open("ab") as file:
            # In a session of its own: Ctrl-C is for the benchmark, which then asks its runs to stop.
            self.popen = subprocess.Popen(
                [*LAUNCHER, *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    def outcome(self) -> Outcome | None:
        """None while it runs."""
        code = self.popen.poll()
        if code is None:
            return None
        seconds, reason = time.monotonic() - self.started, None if code == 0 else self._reason(code)
        return Outcome(code, seconds, reason, asked_to_stop=self.asked)

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
        if not self.asked and self.popen.poll() is None:
            self.asked = True
            self.popen.terminate()

    def end(self) -> None:
        """Asked to stop, given time to save, and then ended."""
        self.ask_to_stop()
        try:
            self.popen.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()


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
