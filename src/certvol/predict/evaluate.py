"""Evaluate a run's models on labelled data: the only place that reads labels of a target."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from certvol.data.augment import cache_size
from certvol.data.domains import TargetImages, open_target
from certvol.data.feature_files import (
    TargetFeatures,
    is_feature_file,
    known_labels,
    open_target_features,
)
from certvol.data.folders import folder_labels, printable
from certvol.data.store import PixelStore
from certvol.data.views import FeatureStore, FeatureViews, ImageViews, Views
from certvol.errors import UserError
from certvol.nn.norm import SOURCE, TARGET
from certvol.predict import measure as measuring
from certvol.predict.forward import run_batches
from certvol.predict.model import PREDICT_BATCH, Model, load
from certvol.progress import Reporter, Silent

Target = TargetImages | TargetFeatures


def target_labels(
    target: Target, place: str | Path, classes: list[str]
) -> NDArray[np.int64] | None:
    """Return the class of each image of the target at `place`; None unless all have a label."""
    if isinstance(target, TargetFeatures):
        return known_labels(place, target.rows, classes)
    return folder_labels(target.paths, classes)


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

    `predict/measure.py` lists the content of the result. `unknown` holds images of other classes,
    and measures how well certainty separates them. `oscillation` also measures the oscillation of
    the decision boundary; for a method with its own head, `left_out` says why it is missing.
    """
    reporter = reporter or Silent()
    model = load(run, device)
    classes, settings, method = model.classes, model.config.training, model.method
    left_out = {}
    if oscillation and measuring.linear_layers(method) is None:
        left_out["oscillation"] = measuring.NO_OSCILLATION
        reporter.warn(f"the oscillation is left out: {measuring.NO_OSCILLATION}")
    target = _open(data, model, reporter)
    true_N = target_labels(target, data, classes)
    if true_N is None:
        raise UserError(_explain_missing_labels(target, data, classes))
    others = None
    if unknown is not None:
        others = _open(unknown, model, reporter)
        if target_labels(others, unknown, classes) is not None:
            reporter.warn(
                f"the folders in {unknown} are named like the run's classes; give --unknown a "
                "folder with images of other classes"
            )
    pretrained = load(run, device, "pretrained")
    before = run_batches(pretrained.method, _test_batches(target, pretrained), SOURCE)
    picked_K = None
    if oscillation and not left_out:
        picked_K = measuring.oscillation_images(true_N, settings.seed)
    batches = _test_batches(target, model)
    outputs = measuring.measure(method, batches, TARGET, settings, true_N, picked_K)
    figures = None if picked_K is None else measuring.oscillation(outputs.features_KD, method)
    found = {
        "run": str(run),
        "data": str(data),
        "source_only": measuring.accuracy_figures(before.labels_N, true_N, classes),
        "adapted": measuring.accuracy_figures(outputs.labels_N, true_N, classes),
        **measuring.certainty_figures(outputs, classes, true_N, figures),
    }
    if left_out:
        found["left_out"] = left_out
    if others is not None:
        foreign = measuring.measure(method, _test_batches(others, model), TARGET, settings)
        found["unknown"] = {"data": str(unknown), **measuring.open_set_figures(outputs, foreign)}
    return found


def _explain_missing_labels(target: Target, data: str | Path, classes: list[str]) -> str:
    among = f"one of the run's {len(classes)} classes, such as {classes[0]}"
    if isinstance(target, TargetFeatures):
        why = f"its array `labels` must name {among}, for every row"
    else:
        stray = next(p for p in sorted(target.paths) if folder_labels([p], classes) is None)
        why = f"{printable(stray)} does not lie in a folder named like {among}/"
    return f"{data} does not label all images: {why}; `certvol predict` needs no labels"


def _open(place: str | Path, model: Model, reporter: Reporter) -> Target:
    if is_feature_file(place):
        features = open_target_features(place)
        model.check_features(features.dim, str(place))
        return features
    model.check_images()
    images = open_target(str(place), cache_size(model.info.image_size), model.config.data, reporter)
    if images.failures:
        path, reason = images.failures[0]
        reporter.warn(
            f"left out {len(images.failures)} unreadable images, such as {printable(path)} "
            f"({reason})"
        )
    return images


def _test_batches(target: Target, model: Model) -> Iterator[torch.Tensor]:
    share = model.config.data.device_share
    if isinstance(target, TargetFeatures):
        features = FeatureStore(target.features, target.rows, model.device, share)
        views: Views = FeatureViews(features, features)
    else:
        images = PixelStore(target.pixels, target.rows, model.device, share)
        views = ImageViews(images, images, model.info, model.config.augment)
    return views.test_batches(TARGET, np.arange(len(target)), PREDICT_BATCH)
