"""Read the results of a benchmark's runs and the attempts at them; write `results.csv`."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from certvol.benchmark.measurements import read_measurements
from certvol.benchmark.plan import RunIdentity, RunKey, run_name
from certvol.benchmark.pool import JobOutcome
from certvol.benchmark.suite import Metric
from certvol.errors import UserError
from certvol.runs.checkpoint import DAMAGE, append_line
from certvol.runs.folder import RunFolder
from certvol.runs.tables import csv_text, read_metrics
from certvol.scores.validators import DIRECTION, ensemble_agreement
from certvol.settings import read_settings_file

COLUMNS = "task,method,seed,metric,last,selected,oracle,seconds,status,run".split(",")
DONE, STOPPED, WAITING = "done", "stopped", "waiting"
FAILED = "failed: "


@dataclass(frozen=True)
class Cycles:
    """A run's adaptation, cycle by cycle, on the watched images."""

    accuracy: list[float]
    """Accuracy after each cycle, in the suite's metric."""
    scores: dict[str, list[float]]
    """Validator -> scores, with signs set so that more is better."""
    healthy: list[bool]

    def chosen_by(self, validator: str) -> int | None:
        """Return the index of the best healthy cycle, the newest of equals; None without scores."""
        if validator not in self.scores:
            return None
        everything = range(len(self.healthy))
        candidates = [i for i in everything if self.healthy[i]] or everything
        return max(candidates, key=lambda i: (self.scores[validator][i], i))


@dataclass(frozen=True)
class Result(RunIdentity):
    """The result of one run; accuracies are fractions in the suite's metric."""

    status: str = WAITING
    seconds: float | None = None
    last: float | None = None
    selected: float | None = None
    oracle: float | None = None
    delivered: float | None = None
    per_class: Mapping[str, float | None] = field(default_factory=dict)
    """Accuracy of the delivered model."""
    cycles: Cycles | None = None
    backbone: str = ""
    measured: Mapping[str, float] = field(default_factory=dict)
    """Figures for the paper's claims, by name."""
    cpu_seconds: float | None = None
    """Processor time without decoding and extraction, which runs share; None if it is unknown."""
    delivers_last: bool = True
    """False if the guard or `guard.select` delivered another model than the last cycle's."""


def read_run(folder: Path, asked: Result, metric: Metric, validator: str) -> Result:
    """Read a finished run.

    The delivered model is measured on the whole target, every cycle only on the watched images.
    The accuracy of another cycle is the delivered model's plus their difference on the watched
    images, so that `last`, `selected` and `oracle` can be compared. If all images are watched, this
    is exact up to the precision of those predictions (bf16 or fp32).
    """
    files = RunFolder(folder)
    try:
        metrics = read_metrics(files.metrics)
        delivered = float(metrics["adapted"][metric])
        found = replace(
            asked,
            status=DONE,
            last=delivered,
            selected=delivered,
            oracle=delivered,
            delivered=delivered,
            per_class=metrics["adapted"]["per_class"],
            backbone=str(read_settings_file(files.config).get("model.backbone", "")),
            measured=read_measurements(files),
            cpu_seconds=read_cpu_seconds(files.timing),
        )
        watched = metrics.get("watched")
        if not watched or len(watched["cycles"]) < 2:
            return found  # it did not adapt
        cycles = _read_cycles(files, watched["cycles"], watched[metric])
        model = str(metrics["delivered"]["model"])
        at = _watched_accuracy(model, watched["cycles"], watched[metric])
    except (*DAMAGE, UserError) as error:
        reason = f"cannot read its files ({type(error).__name__}: {' '.join(str(error).split())})"
        again = f"remove {folder} and run the same command again"
        return replace(asked, status=f"{FAILED}{reason}; {again}")

    def on_whole_target(index: int) -> float:
        return min(1.0, max(0.0, delivered + cycles.accuracy[index] - at))

    chosen = cycles.chosen_by(validator)
    return replace(
        found,
        cycles=cycles,
        last=on_whole_target(-1),
        selected=None if chosen is None else on_whole_target(chosen),
        oracle=on_whole_target(int(np.argmax(cycles.accuracy))),
        delivers_last=model == "last",
    )


def read_cpu_seconds(timing: Path) -> float | None:
    """Return a run's processor time, without stopped attempts; None if it was not noted."""
    try:
        lines = [json.loads(line) for line in timing.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return None
    spent = [float(line["cpu_seconds"]) for line in lines if "cpu_seconds" in line]
    return sum(spent) if spent else None


def _read_cycles(files: RunFolder, numbers: list[int], accuracy: list[float]) -> Cycles:
    lines: list[dict[str, Any]] = []

    def predictions() -> Iterator[NDArray[np.float32]]:
        for cycle, scores, probabilities_NC in files.journal.read_cycles():
            lines.append(scores)
            if cycle > 0:  # 0 is the model that adaptation started from
                yield probabilities_NC

    agreement = ensemble_agreement(predictions())
    if [line["cycle"] for line in lines] != numbers:
        raise ValueError("the cycles of metrics.json and scores.jsonl differ")
    del lines[0]
    scores = {
        name: [DIRECTION[name] * float(line[name]) for line in lines]
        for name in DIRECTION
        if all(line.get(name) is not None for line in lines)
    }
    healthy = [not line.get("collapsed", False) for line in lines]
    return Cycles(list(map(float, accuracy[1:])), {**scores, "ensv": agreement}, healthy)


def _watched_accuracy(model: str, cycles: list[int], accuracy: list[float]) -> float:
    """Return the delivered model's accuracy on the watched images."""
    if model in ("last", "pretrained"):
        return accuracy[-1 if model == "last" else 0]
    return accuracy[cycles.index(int(model.split()[1]))]  # `cycle 7`


def means_of_seeds(runs: Iterable[Result], tasks: Sequence[str], column: str) -> list[float]:
    """Return the mean over the tasks of each seed that has a result for all of them."""
    by_seed: dict[int, list[float]] = {}
    for run in runs:
        if (value := getattr(run, column)) is not None and run.task in tasks:
            by_seed.setdefault(run.seed, []).append(value)
    return [fmean(values) for values in by_seed.values() if len(values) == len(tasks)]


def results_csv(results: Sequence[Result], metric: Metric) -> str:
    rows = []
    for result in results:
        accuracies = (result.last, result.selected, result.oracle)
        numbers = ["" if value is None else f"{value:.6f}" for value in accuracies]
        seconds = "" if result.seconds is None else f"{result.seconds:.1f}"
        status = " ".join(result.status.split())
        about = [result.task, result.method, str(result.seed), metric]
        rows.append([*about, *numbers, seconds, status, run_name(result.key)])
    return csv_text(COLUMNS, rows)


class Attempts:
    """The attempts at each run, also of earlier calls, as `attempts.jsonl` records them."""

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
