"""Every attempt at a run, kept in `attempts.jsonl`: how long it took and how it ended."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from certvol.benchmark.plan import RunKey, run_name
from certvol.benchmark.worker import JobOutcome
from certvol.runs.checkpoint import append_line


class Attempts:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._seconds: dict[str, float] = {}
        self._failures: dict[str, str] = {}
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in lines:
            with suppress(json.JSONDecodeError):  # a kill may leave half a line
                self._count(json.loads(line))

    def _count(self, attempt: dict[str, Any]) -> None:
        run = attempt["run"]
        self._seconds[run] = self._seconds.get(run, 0.0) + attempt["seconds"]
        self._failures.pop(run, None)
        if attempt.get("status") in ("failed", "died"):
            self._failures[run] = attempt["reason"]

    def add(self, key: RunKey, outcome: JobOutcome) -> None:
        attempt = {
            "run": run_name(key),
            "seconds": round(outcome.seconds, 1),
            "status": outcome.status,
            "code": outcome.code,
            "reason": outcome.reason,
        }
        append_line(self.path, attempt)
        self._count(attempt)

    def seconds(self, key: RunKey) -> float | None:
        """Return the time of all attempts at a run; None before the first."""
        return self._seconds.get(run_name(key))

    def failure(self, key: RunKey) -> str | None:
        """Return why the last attempt failed; None if it did not."""
        return self._failures.get(run_name(key))

    def keys(self) -> list[RunKey]:
        found = (name.split("/") for name in self._seconds)
        return [(task, method, int(seed)) for _, task, method, seed in found]
