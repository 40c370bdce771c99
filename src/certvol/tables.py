"""Predictions and figures as files."""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from certvol.metrics import accuracy, mean_class_accuracy, per_class_accuracy
from certvol.training.checkpoint import write_atomically

FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")


def no_formula(cell: str, mark: str) -> str:
    """A cell that a spreadsheet would run starts with `mark` instead."""
    return mark + cell if cell.startswith(FORMULA_SIGNS) else cell


def csv_text(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells that come from outside have passed `no_formula`."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    # Python before 3.13 leaves a CR unquoted where lines end with LF alone, and readers take it for the end of a line.
    quoting = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerow(header)
    for row in rows:
        (quoting if any("\r" in cell for cell in row) else writer).writerow(row)
    return text.getvalue()


class Predicted(Protocol):
    """Of N images."""

    @property
    def labels_N(self) -> NDArray[np.int64]: ...
    @property
    def confidence_N(self) -> NDArray[np.float32]: ...
    @property
    def sigma_N(self) -> NDArray[np.float32] | None: ...


def predictions_csv(
    paths: list[str],
    classes: list[str],
    outputs: Predicted,
    accepted: NDArray[np.bool_] | None = None,
    measure: tuple[str, NDArray[np.float32]] | None = None,
) -> str:
    """path,label,probability,sigma, in the order of the paths; sigma is empty for a method without one. `measure`: a column more.

    Nine digits, so that a threshold read back is the float it was.
    """
    header = ["path", "label", "probability", "sigma"]
    header += [measure[0]] if measure is not None else []
    header += ["accepted"] if accepted is not None else []
    labels, confidence, sigma_N = outputs.labels_N, outputs.confidence_N, outputs.sigma_N

    def cells(i: int) -> list[str]:
        sigma = "" if sigma_N is None else f"{sigma_N[i]:.9g}"
        # With ./ before it a path still leads to the file.
        row = [no_formula(paths[i], "./"), no_formula(classes[labels[i]], "'"), f"{confidence[i]:.9g}", sigma]
        row += [f"{measure[1][i]:.9g}"] if measure is not None else []
        return row + ([str(bool(accepted[i])).lower()] if accepted is not None else [])

    return csv_text(header, map(cells, sorted(range(len(paths)), key=paths.__getitem__)))


def write_text(path: Path, text: str) -> None:
    """File names that are not valid Unicode keep their bytes."""
    write_atomically(path, text.encode("utf-8", "surrogateescape"))


def figures(predicted_N: NDArray[np.int64], true_N: NDArray[np.int64], classes: list[str]) -> dict[str, Any]:
    per_class = per_class_accuracy(predicted_N, true_N, len(classes))
    return {
        "accuracy": accuracy(predicted_N, true_N),
        "mean_class_accuracy": mean_class_accuracy(predicted_N, true_N, len(classes)),
        "per_class": {name: None if np.isnan(a) else float(a) for name, a in zip(classes, per_class, strict=True)},
        "images": len(true_N),
    }


def read_metrics(path: Path) -> dict[str, Any]:
    """ValueError, KeyError, TypeError or RecursionError where they are not those of a run."""
    found = json.loads(path.read_text(encoding="utf-8"))
    for key in ("source_only", "adapted"):
        float(found[key]["accuracy"]), float(found[key]["mean_class_accuracy"])
    if not isinstance(found["delivered"], dict):
        raise TypeError("`delivered` is no section")
    return dict(found)


def read_column(path: Path, name: str) -> list[str]:
    with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        return [row[name] for row in csv.DictReader(file)]
