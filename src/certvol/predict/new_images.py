"""Predict images or features that the user names, and reject the least certain."""

import glob
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from certvol.data.decoding import UnreadableImage
from certvol.data.feature_files import is_feature_file, open_target_features
from certvol.data.folders import printable, scan
from certvol.errors import UserError
from certvol.nn.norm import TARGET
from certvol.predict import reject
from certvol.predict.forward import run_batches
from certvol.predict.max_error import Rule
from certvol.predict.measures import run_with_measures
from certvol.predict.model import PREDICT_BATCH, Model, Which, load
from certvol.predict.outcome import predictions_csv
from certvol.predict.target_table import IN_PREDICTIONS
from certvol.progress import Reporter
from certvol.runs.outputs import check_output, write_output


@dataclass(frozen=True)
class PredictOptions:
    """The options of `certvol predict`."""

    run: str
    images: Sequence[str]
    """Folders, image files and globs, or files of features."""
    out: str
    coverage: float | None = None
    min_certainty: float | None = None
    measure: str | None = None
    rejected_dir: str | None = None
    device: str = "auto"
    which: Which = "delivered"
    """The model to predict with: the run's, or the one before adaptation."""
    max_error: float | None = None


@dataclass
class Predicted:
    """The images that were predicted, and those that were skipped."""

    paths: list[str] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    """(path, reason) of each unreadable image."""
    accepted: NDArray[np.bool_] | None = None
    rule: str = ""
    """Describes which images were rejected."""
    max_error_rule: Rule | None = None
    """The rule that reviewed labels allow, if a maximum error was given."""


def predict(options: PredictOptions, reporter: Reporter) -> Predicted:
    coverage, max_error = options.coverage, options.max_error
    reject.check_options(coverage, options.min_certainty, options.rejected_dir, max_error)
    has_features = any(is_feature_file(word) for word in options.images)
    problems: list[tuple[str, str]] = []
    if has_features:
        paths = _each_once(options.images)
    else:
        paths, problems = image_paths(options.images)
    check_output(options.out, inputs=paths)
    if has_features and options.rejected_dir is not None:
        raise UserError(
            "--rejected-dir copies images, and files of features hold none; leave it out: the "
            "table says which rows are rejected"
        )
    sets_rule = coverage is not None or max_error is not None
    if options.which == "pretrained" and sets_rule:
        option = "--max-error" if coverage is None else "--coverage"
        raise UserError(
            f"{option} is set on the delivered model's predictions of the target, which are not "
            "the pretrained model's; give --min-certainty instead"
        )
    model = load(options.run, options.device, options.which)
    chosen = reject.choose_measure(options.measure, model.has_sigma, model.frozen)
    threshold, rule = options.min_certainty, None
    if sets_rule:
        rule = reject.choose_rule(options.run, chosen, coverage, max_error)
        threshold = rule.threshold
    folder = None if options.rejected_dir is None else Path(options.rejected_dir)
    if folder is not None:
        if Path(options.out).resolve() == (folder / reject.INDEX).resolve():
            raise UserError(
                f"--out {printable(options.out)} is the list of rejected images that "
                "--rejected-dir writes; give another file"
            )
        reject.check_folder(folder, options.images)
    found = Predicted()
    read = _feature_batches if has_features else _image_batches
    batches = read(model, paths, found, reporter)
    in_predictions = chosen in IN_PREDICTIONS
    if in_predictions:
        outputs = run_batches(model.method, batches, TARGET)
    else:
        outputs = run_with_measures(model.method, batches, TARGET, model.config.training)
    if not found.paths:
        path, reason = found.skipped[0]
        raise UserError(
            f"none of the {len(paths)} files can be read (such as {printable(path)}: {reason})"
        )
    outputs.refuse_faulty(found.paths, chosen)
    outputs = outputs.at_temperature(model.temperature)
    if threshold is not None:
        found.accepted = reject.is_certain(outputs.measures[chosen], chosen, threshold)
        found.rule = reject.describe_rule(chosen, threshold)
        found.max_error_rule = rule if max_error is not None else None
    column = None if in_predictions else chosen
    table = predictions_csv(found.paths, model.classes, outputs, found.accepted, column)
    write_output(options.out, table)
    if folder is not None and found.accepted is not None:
        reject.collect(folder, found.paths, model.classes, outputs, chosen, found.accepted)
    found.skipped += problems
    return found


def image_paths(images: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """Expand folders and globs; also return the entries of folders that cannot be read."""
    found: list[str] = []
    problems: list[tuple[str, str]] = []
    for word in images:  # os.path and glob keep names that are not Unicode, and absolute globs
        if Path(word).is_dir():
            listing = scan(word)
            problems += [(os.path.join(word, path), reason) for path, reason in listing.problems]  # noqa: PTH118
            found += [os.path.join(word, path) for path in listing.paths]  # noqa: PTH118
        elif Path(word).exists():
            found.append(word)
        elif matches := sorted(glob.glob(word, recursive=True)):  # noqa: PTH207
            found += [match for match in matches if not Path(match).is_dir()]
        else:
            raise UserError(f"there is no file, folder or match for `{word}`")
    if not found:
        raise UserError(f"no images in {', '.join(images)}")
    return _each_once(found), problems


def _each_once(paths: Sequence[str]) -> list[str]:
    """Drop paths to a file that an earlier path names in another way, such as `./a` after `a`.

    A link to an image is an image of its own.
    """
    real_of: dict[str, str] = {}
    by_file: dict[tuple[str, str], str] = {}
    for path in paths:
        folder, name = os.path.split(path)
        real = real_of.setdefault(folder, os.path.realpath(folder))
        by_file.setdefault((real, name), path)
    return list(by_file.values())


def _image_batches(
    model: Model, paths: list[str], found: Predicted, reporter: Reporter
) -> Iterator[Tensor]:
    """Yield batches of the readable images, and list these and the others in `found`."""
    model.check_images()

    def read(path: str) -> NDArray[np.uint8] | str:
        try:
            return model.read_pixels(path)
        except UnreadableImage as error:
            return str(error)

    reporter.start("predicting", len(paths))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(paths), PREDICT_BATCH):
            chunk = paths[start : start + PREDICT_BATCH]
            kept = []
            for path, pixels in zip(chunk, pool.map(read, chunk), strict=True):
                if isinstance(pixels, str):
                    found.skipped.append((path, pixels))
                else:
                    kept.append(pixels)
                    found.paths.append(path)
            reporter.advance(len(chunk))
            if kept:
                yield model.view(torch.from_numpy(np.stack(kept)))
    reporter.finish()


def _feature_batches(
    model: Model, files: list[str], found: Predicted, reporter: Reporter
) -> Iterator[Tensor]:
    """Yield batches of the features in files; of several views only the first, the test view."""
    reporter.start("predicting", len(files))
    file_of: dict[str, str] = {}
    for file in files:
        features = open_target_features(file)
        model.check_features(features.dim, file, features.about)
        _check_names(features.paths, file, file_of)
        found.paths += features.paths
        for start in range(0, len(features.rows), PREDICT_BATCH):
            rows = features.rows[start : start + PREDICT_BATCH]
            yield torch.from_numpy(features.features[rows, 0]).to(model.device)
        reporter.advance()
    reporter.finish()


def _check_names(names: Sequence[str], file: str, file_of: dict[str, str]) -> None:
    """Note the file of each row; UserError if another file has a row of the same name."""
    for name in names:
        if (other := file_of.get(name, file)) != file:
            raise UserError(
                f"{printable(other)} and {printable(file)} both have a row named "
                f"{printable(name)}, which the predictions could not tell apart; predict each file "
                "by itself, or give their rows different `paths`"
            )
    file_of |= dict.fromkeys(names, file)
