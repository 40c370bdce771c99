"""What a run wrote, read back for its report.

Runs of any age and from anywhere are read: a file that is missing or damaged costs its own sections of the page and no more,
and `Record.notes` says so.
"""

import csv
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load

from certvol import uncertainty
from certvol.config import read_settings_file, shown
from certvol.data.folders import printable
from certvol.errors import UserError
from certvol.tables import FORMULA_SIGNS, unquoted
from certvol.training.checkpoint import read_about
from certvol.training.run_folder import RunFolder

Floats = NDArray[np.float64]
T = TypeVar("T")
_DAMAGED = (
    OSError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    RecursionError,
    csv.Error,
    SafetensorError,
)


# Of the columns of measures.csv, those that need no label, the preferred first.
MEASURES = {
    "sigma": uncertainty.MEASURES["sigma"],
    **{name: uncertainty.MEASURES[name] for name in uncertainty.LABEL_FREE},
}
LABELLED_MEASURES = {name: measure.title for name, measure in uncertainty.MEASURES.items() if measure.needs_labels}


@dataclass(frozen=True)
class Images:
    """A row per target image, in the order of predictions.csv."""

    paths: list[str]
    predicted_N: NDArray[np.int64]
    true_N: NDArray[np.int64] | None
    """None where the run knows no labels, or did not write them down."""
    measures: dict[str, Floats]

    @property
    def certainty(self) -> str:
        """The measure that orders the images: sigma, or else the largest probability."""
        return "sigma" if "sigma" in self.measures else "probability"


@dataclass(frozen=True, eq=False)
class Features:
    """Of at most 2,000 target images."""

    rows_n: NDArray[np.int64]
    pretrained_nD: NDArray[np.float32]
    adapted_nD: NDArray[np.float32]


@dataclass(frozen=True)
class Record:
    path: Path
    settings: dict[str, Any]
    """Flat: `training.cycles` -> 40."""
    environment: dict[str, Any]
    about: dict[str, Any]
    """What the weights say of themselves: method, classes, which model was delivered and why."""
    classes: list[str]
    history: list[dict[str, Any]]
    scores: list[dict[str, Any]]
    seconds: float | None
    metrics: dict[str, Any] | None
    images: Images | None
    evaluation: dict[str, Any] | None
    features: Features | None
    warnings: list[str]
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its folder's; of one that is only a number, as a benchmark names them, with those above it: F-R/cvp/0."""
        parts = self.path.parts[-3:] if self.path.name.isdecimal() else self.path.parts[-1:]
        return printable("/".join(parts) or str(self.path))

    @property
    def method(self) -> str:
        return str(self.settings.get("method.name", "unknown"))

    @property
    def target(self) -> Path | None:
        place = self.settings.get("data.target")
        return Path(place) if isinstance(place, str) else None


def read_record(path: str | Path) -> Record:
    """Raises UserError where `path` is no run; of a run that has not ended there is less to see."""
    folder = RunFolder(Path(path).absolute())
    if not folder.holds_a_run:
        raise UserError(
            f"{printable(str(path))} holds no run (no config.yaml); expected a folder that `certvol adapt` made"
        )
    folder.check_links()
    notes: list[str] = []

    def read(file: Path, how: Callable[[Path], T]) -> T | None:
        if not file.exists():
            return None
        try:
            return how(file)
        except _DAMAGED as error:
            reason = " ".join(str(error).split())[:120] or type(error).__name__
            notes.append(f"{file.name} is damaged and was left out: {printable(reason)}")
            return None

    about = read(folder.model, read_about) or read(folder.pretrained, read_about) or {}
    metrics = read(folder.metrics, _metrics)
    evaluation = read(folder.path / "evaluation.json", _json_object)
    measured = read(folder.path / "measures.csv", _columns)
    predicted = read(folder.predictions, _columns)
    classes = _classes(about, metrics, predicted)
    images = None
    if predicted is not None:
        images = read(folder.predictions, lambda _: _images(predicted, None, classes))
    if images is not None and measured is not None and predicted is not None:
        images = read(folder.path / "measures.csv", lambda _: _images(predicted, measured, classes)) or images
    features = None
    if images is not None:
        count = len(images.paths)
        features = read(folder.path / "features.safetensors", lambda file: _features(file, count))
    if not folder.finished:
        notes.append("The run is not complete: this page shows what there is so far.")
    return Record(
        path=folder.path,
        settings=_printable_settings(read_settings_file(folder.config)),
        environment=read(folder.environment, _json_object) or {},
        about=about,
        classes=classes,
        history=read(folder.journal.history, _lines) or [],
        scores=read(folder.journal.scores, _lines) or [],
        seconds=_whole_time(read(folder.timing, _lines) or []),
        metrics=metrics,
        images=images,
        evaluation=evaluation,
        features=features,
        warnings=_warnings(read(folder.path / "warnings.jsonl", _lines) or []),
        notes=notes,
    )


def number(value: Any) -> float | None:
    """A finite number, or None for anything else that a file may hold in its place."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def numbers(values: Any) -> list[float | None]:
    return [number(value) for value in values] if isinstance(values, list) else []


def section(place: Any, *names: str) -> dict[str, Any]:
    """The mapping at a path of names; empty where there is none."""
    for name in names:
        place = place.get(name) if isinstance(place, Mapping) else None
    return dict(place) if isinstance(place, Mapping) else {}


def _json_object(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise TypeError("expected an object")
    return found


def _metrics(file: Path) -> dict[str, Any]:
    found = _json_object(file)
    for key in ("source_only", "adapted"):
        if number(found[key]["accuracy"]) is None or not isinstance(found[key]["per_class"], dict):
            raise ValueError(f"no figures of `{key}`")
    return found


def _lines(file: Path) -> list[dict[str, Any]]:
    """A last line that was cut off while being written is left out."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            parsed = json.loads(line)
        except ValueError:
            continue
        if isinstance(parsed, dict):
            found.append(parsed)
    return found


def _columns(file: Path) -> dict[str, list[str]]:
    with file.open(encoding="utf-8", errors="surrogateescape", newline="") as opened:
        reader = csv.reader(opened)
        names = next(reader, [])
        rows = [row for row in reader if row]
    if not rows or "path" not in names or any(len(row) != len(names) for row in rows):
        raise ValueError("no table with a row per image")
    return dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))


def _unescaped(cell: str) -> str:
    """A class name as it was before tables.py kept spreadsheets from running it."""
    return cell[1:] if cell.startswith("'") and cell[1:].startswith(FORMULA_SIGNS) else unquoted(cell)


def _classes(
    about: Mapping[str, Any], metrics: Mapping[str, Any] | None, predicted: Mapping[str, list[str]] | None
) -> list[str]:
    named = about.get("classes")
    if isinstance(named, list) and named and all(isinstance(name, str) for name in named):
        return list(named)
    if metrics is not None:
        return [str(name) for name in metrics["adapted"]["per_class"]]
    return sorted({_unescaped(label) for label in (predicted or {}).get("label", [])})


def _images(predicted: Mapping[str, list[str]], measured: Mapping[str, list[str]] | None, classes: list[str]) -> Images:
    position = {name: i for i, name in enumerate(classes)}

    def labels(cells: list[str]) -> NDArray[np.int64]:
        return np.array([position[_unescaped(cell)] for cell in cells], dtype=np.int64)

    source = predicted if measured is None else measured
    if source["path"] != predicted["path"]:
        raise ValueError("its images are not those of predictions.csv")
    measures: dict[str, Floats] = {}
    for name in MEASURES:
        cells = source.get(name) or []
        if cells and all(cells):
            values = np.array([float(cell) for cell in cells])
            if not np.isfinite(values).all():
                raise ValueError(f"`{name}` holds what is no finite number")
            measures[name] = values
    if "probability" not in measures:
        raise ValueError("no probabilities")
    truth = source.get("truth") or []
    return Images(
        paths=[unquoted(cell) for cell in predicted["path"]],
        predicted_N=labels(predicted["label"]),
        true_N=labels(truth) if truth and all(truth) else None,
        measures=measures,
    )


def _features(file: Path, count: int) -> Features:
    found = load(file.read_bytes())  # safetensors itself opens no path that is not Unicode
    rows_n = found["indices"].astype(np.int64)
    pretrained_nD, adapted_nD = (found[name].astype(np.float32) for name in ("pretrained", "adapted"))
    if rows_n.ndim != 1 or len(rows_n) < 8 or not len(rows_n) == len(pretrained_nD) == len(adapted_nD):
        raise ValueError("too few images, or not the same for both models")
    if rows_n.min() < 0 or rows_n.max() >= count:
        raise ValueError("its images are not those of predictions.csv")
    if not (np.isfinite(pretrained_nD).all() and np.isfinite(adapted_nD).all()):
        raise ValueError("some features are no finite numbers")
    return Features(rows_n, pretrained_nD, adapted_nD)


def _printable_settings(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A settings file may hold anything, also what aliases make longer than memory."""
    return {
        name: value if isinstance(value, str | int | float | bool | None) else shown(value)
        for name, value in flat.items()
    }


def _whole_time(lines: list[dict[str, Any]]) -> float | None:
    whole = [
        seconds for line in lines if line.get("phase") == "all" and (seconds := number(line.get("seconds"))) is not None
    ]
    return sum(whole) if whole else None


def _warnings(lines: list[dict[str, Any]]) -> list[str]:
    """Each once: a run that was resumed may have warned again."""
    return list(dict.fromkeys(str(line["warning"]) for line in lines if "warning" in line))
