"""Evaluate a run's models on labelled data. Only this module reads labels of a target."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from certvol.data.check_target import NAMED, folder_names, similar
from certvol.data.domains import TargetImages, open_target
from certvol.data.feature_files import (
    TargetFeatures,
    is_feature_file,
    known_labels,
    labels_and_names,
    open_target_features,
    stamp_of,
)
from certvol.data.folders import (
    class_level,
    class_of,
    folder_labels,
    known_folder_labels,
    printable,
)
from certvol.data.store import Store
from certvol.errors import UserError
from certvol.nn.norm import TARGET
from certvol.predict import measures as measuring
from certvol.predict.forward import domain_at_start, run_batches
from certvol.predict.model import PREDICT_BATCH, Model, load
from certvol.progress import Reporter, Silent
from certvol.scores.uncertainty import usual_measure

TargetData = TargetImages | TargetFeatures


def target_labels(
    target: TargetData, place: str | Path, classes: list[str], reporter: Reporter
) -> NDArray[np.int64] | None:
    """Return the class of each image of the target at `place`; None unless all have a label."""
    if isinstance(target, TargetFeatures):
        if stamp_of(place) != target.stamp:  # its rows may have another order now
            reporter.warn(
                f"{printable(place)} changed since the run began, so its labels are not used to "
                "measure accuracy; use `certvol evaluate`"
            )
            return None
        return known_labels(place, target.rows, classes)
    return folder_labels(target.paths, classes)


@dataclass(frozen=True, eq=False)
class KnownPart:
    """The images in folders named like the run's classes, and how many lie in which others."""

    rows_P: NDArray[np.int64]
    true_P: NDArray[np.int64]
    others: Counter[str]


def known_part(target: TargetData, place: str | Path, classes: list[str]) -> KnownPart:
    if isinstance(target, TargetFeatures):
        labels_N, names = labels_and_names(place, target.rows, classes)
    else:
        labels_N = known_folder_labels(target.paths, classes)
        level = class_level(target.paths)
        names = [class_of(path, level) or "" for path in target.paths]
    rows_P = np.flatnonzero(labels_N >= 0)
    others = Counter(name for name, label in zip(names, labels_N, strict=True) if label < 0)
    return KnownPart(rows_P, labels_N[rows_P], others)


def evaluate(
    run: str | Path,
    data: str | Path,
    device: str = "auto",
    reporter: Reporter | None = None,
    *,
    unknown: str | Path | None = None,
    oscillation: bool = False,
) -> dict[str, Any]:
    """Evaluate the pretrained and the delivered model on a labelled folder or file of features.

    Images of other classes than the run's are left out and counted as `other_classes`.
    `predict/measures.py` lists the content of the result. `recommended` is the measure to use: the
    usual one, unless another is clearly better. `unknown` holds images of other classes, and
    measures how well certainty separates them. `oscillation` also measures the oscillation of the
    decision boundary; for a method with its own head, `left_out` says why it is missing.
    """
    reporter = reporter or Silent()
    model = load(run, device)
    classes, settings, method = model.classes, model.config.training, model.method
    left_out = {}
    if oscillation and measuring.linear_layers(method) is None:
        left_out["oscillation"] = measuring.NO_OSCILLATION
        reporter.warn(f"the oscillation is left out: {measuring.NO_OSCILLATION}")
    target = _open(data, model, reporter)
    known = known_part(target, data, classes)
    true_N = known.true_P
    if len(true_N) == 0:
        raise UserError(_explain_missing_labels(target, data, classes))
    if known.others:
        reporter.warn(_explain_others(known, classes))
    others = None
    if unknown is not None:
        others = _open(unknown, model, reporter)
        others_U = _unknown_images(others, unknown, classes, reporter)
    pretrained = load(run, device, "pretrained")
    batches = _test_batches(target, pretrained, known.rows_P)
    before = run_batches(pretrained.method, batches, domain_at_start(pretrained.config))
    names = [target.paths[row] for row in known.rows_P]
    before.refuse_faulty(names)
    picked_K = None
    if oscillation and not left_out:
        picked_K = measuring.oscillation_images(true_N, settings.seed)
    batches = _test_batches(target, model, known.rows_P)
    outputs = measuring.run_with_measures(method, batches, TARGET, settings, true_N, picked_K)
    outputs.refuse_faulty(names)
    outputs = outputs.at_temperature(model.temperature)
    figures = None if picked_K is None else measuring.oscillation(outputs.features_KD, method)
    found = {
        "run": str(run),
        "data": str(data),
        **({} if model.config.model.start is None else {"start": model.config.model.start}),
        "source_only": measuring.accuracy_figures(before.labels_N, true_N, classes),
        "adapted": measuring.accuracy_figures(outputs.labels_N, true_N, classes),
        **measuring.certainty_figures(outputs, classes, true_N, figures),
    }
    usual = usual_measure(model.has_sigma, model.frozen)
    right = int((outputs.labels_N == true_N).sum())
    wrong = len(true_N) - right
    found["recommended"] = measuring.recommended(found["auroc"], right, wrong, usual)
    if known.others:
        found["other_classes"] = dict(known.others)
    if left_out:
        found["left_out"] = left_out
    if others is not None:
        foreign = measuring.run_with_measures(
            method, _test_batches(others, model, others_U), TARGET, settings
        )
        foreign.refuse_faulty([others.paths[row] for row in others_U])
        foreign = foreign.at_temperature(model.temperature)
        separation = measuring.open_set_figures(outputs, foreign)
        best = measuring.recommended(separation["auroc"], len(true_N), separation["images"], usual)
        found["unknown"] = {"data": str(unknown), **separation, "recommended": best}
    return found


def _unknown_images(
    others: TargetData, place: str | Path, classes: list[str], reporter: Reporter
) -> NDArray[np.int64]:
    """Return the numbers of the images given as unknown that are in no folder of a known class.

    If all are in such folders, return all: their names then mean something else.
    """
    known, count = known_part(others, place, classes).rows_P, len(others)
    if len(known) == count:
        reporter.warn(
            f"the folders in {place} are named like the run's classes; give --unknown a "
            "folder with images of other classes"
        )
    elif len(known):
        reporter.warn(
            f"{len(known)} of the {count} images in {place} are of the run's classes, so they are "
            "left out of the unknown ones"
        )
        return np.setdiff1d(np.arange(count), known)
    return np.arange(count)


def _explain_missing_labels(target: TargetData, data: str | Path, classes: list[str]) -> str:
    among = f"one of the run's {len(classes)} classes, such as {classes[0]}"
    if isinstance(target, TargetFeatures):
        why = f"its array `labels` must name {among}, for each row to measure"
    else:
        stray = min(target.paths)
        why = f"{printable(stray)} does not lie in a folder named like {among}/"
        hints = {name: similar(name, classes) for name in folder_names(target.paths)}
        if (hint := next((each for each in hints.values() if each), None)) is not None:
            why += f" (did you mean {printable(hint)}?)"
    return f"{data} labels no image: {why}; `certvol predict` needs no labels"


def _explain_others(known: KnownPart, classes: list[str]) -> str:
    """Say which images are left out, such as `12 in mugs (did you mean mug?)`."""
    parts = []
    for name, count in known.others.most_common(NAMED):
        near = similar(name, classes) if name else None
        hint = f" (did you mean {printable(near)}?)" if near else ""
        parts.append(f"{count} in {printable(name) or 'no class folder'}{hint}")
    if len(known.others) > NAMED:
        parts.append(f"... {len(known.others)} folders in all")
    return (
        f"measured {len(known.rows_P)} images of the run's classes; "
        f"{known.others.total()} others are left out: {', '.join(parts)}. If they are of other "
        "classes, give their folder as --unknown"
    )


def _open(place: str | Path, model: Model, reporter: Reporter) -> TargetData:
    if is_feature_file(place):
        features = open_target_features(place)
        model.check_features(features.dim, str(place), features.about)
        return features
    model.check_images()
    images = open_target(str(place), model.pixels_size, model.config.data, reporter)
    if images.failures:
        path, reason = images.failures[0]
        reporter.warn(
            f"left out {len(images.failures)} unreadable images, such as {printable(path)} "
            f"({reason})"
        )
    return images


def _test_batches(
    target: TargetData, model: Model, rows_P: NDArray[np.int64] | None = None
) -> Iterator[torch.Tensor]:
    """Yield batches of the target's images, or of those with the numbers `rows_P`."""
    share = model.config.data.device_share
    chosen_P = np.arange(len(target)) if rows_P is None else rows_P
    data = target.features if isinstance(target, TargetFeatures) else target.pixels
    store = Store(data, target.rows, model.device, share)
    for start in range(0, len(chosen_P), PREDICT_BATCH):
        images_P = chosen_P[start : start + PREDICT_BATCH]
        if isinstance(target, TargetFeatures):
            yield store.gather(images_P, np.zeros_like(images_P))
        else:
            yield model.view(store.gather(images_P))
