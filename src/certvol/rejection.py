"""Which images to accept, by any measure, and a folder of those a person should look at.

A threshold is in the measure's own units. It is set on the run's own target, without labels: the value that a given share of
those images reaches.
"""

import csv
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from certvol.analysis import Measured, certainty
from certvol.config import nearest
from certvol.data.folders import printable
from certvol.errors import UserError
from certvol.metrics import threshold_at
from certvol.tables import csv_text, name_cell, read_column, write_text
from certvol.training.run_folder import RunFolder
from certvol.uncertainty import LABEL_FREE, MEASURES

LONGEST_NAME = 100
INDEX = "index.csv"
IN_PREDICTIONS = ("probability", "sigma")  # measures that predictions.csv holds


def check_options(coverage: float | None, min_certainty: float | None, rejected_dir: str | None) -> None:
    if coverage is not None and not 0 < coverage <= 1:
        raise UserError(f"--coverage is a share above 0 and at most 1, found {coverage}")
    if min_certainty is not None and not math.isfinite(min_certainty):
        raise UserError(f"--min-certainty is a number, found {min_certainty}")
    if coverage is not None and min_certainty is not None:
        raise UserError("--coverage and --min-certainty both set the threshold: give one of them")
    if rejected_dir is not None and coverage is None and min_certainty is None:
        raise UserError("--rejected-dir needs --coverage or --min-certainty, which say what is rejected")


def choose_measure(name: str | None, has_sigma: bool) -> str:
    """The measure of this name; without one sigma, or the probability for a method without sigma."""
    if name is None:
        return "sigma" if has_sigma else "probability"
    if name not in LABEL_FREE:
        known = ", ".join(LABEL_FREE)
        raise UserError(f"there is no measure `{name}`{nearest(name, list(LABEL_FREE))} (measures: {known})")
    if name == "sigma" and not has_sigma:
        raise UserError("this run's method has no sigma; reject by another --measure, such as probability or entropy")
    return name


def target_threshold(run: str | Path, measure: str, coverage: float) -> float:
    """What the most certain `coverage` of the run's own target reach."""
    folder = RunFolder(run)
    table = folder.predictions if measure in IN_PREDICTIONS else folder.measures
    if not table.exists():
        raise UserError(f"--coverage by {measure} needs {table}, which is missing")
    try:
        values_N = np.array([float(value) for value in read_column(table, measure)], dtype=np.float32)
        if len(values_N) == 0 or not np.isfinite(values_N).all():
            raise ValueError(f"no figures under `{measure}`")
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise UserError(f"{table} is damaged or no table of a run: {error}") from None
    threshold = threshold_at(certainty(measure, values_N), coverage)
    return threshold if MEASURES[measure].more_is_certain else -threshold


def accept(measured: Measured, measure: str, threshold: float) -> NDArray[np.bool_]:
    """Images at least as certain as the threshold."""
    least = certainty(measure, np.array([threshold], dtype=np.float32))[0]
    return np.asarray(measured.certainty(measure) >= least)


def in_words(measure: str, threshold: float) -> str:
    return f"{measure} {'below' if MEASURES[measure].more_is_certain else 'above'} {threshold:.4g}"


def check_folder(folder: Path, inputs: Sequence[str] = ()) -> None:
    """Before any work: images of two goes in one folder would be taken for one order of certainty. `inputs`: the images given."""
    place = folder.absolute()
    for given in inputs:
        if Path(given).is_dir() and place.is_relative_to(Path(given).absolute()):
            raise UserError(
                f"{folder} lies inside {given}, where copies would be taken for images to predict; give another --rejected-dir"
            )
    try:
        if folder.exists() and next(folder.iterdir(), None) is not None:
            raise UserError(f"{folder} is not empty; give a new folder as --rejected-dir")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot use {folder} for rejected images: {error.strerror or error}") from None


def collect(
    folder: Path,
    paths: Sequence[str],
    classes: Sequence[str],
    measured: Measured,
    measure: str,
    accepted_N: NDArray[np.bool_],
) -> None:
    """Copies of the rejected images, the least certain first by name, and an index of where each comes from."""
    certainty_N = measured.certainty(measure)
    rejected = sorted(np.flatnonzero(~accepted_N).tolist(), key=lambda i: (certainty_N[i], paths[i]))
    digits = max(4, len(str(len(rejected))))
    rows = []
    for number, i in enumerate(rejected, start=1):
        name = _copy(Path(paths[i]), folder, f"{number:0{digits}d}", safe_name(paths[i]))
        label, value = classes[measured.predicted_N[i]], f"{measured.values[measure][i]:.9g}"
        rows.append([name, name_cell(paths[i], "./"), name_cell(label, "'"), value])
    write_text(folder / INDEX, csv_text(["file", "path", "label", measure], rows))


def safe_name(path: str) -> str:
    """The file's own name in plain letters, digits, dot, dash and underscore, and not too long for any file system."""
    stem, dot, suffix = Path(path).name.rpartition(".")
    clean = [re.sub(r"[^\w-]+", "_", part, flags=re.ASCII) for part in (stem, suffix)]
    return clean[0][:LONGEST_NAME] + dot + clean[1][: 10 if dot else LONGEST_NAME]


def _copy(source: Path, folder: Path, number: str, name: str) -> str:
    """The name it got. What is there already is never touched; where copying fails, a link takes the copy's place."""
    for attempt in range(1, 1000):
        tried = f"{number}_{name}" if attempt == 1 else f"{number}-{attempt}_{name}"
        place = folder / tried
        try:
            with place.open("xb") as copy:
                try:
                    with source.open("rb") as original:
                        shutil.copyfileobj(original, copy)
                        copy.flush()
                    return tried
                except OSError:
                    place.unlink(missing_ok=True)
            place.symlink_to(source.absolute())
            return tried
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"cannot put {printable(str(source))} into {folder}: {error.strerror or error}") from None
    raise UserError(f"{folder} is being filled by another process; give a folder of its own as --rejected-dir")
