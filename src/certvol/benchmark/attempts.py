"""Record every attempt at a run in `attempts.jsonl`: how long it took and how it ended."""

import json
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from certvol.benchmark.plan import RunKey, run_name
from certvol.benchmark.worker import JobOutcome
from certvol.runs.checkpoint import append_line


class Attempts:
    """The attempts at each run, from this call and from earlier ones."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_run: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            with suppress(json.JSONDecodeError):  # a kill may leave half a line
                attempt = json.loads(line)
                self.by_run[attempt["run"]].append(attempt)

    def add(self, key: RunKey, outcome: JobOutcome) -> None:
        attempt = {"run": run_name(key), **asdict(outcome), "seconds": round(outcome.seconds, 1)}
        append_line(self.path, attempt)
        self.by_run[attempt["run"]].append(attempt)

    def seconds(self, key: RunKey) -> float | None:
        """Return the time of all attempts at a run; None before the first."""
        attempts = self.by_run.get(run_name(key))
        return None if attempts is None else sum(attempt["seconds"] for attempt in attempts)

    def failure(self, key: RunKey) -> str | None:
        """Return why the last attempt failed; None if it did not."""
        last = self.by_run.get(run_name(key), [{}])[-1]
        return last["reason"] if last.get("status") in ("failed", "died") else None

    def keys(self) -> list[RunKey]:
        found = (name.split("/") for name in self.by_run)
        return [(task, method, int(seed)) for _, task, method, seed in found]
