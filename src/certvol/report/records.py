"""Read what a run left on disk.

Records of old, unfinished and damaged runs can be read too: a missing or damaged file removes only
the parts of the report that need it, and `Record.notes` says so.
"""

import csv
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from certvol.data import Indices
from certvol.data.folders import printable
from certvol.runs.checkpoint import DAMAGE, OtherFormat, check_format, load_tensors, read_about
from certvol.runs.folder import RunFolder
from certvol.runs.tables import label_cell, read_metrics
from certvol.scores import uncertainty
from certvol.settings import read_settings_file, shown

Floats = NDArray[np.float64]
T = TypeVar("T")

MEASURES = {name: uncertainty.MEASURES[name] for name in ("sigma", *uncertainty.LABEL_FREE)}
"""The certainty measures that the report shows, sigma first. Declare a new one in `uncertainty`."""


@dataclass(frozen=True)
class Images:
    """The target images, one row each, in the order of predictions.csv and measures.csv."""

    paths: list[str]
    predicted_N: Indices
    true_N: Indices | None
    """None if the run has no labels."""
    measures: dict[str, Floats]


@dataclass(frozen=True, eq=False)
class Features:
    """The features of at most 2,000 target images."""

    rows_n: Indices
    pretrained_nD: NDArray[np.float32]
    adapted_nD: NDArray[np.float32]


@dataclass(frozen=True)
class Record:
    """Everything the report shows of a run."""

    path: Path
    settings: dict[str, Any]
    """All settings by their full names, such as `training.cycles`."""
    environment: dict[str, Any]
    about: dict[str, Any]
    """The metadata of the weights: method, classes, which model was delivered and why."""
    classes: list[str]
    history: list[dict[str, Any]]
    scores: list[dict[str, Any]]
    seconds: float | None
    metrics: dict[str, Any] | None
    verdict: dict[str, Any] | None
    images: Images | None
    evaluation: dict[str, Any] | None
    features: Features | None
    warnings: list[str]
    notes: list[str]

    @property
    def name(self) -> str:
        """The folder's name; for a benchmark's run also task and method: F-R/cvp/0."""
        parts = self.path.parts[-3:] if self.path.name.isdecimal() else self.path.parts[-1:]
        return printable("/".join(parts) or str(self.path))

    @property
    def method(self) -> str:
        return str(self.settings.get("method.name", "unknown"))

    @property
    def target(self) -> Path | None:
        place = self.settings.get("data.target")
        return Path(place) if isinstance(place, str) else None

    @property
    def certainty(self) -> str:
        """The measure that orders the images."""
        has_sigma = self.images is not None and "sigma" in self.images.measures
        return uncertainty.usual_measure(has_sigma, self.settings.get("model.train") == "head")


def read_record(path: str | Path) -> Record:
    """Read a run; UserError if `path` does not hold one."""
    folder = RunFolder(Path(path).absolute())
    folder.check_run()
    notes: list[str] = []

    def read(file: Path, parse: Callable[[Path], T]) -> T | None:
        if not file.exists():
            return None
        try:
            return parse(file)
        except OtherFormat as error:
            notes.append(f"{file.name} {error}. It was left out.")
            return None
        except (*DAMAGE, csv.Error) as error:
            reason = " ".join(str(error).split())[:120] or type(error).__name__
            notes.append(f"{file.name} is damaged and was left out: {printable(reason)}")
            return None

    about = read(folder.model, read_about) or read(folder.pretrained, read_about) or {}
    named = about.get("classes")
    classes = [str(name) for name in named] if isinstance(named, list) else []
    images, features = None, None
    if classes:
        # measures.csv has the columns of predictions.csv and more.
        images = read(folder.measures, lambda file: _images(file, classes))
        images = images or read(folder.predictions, lambda file: _images(file, classes))
    if images is not None:
        count = len(images.paths)
        features = read(folder.features, lambda file: _features(file, count))
    warnings = read(folder.warnings, _json_lines) or []
    if not folder.finished:
        notes.append("The run is not complete: this page shows what is there so far.")
    return Record(
        path=folder.path,
        settings=_plain_settings(read_settings_file(folder.config)),
        environment=read(folder.environment, _json_object) or {},
        about=about,
        classes=classes,
        history=read(folder.journal.history, _json_lines) or [],
        scores=read(folder.journal.scores, _json_lines) or [],
        seconds=_total_seconds(read(folder.timing, _json_lines) or []),
        metrics=read(folder.metrics, read_metrics),
        verdict=read(folder.verdict, _json_object),
        images=images,
        evaluation=read(folder.evaluation, _json_object),
        features=features,
        # A resumed run may have repeated a warning.
        warnings=list(dict.fromkeys(str(w["warning"]) for w in warnings if "warning" in w)),
        notes=notes,
    )


def number(value: Any) -> float | None:
    """Return a finite number as a float, and None for anything else a file may hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number of hundreds of digits
        return None


def numbers(values: Any) -> list[float | None]:
    return [number(value) for value in values] if isinstance(values, list) else []


def section(place: Any, *names: str) -> dict[str, Any]:
    """Return the mapping at a path of names; empty if there is none."""
    for name in names:
        place = place.get(name) if isinstance(place, Mapping) else None
    return dict(place) if isinstance(place, Mapping) else {}


def _json_object(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise TypeError("expected an object")
    if "format" in found:
        check_format(found["format"])
    return found


def _json_lines(file: Path) -> list[dict[str, Any]]:
    """Skip what is not a JSON object, such as a last line that was cut off."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            parsed = json.loads(line)
        except ValueError:
            continue
        if isinstance(parsed, dict):
            found.append(parsed)
    return found


def _images(file: Path, classes: list[str]) -> Images:
    with file.open(encoding="utf-8", errors="surrogateescape", newline="") as opened:
        names, *rows = filter(None, csv.reader(opened))
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    label_of = {label_cell(name): i for i, name in enumerate(classes)}

    def labels(cells: Sequence[str]) -> Indices:
        return np.array([label_of[cell] for cell in cells], dtype=np.int64)

    measures = {}
    for name in MEASURES:
        if all(cells := columns.get(name, ("",))):
            measures[name] = np.array([float(cell) for cell in cells])
            if not np.isfinite(measures[name]).all():
                raise ValueError(f"`{name}` has values that are not finite numbers")
    if "probability" not in measures:
        raise ValueError("it has no probabilities")
    truth = columns.get("truth", ("",))
    return Images(
        paths=list(columns["path"]),
        predicted_N=labels(columns["prediction" if "prediction" in columns else "label"]),
        true_N=labels(truth) if all(truth) else None,
        measures=measures,
    )


def _features(file: Path, count: int) -> Features:
    found = {name: tensor.numpy() for name, tensor in load_tensors(file).items()}
    rows_n = found["indices"].astype(np.int64)
    pretrained_nD, adapted_nD = (found[k].astype(np.float32) for k in ("pretrained", "adapted"))
    if rows_n.ndim != 1 or not len(rows_n) == len(pretrained_nD) == len(adapted_nD) >= 8:
        raise ValueError("too few images, or not the same images for both models")
    if rows_n.min() < 0 or rows_n.max() >= count:
        raise ValueError("its images are not those of predictions.csv")
    if not (np.isfinite(pretrained_nD).all() and np.isfinite(adapted_nD).all()):
        raise ValueError("some features are not finite numbers")
    return Features(rows_n, pretrained_nD, adapted_nD)


def _plain_settings(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Turn lists and mappings into text; YAML aliases can make them longer than memory."""
    plain = str | int | float | bool | None
    return {
        name: value if isinstance(value, plain) else shown(value) for name, value in flat.items()
    }


def _total_seconds(timing: list[dict[str, Any]]) -> float | None:
    """Add up the time of each part of a run that was stopped and resumed."""
    parts = [number(line.get("seconds")) for line in timing if line.get("phase") == "all"]
    return number(sum(part or 0.0 for part in parts)) if parts else None
