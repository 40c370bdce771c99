"""Choose which images to accept by a measure of certainty, and collect the others for a person.

A threshold is in the measure's own units. `--coverage` sets it on the run's own target, without
labels: it is the value that this share of the target images reaches. `--max-error` sets it by
reviewed labels.
"""

import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from certvol.data.folders import printable
from certvol.errors import UserError
from certvol.predict.forward import Outputs, certainty
from certvol.predict.max_error import Rule, rule_by_labels
from certvol.predict.measures import threshold_at
from certvol.predict.target_table import target_values
from certvol.runs.outputs import check_outside
from certvol.runs.tables import csv_text, label_cell, path_cell, write_text
from certvol.scores.uncertainty import LABEL_FREE, MEASURES, usual_measure
from certvol.settings import nearest

LONGEST_NAME = 100
INDEX = "index.csv"
AUTO = "auto"


def check_options(
    coverage: float | None,
    min_certainty: float | None,
    rejected_dir: str | None,
    max_error: float | None = None,
) -> None:
    if coverage is not None and not 0 < coverage <= 1:
        raise UserError(f"--coverage must be above 0 and at most 1, found {coverage}")
    if min_certainty is not None and not math.isfinite(min_certainty):
        raise UserError(f"--min-certainty must be a number, found {min_certainty}")
    if max_error is not None and not 0 < max_error < 1:
        raise UserError(f"--max-error must lie between 0 and 1, found {max_error}")
    options = {"--coverage": coverage, "--min-certainty": min_certainty, "--max-error": max_error}
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise UserError(f"{given[0]} and {given[1]} both set the threshold; give one of them")
    if rejected_dir is not None and not given:
        raise UserError(
            "--rejected-dir needs --coverage, --min-certainty or --max-error; add one of them"
        )


def choose_measure(name: str | None, has_sigma: bool, frozen: bool) -> str:
    """Return the named measure; for None or `auto` the usual one, given the run's backbone."""
    if name is None or name == AUTO:
        return usual_measure(has_sigma, frozen)
    if name not in LABEL_FREE:
        hint = nearest(name, [AUTO, *LABEL_FREE])
        raise UserError(
            f"unknown measure `{name}`{hint} (measures: {', '.join((AUTO, *LABEL_FREE))})"
        )
    if name == "sigma" and not has_sigma:
        raise UserError(
            "this run's method has no sigma; give another --measure, such as probability or entropy"
        )
    return name


def choose_rule(
    run: str | Path, measure: str, coverage: float | None = None, max_error: float | None = None
) -> Rule:
    """Set the threshold by a share of the run's target, or by the labels in RUN/review.csv."""
    if max_error is not None:
        return rule_by_labels(run, measure, max_error)
    if coverage is None:
        raise UserError("give a coverage or a maximum error")
    _, values_N = target_values(run, measure, "--coverage")
    threshold = threshold_at(measure, values_N, coverage)
    return Rule(measure, threshold, float(is_certain(values_N, measure, threshold).mean()))


def is_certain(values_N: NDArray[np.float32], measure: str, threshold: float) -> NDArray[np.bool_]:
    """Return which images are at least as certain as the threshold."""
    least = certainty(measure, np.float32(threshold))
    return np.asarray(certainty(measure, values_N) >= least)


def describe_rule(measure: str, threshold: float) -> str:
    """Describe the rejected images, such as `sigma below 0.5`."""
    return f"{measure} {'below' if MEASURES[measure].more_is_certain else 'above'} {threshold:.4g}"


def check_folder(folder: Path, inputs: Sequence[str] = ()) -> None:
    """Make an empty folder for rejected images, outside the images to predict."""
    check_outside(folder, inputs, "--rejected-dir")
    try:
        if folder.exists() and next(folder.iterdir(), None) is not None:
            raise UserError(f"{folder} is not empty; give a new folder as --rejected-dir")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"cannot use {folder} for rejected images: {reason}") from None


def collect(
    folder: Path,
    paths: Sequence[str],
    classes: Sequence[str],
    outputs: Outputs,
    measure: str,
    accepted_N: NDArray[np.bool_],
) -> None:
    """Copy the rejected images, named in order of certainty, and write an index of their paths."""
    values_N, labels_N = outputs.measures[measure], outputs.labels_N
    rejected = np.flatnonzero(~accepted_N).tolist()
    certainty_N = certainty(measure, values_N)
    rejected.sort(key=lambda i: (certainty_N[i], paths[i]))
    digits = max(4, len(str(len(rejected))))
    rows = []
    for number, i in enumerate(rejected, start=1):
        name = _copy(Path(paths[i]), folder, f"{number:0{digits}d}")
        label = label_cell(classes[labels_N[i]])
        rows.append([name, path_cell(paths[i]), label, f"{values_N[i]:.9g}"])
    write_text(folder / INDEX, csv_text(["file", "path", "label", measure], rows))


def safe_name(path: Path) -> str:
    """Reduce the file's name to ASCII letters, digits, dot, dash and underscore, and shorten it."""
    stem, dot, suffix = path.name.rpartition(".")
    stem, suffix = (re.sub(r"[^\w-]+", "_", part, flags=re.ASCII) for part in (stem, suffix))
    return stem[:LONGEST_NAME] + dot + suffix[: 10 if dot else LONGEST_NAME]


def _copy(source: Path, folder: Path, number: str) -> str:
    """Copy an image and return its name."""
    place = folder / f"{number}_{safe_name(source)}"
    try:
        shutil.copyfile(source, place)
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"cannot copy {printable(source)} into {folder}: {reason}") from None
    return place.name
