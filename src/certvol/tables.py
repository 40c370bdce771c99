"""Predictions and figures as files."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from certvol.inference import Outputs
from certvol.metrics import accuracy, mean_class_accuracy, per_class_accuracy
from certvol.training.checkpoint import write_atomically

FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")


def _no_formula(cell: str, mark: str) -> str:
    """A cell that a spreadsheet would run starts with `mark` instead."""
    return mark + cell if cell.startswith(FORMULA_SIGNS) else cell


def predictions_csv(
    paths: list[str], classes: list[str], outputs: Outputs, accepted: NDArray[np.bool_] | None = None
) -> str:
    """path,label,probability,sigma, in the order of the paths; sigma is empty for a method without one.

    Nine digits, so that a threshold read back is the float it was.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    # Python before 3.13 leaves a CR unquoted where lines end with LF alone, and readers take it for the end of a line.
    quoting = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerow(["path", "label", "probability", "sigma", *(["accepted"] if accepted is not None else [])])
    labels, confidence = outputs.labels_N, outputs.confidence_N
    for i in sorted(range(len(paths)), key=paths.__getitem__):
        sigma = "" if outputs.sigma_N is None else f"{outputs.sigma_N[i]:.9g}"
        # With ./ before it a path still leads to the file.
        row = [_no_formula(paths[i], "./"), _no_formula(classes[labels[i]], "'"), f"{confidence[i]:.9g}", sigma]
        (quoting if "\r" in row[0] + row[1] else writer).writerow(
            row + ([str(bool(accepted[i])).lower()] if accepted is not None else [])
        )
    return text.getvalue()


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
