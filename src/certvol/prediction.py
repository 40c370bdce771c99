"""Labels and certainty for any images or features, by a run's model, as CSV; and which of them to look at."""

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from certvol import analysis, model, rejection
from certvol.data.feature_files import is_feature_file
from certvol.data.folders import printable, scan
from certvol.errors import UserError
from certvol.inference import run_batches
from certvol.nn.norm import TARGET
from certvol.outputs import check_output
from certvol.reporting import Reporter
from certvol.tables import predictions_csv, write_text_anywhere


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    run: str
    images: Sequence[str]
    """Folders, files or globs; or files of features."""
    out: str
    coverage: float | None = None
    min_certainty: float | None = None
    measure: str | None = None
    rejected_dir: str | None = None
    device: str = "auto"


@dataclass
class Predicted:
    """What came of it."""

    paths: list[str] = field(default_factory=list)
    """Of what could be read, in the order of the measures."""
    skipped: list[tuple[str, str]] = field(default_factory=list)
    """(path, reason)."""
    accepted: NDArray[np.bool_] | None = None
    rule: str = ""
    """By which images were accepted, in words."""


def predict(request: Request, reporter: Reporter) -> Predicted:
    check_output(request.out)
    rejection.check_options(request.coverage, request.min_certainty, request.rejected_dir)
    of_features = any(is_feature_file(word) for word in request.images)
    paths, problems = (list(request.images), []) if of_features else image_paths(request.images)
    if of_features and request.rejected_dir is not None:
        raise UserError(
            "--rejected-dir collects images, which files of features do not hold; the CSV marks what is rejected"
        )
    loaded = model.load(request.run, request.device)
    measure = rejection.choose_measure(request.measure, loaded.has_sigma)
    threshold = request.min_certainty
    if request.coverage is not None:
        threshold = rejection.target_threshold(request.run, measure, request.coverage)
    if request.rejected_dir is not None:
        rejection.check_folder(Path(request.rejected_dir), request.images)
    found = Predicted()
    if of_features:
        batches = model.feature_batches(loaded, paths, found.paths)
    else:
        batches = model.read_batches(loaded, paths, reporter, found.paths, found.skipped)
    if measure in rejection.IN_PREDICTIONS:
        measured, column = analysis.measured_by(run_batches(loaded.method, batches, TARGET)), None
    else:
        measured = analysis.measure(loaded.method, batches, TARGET, loaded.config.training)
        column = (measure, measured.values[measure]) if found.paths else None
    if not found.paths:
        path, reason = found.skipped[0]
        raise UserError(f"none of the {len(paths)} files can be read (such as {printable(path)}: {reason})")
    if threshold is not None:
        found.accepted = rejection.accept(measured, measure, threshold)
        found.rule = rejection.in_words(measure, threshold)
    write_text_anywhere(
        Path(request.out), predictions_csv(found.paths, loaded.classes, measured, found.accepted, column)
    )
    if request.rejected_dir is not None and found.accepted is not None:
        folder = Path(request.rejected_dir)
        rejection.collect(folder, found.paths, loaded.classes, measured, measure, found.accepted)
    found.skipped += problems
    return found


def image_paths(images: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """(files, what folders hold that cannot be read). Folders are read whole, globs expanded, files taken as they are."""
    found: list[str] = []
    problems: list[tuple[str, str]] = []
    for word in images:
        if Path(word).is_dir():
            listing = scan(word)
            problems += [(os.path.join(word, path), reason) for path, reason in listing.problems]  # noqa: PTH118
            found += [os.path.join(word, path) for path in listing.paths]  # noqa: PTH118 (a glob may give bytes Path alters)
        elif Path(word).exists():
            found.append(word)
        elif matches := sorted(glob.glob(word, recursive=True)):  # noqa: PTH207 (absolute patterns, which Path.glob refuses)
            found += [match for match in matches if not Path(match).is_dir()]
        else:
            raise UserError(f"there is no file, folder or match for `{word}`")
    if not found:
        raise UserError(f"no images in {', '.join(images)}")
    return list(dict.fromkeys(found)), problems
