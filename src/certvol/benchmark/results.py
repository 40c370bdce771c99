"""What the runs of a benchmark reached, read from their folders; and `results.csv`."""

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from certvol.benchmark.facts import read_facts
from certvol.benchmark.suites import Metric
from certvol.config import read_settings_file
from certvol.errors import UserError
from certvol.selection import DIRECTION, ensemble_agreement
from certvol.tables import read_metrics
from certvol.training.run_folder import RunFolder

COLUMNS = ("task", "method", "seed", "metric", "last", "selected", "oracle", "seconds", "status", "run")
DONE, STOPPED, WAITING = "done", "stopped", "waiting"
_PLAIN = re.compile(r"\w[-+@=.,\w]*")  # a name that becomes part of a path, and leads nowhere else
_SEED = re.compile(r"0|[1-9][0-9]{0,18}")
_DAMAGED = (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError, SafetensorError, UserError)


@dataclass(frozen=True)
class Cycles:
    """Of a run's adaptation, per cycle, on the watched images."""

    accuracy: list[float]
    """In the suite's metric."""
    scores: dict[str, list[float]]
    """Of each selector that the run has: more is better."""
    healthy: list[bool]

    def chosen_by(self, selector: str) -> int | None:
        """Index of the best healthy cycle, among equals the newest; None where the run has no such score."""
        if selector == "last":
            return len(self.accuracy) - 1
        if selector not in self.scores:
            return None
        candidates = [i for i, healthy in enumerate(self.healthy) if healthy] or list(range(len(self.healthy)))
        return max(candidates, key=lambda i: (self.scores[selector][i], i))


@dataclass(frozen=True)
class Result:
    """Of one run; accuracies are fractions in the suite's metric."""

    task: str
    method: str
    seed: int
    metric: Metric
    run: str
    """Its folder, relative to the benchmark's."""
    status: str
    seconds: float | None = None
    last: float | None = None
    selected: float | None = None
    oracle: float | None = None
    per_class: Mapping[str, float | None] = field(default_factory=dict)
    """Of the delivered model."""
    cycles: Cycles | None = None
    backbone: str = ""
    facts: Mapping[str, float] = field(default_factory=dict)
    """What else the paper's claims are about: see facts.py."""
    other_delivered: float | None = None
    """Accuracy of the delivered model, where that is not the last cycle's."""

    @property
    def delivered(self) -> float | None:
        return self.last if self.other_delivered is None else self.other_delivered

    @property
    def key(self) -> tuple[str, str, int]:
        return self.task, self.method, self.seed


def read_run(folder: Path, asked: Result, selector: str) -> Result:
    """Of a finished run.

    A run tells the accuracy of one model, the delivered one, on the whole target, and that of every cycle on the watched images.
    Other cycles are the delivered one's accuracy plus the difference on the watched images: all three columns are then
    comparable, and where all images are watched exact but for the precision that the trainer looks in (bf16 or fp32).
    """
    metric = asked.metric
    files = RunFolder(folder)
    try:
        metrics = read_metrics(files.metrics)
        delivered = float(metrics["adapted"][metric])
        cycles, at = _cycles(files, metrics, metric)
        facts = read_facts(files)
        backbone = _backbone(files)
    except FileNotFoundError as error:
        missing = Path(str(error.filename or "file")).name
        return replace(asked, status=f"failed: {_why_missing(files, missing)}; {_way_on(folder)}")
    except _DAMAGED as error:
        return replace(asked, status=f"failed: its files are damaged ({type(error).__name__}); {_way_on(folder)}")
    found = replace(
        asked,
        status=DONE,
        last=delivered,
        selected=delivered,
        oracle=delivered,
        per_class=metrics["adapted"]["per_class"],
        cycles=cycles,
        backbone=backbone,
        facts=facts,
    )
    if cycles is None or at is None:
        return found

    def whole(index: int) -> float:
        return min(1.0, max(0.0, delivered + cycles.accuracy[index] - at))

    chosen = cycles.chosen_by(selector)
    return replace(
        found,
        last=whole(-1),
        selected=None if chosen is None else whole(chosen),
        oracle=whole(max(range(len(cycles.accuracy)), key=cycles.accuracy.__getitem__)),
        other_delivered=None if metrics["delivered"]["model"] == "last" else delivered,
    )


def _why_missing(files: RunFolder, name: str) -> str:
    """A run writes no metrics.json where it found no labels, which evaluation.json tells."""
    if name == files.metrics.name:
        try:
            found = json.loads(files.evaluation.read_text(encoding="utf-8"))
            if not found["labelled"]:
                return "the target's folders do not tell its labels: name them like the source's classes"
        except _DAMAGED:
            return f"its {name} is missing, and no {files.evaluation.name} tells whether the target's folders told its labels"
    return f"its {name} is missing"


def _way_on(folder: Path) -> str:
    return f"remove {folder} and give the same command again"


def _cycles(files: RunFolder, metrics: Mapping[str, Any], metric: Metric) -> tuple[Cycles | None, float | None]:
    """(its adaptation, accuracy of the delivered model on the watched images); None for a run that did not adapt."""
    watched = metrics.get("watched")
    if not watched or len(watched["cycles"]) < 2:
        return None, None
    lines: list[dict[str, Any]] = []

    def predictions() -> Iterator[NDArray[np.float32]]:
        """Of the cycles, without the model that adaptation started from."""
        for cycle, scores, probabilities in files.journal.read_cycles():
            lines.append(scores)
            if cycle > 0:
                yield probabilities

    agreement = ensemble_agreement(predictions())
    if [line["cycle"] for line in lines] != watched["cycles"]:
        raise ValueError("the cycles of metrics.json and scores.jsonl differ")
    del lines[0]
    accuracy = [float(value) for value in watched[metric]]
    scores = {
        name: [DIRECTION[name] * float(line[name]) for line in lines]
        for name in DIRECTION
        if all(line.get(name) is not None for line in lines)
    }
    scores["ensv"] = agreement
    words = str(metrics["delivered"]["model"]).split()
    at = {"last": accuracy[-1], "pretrained": accuracy[0]}.get(words[0])
    if at is None:
        at = accuracy[watched["cycles"].index(int(words[1]))]
    return Cycles(accuracy[1:], scores, [not line.get("collapsed", False) for line in lines]), at


def _backbone(files: RunFolder) -> str:
    return str(read_settings_file(files.config).get("model.backbone", ""))


def results_csv(results: Sequence[Result]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for result in results:
        figures = [_figure(value) for value in (result.last, result.selected, result.oracle)]
        seconds = "" if result.seconds is None else f"{result.seconds:.1f}"
        status = " ".join(result.status.split())
        writer.writerow([result.task, result.method, result.seed, result.metric, *figures, seconds, status, result.run])
    return text.getvalue()


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


def earlier_runs(out: Path, knows: Callable[[str, str], bool]) -> list[tuple[str, str, int]]:
    """(task, method, seed) of the runs that `results.csv` of a benchmark's folder names, and of those whose folders are there:
    damage to the file loses none of them. `knows`: whether a folder's task and method are the benchmark's."""
    found = [*_named_runs(out / "results.csv")]
    for config in sorted((out / "runs").glob("*/*/*/config.yaml")):
        *_, task, method, seed, _ = config.parts
        if knows(task, method):
            found.append((task, method, seed))
    whole = [(task, method, int(seed)) for task, method, seed in found if _SEED.fullmatch(seed)]
    return [key for key in dict.fromkeys(whole) if all(_PLAIN.fullmatch(word) for word in key[:2])]


def _named_runs(path: Path) -> list[tuple[str, str, str]]:
    """None where there is no such file, or one of another kind; a damaged line is passed over."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        rows = list(csv.DictReader(io.StringIO(text)))
    except (OSError, csv.Error):
        return []
    named = [(row.get("task"), row.get("method"), row.get("seed")) for row in rows]
    return [(task, method, seed) for task, method, seed in named if task and method and seed]
