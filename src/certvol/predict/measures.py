"""Measure how certain a model is, and how good its certainty is.

`measures.csv` has a row per target image, in the order of predictions.csv: path, prediction, truth
and a column per measure of `scores.uncertainty.MEASURES`. Cells stay empty for what does not exist:
truth and logit_gt without labels, sigma for a method without sigma.

`evaluation.json`, and what `certvol evaluate --json` writes beside the accuracies. Shares are
fractions; null stands for a figure that does not exist (a correlation with a constant, an AUROC if
no prediction is wrong). Keys in brackets are present with labels only.

    images, labelled          how many images, and whether they have labels
    measures                  measure -> title, higher_is_certain, needs_labels, median
    correlations              pearson, spearman -> of sigma with logit, (logit_gt), logit_diff,
                              mcd_mu, mcd_sigma, signed so that higher means more certain; null
                              for a method without sigma
    thresholds                measure -> coverage ("0.9") -> least certain value that is accepted,
                              in the measure's own units
    (accuracy)                over all images
    (auroc)                   measure -> AUROC of separating right from wrong predictions
    (risk_coverage)           measure -> coverage, risk: lists of at most 200 points
    (aurc)                    measure -> area under that curve
    (accuracy_at_coverage)    measure -> coverage -> accuracy of that most certain share
    (ece, reliability)        calibration of the largest probability: error; bins of lower, upper,
                              images, confidence, accuracy
    (confusion)               classes, counts: a row per true class, a column per predicted class
    (oscillation)             if computed: total, floor, images, points
    (unknown)                 with --unknown: images; auroc, fpr_at_95_tpr: measure -> of separating
                              known from unknown images
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from certvol.data import Indices
from certvol.errors import UserError
from certvol.methods._base import AdaptationMethod
from certvol.nn.heads import Classifier, mc_dropout
from certvol.predict.forward import Outputs, Values, certainty, run_batches
from certvol.randomness import torch_seed
from certvol.runs.checkpoint import FORMAT
from certvol.scores import metrics, uncertainty
from certvol.scores.oscillation import oscillation_between, pick_per_class
from certvol.scores.uncertainty import COMPARED_WITH_SIGMA, LABEL_FREE, MEASURES
from certvol.settings import TrainingConfig

COVERAGES = (0.8, 0.9, 0.95)
THRESHOLD_COVERAGES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
CURVE_POINTS = 200
OSCILLATION_PER_CLASS, OSCILLATION_POINTS = 5, 1000
NO_OSCILLATION = "it needs a classifier of one or two linear layers, and this method has another"
# A run computes the oscillation unasked up to this many multiplications, a few seconds of work.
CHEAP_OSCILLATION = {"cpu": 1e11, "cuda": 1e14}


def linear_layers(method: AdaptationMethod) -> list[tuple[Tensor, Tensor]] | None:
    """Return weight and bias of each linear layer of f_Cl, or None for another classifier."""
    classifier = method.network.classifier
    if type(classifier) is not Classifier or type(method).logits is not AdaptationMethod.logits:
        return None
    linear = [layer for layer in (classifier.hidden, classifier.output) if layer is not None]
    found = [(layer.weight.detach(), layer.bias.detach()) for layer in linear]
    if method.prior_shift_C is not None:
        weight, bias = found[-1]
        found[-1] = weight, bias + method.prior_shift_C
    return found


def run_with_measures(
    method: AdaptationMethod,
    batches: Iterable[Tensor],
    domain: int,
    settings: TrainingConfig,
    true_N: Indices | None = None,
    kept_K: Indices | None = None,
) -> Outputs:
    """Compute the outputs and all measures in one pass; the backbone sees each image once."""
    seed = torch_seed(settings.seed, "measures.dropout")

    def extra(features_ND: Tensor, logits_NC: Tensor, rows: slice) -> dict[str, Tensor]:
        labels_N = None
        if true_N is not None:
            labels_N = torch.from_numpy(true_N[rows]).to(logits_NC.device)
        found = uncertainty.logit_measures(logits_NC, labels_N)
        passes, rate = settings.mc_passes, settings.mc_dropout
        inputs = features_ND.float()
        mean_NC, deviation_NC = mc_dropout(method.decide, inputs, passes, rate, seed, shared=True)
        winner_N1 = mean_NC.argmax(dim=1, keepdim=True)
        found["mcd_mu"] = mean_NC.gather(1, winner_N1).squeeze(1)
        found["mcd_sigma"] = deviation_NC.gather(1, winner_N1).squeeze(1)
        return found

    return run_batches(method, batches, domain, extra=extra, kept_K=kept_K)


def accuracy_figures(predicted_N: Indices, true_N: Indices, classes: list[str]) -> dict[str, Any]:
    """Return a model's part of metrics.json."""
    per_class = metrics.per_class_accuracy(predicted_N, true_N, len(classes))
    return {
        "accuracy": metrics.accuracy(predicted_N, true_N),
        "mean_class_accuracy": metrics.mean_class_accuracy(predicted_N, true_N, len(classes)),
        "per_class": dict(zip(classes, map(_number, per_class), strict=True)),
        "images": len(true_N),
    }


def certainty_figures(
    outputs: Outputs,
    classes: Sequence[str],
    true_N: Indices | None,
    oscillation: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the content of evaluation.json."""
    measures = outputs.measures
    found: dict[str, Any] = {
        "format": FORMAT,
        "images": len(outputs.labels_N),
        "labelled": true_N is not None,
        "measures": {
            name: {
                "title": about.title,
                "higher_is_certain": about.more_is_certain,
                "needs_labels": about.needs_labels,
                "median": _number(np.median(measures[name])),
            }
            for name, about in MEASURES.items()
            if name in measures
        },
        "correlations": _correlations(measures),
        "thresholds": {
            name: {f"{c:g}": threshold_at(name, measures[name], c) for c in THRESHOLD_COVERAGES}
            for name in LABEL_FREE
            if name in measures
        },
    }
    if true_N is not None:
        found |= _labelled_figures(outputs, classes, true_N)
    if oscillation is not None:
        found["oscillation"] = oscillation
    return found


def threshold_at(measure: str, values_N: Values, coverage: float) -> float:
    """Return the value, in the measure's own units, that accepts this share of the images."""
    return certainty(measure, metrics.threshold_at(certainty(measure, values_N), coverage))


def _number(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


def _each(
    figure: Callable[..., float], by_measure: Mapping[str, Values], *others: Any
) -> dict[str, float | None]:
    return {name: _number(figure(values_N, *others)) for name, values_N in by_measure.items()}


def _correlations(measures: Mapping[str, Values]) -> dict[str, dict[str, float | None]] | None:
    if "sigma" not in measures:
        return None
    compared = [name for name in COMPARED_WITH_SIGMA if name in measures]
    others = {name: certainty(name, measures[name]) for name in compared}
    return {
        "pearson": _each(metrics.pearson, others, measures["sigma"]),
        "spearman": _each(metrics.spearman, others, measures["sigma"]),
    }


def _labelled_figures(outputs: Outputs, classes: Sequence[str], true_N: Indices) -> dict[str, Any]:
    predicted_N, label_free = outputs.labels_N, outputs.label_free
    right_N = predicted_N == true_N
    bins = metrics.reliability(outputs.confidence_N, right_N)
    by_coverage = {
        c: _each(metrics.accuracy_at_coverage, label_free, ~right_N, c) for c in COVERAGES
    }
    return {
        "accuracy": _number(right_N.mean()),
        "auroc": _each(metrics.auroc, label_free, right_N),
        "risk_coverage": {
            name: _curve(values_N, ~right_N) for name, values_N in label_free.items()
        },
        "aurc": _each(metrics.aurc, label_free, ~right_N),
        "accuracy_at_coverage": {
            name: {f"{c:g}": accuracies[name] for c, accuracies in by_coverage.items()}
            for name in label_free
        },
        "ece": _number(metrics.calibration_error(bins)),
        "reliability": [
            one._asdict()
            | {"confidence": _number(one.confidence), "accuracy": _number(one.accuracy)}
            for one in bins
        ],
        "confusion": {
            "classes": list(classes),
            "counts": metrics.confusion_matrix(predicted_N, true_N, len(classes)).tolist(),
        },
    }


def _curve(certainty_N: Values, wrong_N: NDArray[np.bool_]) -> dict[str, list[float]]:
    """Return evenly spread points of the risk-coverage curve, including its last."""
    coverage_N, risk_N = metrics.risk_coverage(certainty_N, wrong_N)
    shown = np.unique(np.linspace(0, len(risk_N) - 1, CURVE_POINTS).round().astype(np.int64))
    return {"coverage": coverage_N[shown].tolist(), "risk": risk_N[shown].tolist()}


def open_set_figures(known: Outputs, unknown: Outputs) -> dict[str, Any]:
    """Measure how well certainty separates images of the model's classes from other images."""
    known_by, unknown_by = known.label_free, unknown.label_free
    both = {name: np.concatenate([known_by[name], unknown_by[name]]) for name in known_by}
    count = len(unknown.labels_N)
    is_known = np.repeat([True, False], [len(known.labels_N), count])
    return {
        "images": count,
        "auroc": _each(metrics.auroc, both, is_known),
        "fpr_at_95_tpr": _each(metrics.fpr_at_tpr, both, is_known),
    }


def recommended(
    auroc: Mapping[str, float | None], positives: int, negatives: int, usual: str
) -> str:
    """Return the measure with the best AUROC, or the usual one unless it is clearly worse.

    Clearly means by more than the standard error of the best.
    """
    known = {name: value for name, value in auroc.items() if value is not None}
    if usual not in known:
        return usual
    best = max(known, key=lambda name: known[name])
    spread = metrics.auroc_spread(known[best], positives, negatives)
    return best if known[best] - known[usual] > spread else usual


def oscillation_images(true_N: Indices, seed: int) -> Indices:
    return pick_per_class(true_N, OSCILLATION_PER_CLASS, seed)


def oscillation(features_ND: Values, method: AdaptationMethod) -> dict[str, Any]:
    """Measure how often the decision changes between these images, on the method's device."""
    layers = linear_layers(method)
    if layers is None:
        raise UserError(f"the oscillation cannot be computed: {NO_OSCILLATION}")
    features = torch.from_numpy(features_ND).to(layers[0][0].device)
    found = oscillation_between(features, layers, num_points=OSCILLATION_POINTS)
    return {**found._asdict(), "images": len(features_ND), "points": OSCILLATION_POINTS}


def oscillation_is_cheap(images: int, method: AdaptationMethod) -> bool:
    """Return whether the oscillation takes seconds; False if it cannot be computed at all."""
    if (layers := linear_layers(method)) is None:
        return False
    last = layers[-1][0]
    # The first layer is interpolated between the images, not multiplied at each point.
    per_point = last.numel() if len(layers) > 1 else len(last)
    cost = images * (images - 1) / 2 * OSCILLATION_POINTS * per_point
    return cost <= CHEAP_OSCILLATION.get(last.device.type, 0.0)
