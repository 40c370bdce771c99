"""Figures of a run's models on labelled data. The one place that knows labels of a target: nothing here trains."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from certvol import analysis
from certvol.data.augment import cache_size
from certvol.data.domains import TargetImages, open_target
from certvol.data.feature_files import TargetFeatures, is_feature_file, known_labels, open_target_features
from certvol.data.folders import folder_labels, printable
from certvol.data.store import PixelStore
from certvol.errors import UserError
from certvol.inference import run_batches
from certvol.model import PREDICT_BATCH, Model, load
from certvol.nn.norm import SOURCE, TARGET
from certvol.reporting import Reporter, Silent
from certvol.tables import figures
from certvol.training.feature_views import FeatureStore, FeatureViews
from certvol.training.views import Batches, Views

Indices = NDArray[np.int64]


def target_labels(target: TargetImages | TargetFeatures, place: str | Path, classes: list[str]) -> Indices | None:
    """The class of each image of `target`, which was opened at `place`; None unless all of them are told there."""
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
    """Figures of the pretrained and the delivered model on a labelled folder or file of features, and of the delivered one's
    certainty, as `analysis` lists them. `unknown`: images of other classes, to be told from these. `oscillation`: of the
    decision boundary; for a method with a head of its own it is among `left_out`, with the reason."""
    reporter = reporter or Silent()
    model = load(run, device)
    config, method = model.config, model.method
    left_out: dict[str, str] = {}
    if oscillation and analysis.linear_layers(method) is None:
        oscillation, left_out["oscillation"] = False, analysis.NO_OSCILLATION
        reporter.warn(f"the oscillation is left out: {analysis.NO_OSCILLATION}")
    images = _open(data, model, reporter)
    true_N = target_labels(images, data, model.classes)
    if true_N is None:
        raise UserError(_lacks_labels(images, data, model.classes))
    strangers = None if unknown is None else _open(unknown, model, reporter)
    if strangers is not None and unknown is not None and target_labels(strangers, unknown, model.classes) is not None:
        reporter.warn(
            f"{unknown} has folders named like the run's classes: --unknown should hold images of other classes"
        )
    pretrained = load(run, device, "pretrained")
    before = run_batches(pretrained.method, _test_batches(images, pretrained), SOURCE)
    picked_K = analysis.oscillation_images(true_N, config.training.seed) if oscillation else None
    measured = analysis.measure(method, _test_batches(images, model), TARGET, config.training, true_N, picked_K)
    wavering = analysis.oscillation(measured.features_KD, method) if oscillation else None
    found = {
        "run": str(run),
        "data": str(data),
        "source_only": figures(before.labels_N, true_N, model.classes),
        "adapted": figures(measured.predicted_N, true_N, model.classes),
        **analysis.figures(measured, model.classes, true_N, wavering),
    }
    if left_out:
        found["left_out"] = left_out
    if strangers is not None:
        others = analysis.measure(method, _test_batches(strangers, model), TARGET, config.training)
        found["unknown"] = {"data": str(unknown), **analysis.open_set(measured, others)}
    return found


def _lacks_labels(images: TargetImages | TargetFeatures, data: str | Path, classes: list[str]) -> str:
    if isinstance(images, TargetFeatures):
        why = f"its array `labels` should name one of the run's {len(classes)} classes for every row, such as {classes[0]}"
    else:
        stray = next(path for path in sorted(images.paths) if folder_labels([path], classes) is None)
        why = f"{printable(stray)} lies in no folder named like one of the run's {len(classes)} classes, such as {classes[0]}/"
    return f"{data} does not tell all labels: {why}; `certvol predict` needs no labels"


def _open(place: str | Path, model: Model, reporter: Reporter) -> TargetImages | TargetFeatures:
    if is_feature_file(place):
        features = open_target_features(place)
        model.check_features(features.dim, str(place))
        return features
    model.check_images()
    images = open_target(str(place), cache_size(model.info.image_size), model.config.data, reporter)
    if images.failures:
        path, reason = images.failures[0]
        reporter.warn(f"{len(images.failures)} unreadable images were left out, such as {printable(path)} ({reason})")
    return images


def _test_batches(data: TargetImages | TargetFeatures, model: Model) -> Iterator[torch.Tensor]:
    share = model.config.data.device_share
    if isinstance(data, TargetFeatures):
        features = FeatureStore(data.features, data.rows, model.device, share)
        views: Batches = FeatureViews(features, features)
    else:
        images = PixelStore(data.pixels, data.rows, model.device, share)
        views = Views(images, images, model.info, model.config.augment)
    return views.test_batches(TARGET, np.arange(len(data)), PREDICT_BATCH)
