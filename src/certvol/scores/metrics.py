"""Compute metrics of predictions and of certainty from arrays. N images, C classes.

A metric that is undefined, such as a correlation with a constant, is NaN.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.int64]
Values = NDArray[np.floating]
Flags = NDArray[np.bool_]


def accuracy(predicted_N: Labels, true_N: Labels) -> float:
    return float((predicted_N == true_N).mean())


def per_class_accuracy(
    predicted_N: Labels, true_N: Labels, num_classes: int
) -> NDArray[np.float64]:
    """Return the accuracy on the images of each true class; NaN for a class without images."""
    count_C = np.bincount(true_N, minlength=num_classes)
    right_C = np.bincount(true_N[predicted_N == true_N], minlength=num_classes)
    return np.where(count_C > 0, right_C / np.maximum(count_C, 1), np.nan)


def mean_class_accuracy(predicted_N: Labels, true_N: Labels, num_classes: int) -> float:
    """Average the accuracy over the classes that have images."""
    return float(np.nanmean(per_class_accuracy(predicted_N, true_N, num_classes)))


def confusion_matrix(predicted_N: Labels, true_N: Labels, num_classes: int) -> Labels:
    """Return C x C counts, with a row per true class and a column per predicted one."""
    from sklearn.metrics import confusion_matrix as counts

    return np.asarray(counts(true_N, predicted_N, labels=np.arange(num_classes)))


def pearson(x_N: Values, y_N: Values) -> float:
    """Return the linear correlation."""
    from scipy.stats import pearsonr

    x_N, y_N = np.asarray(x_N, dtype=np.float64), np.asarray(y_N, dtype=np.float64)
    if not (_varies(x_N) and _varies(y_N)):
        return float("nan")
    return float(pearsonr(x_N, y_N).statistic)


def spearman(x_N: Values, y_N: Values) -> float:
    """Return the rank correlation; tied values share the mean of their ranks."""
    from scipy.stats import spearmanr

    if not (_varies(x_N) and _varies(y_N)):
        return float("nan")
    return float(spearmanr(x_N, y_N).statistic)


def _varies(values_N: Values | Flags) -> bool:
    return len(values_N) > 0 and bool((values_N != values_N[0]).any())


def auroc(scores_N: Values, positive_N: Flags) -> float:
    """Return the probability that a positive scores above a negative; ties count half."""
    from sklearn.metrics import roc_auc_score

    if not _varies(positive_N) or not np.isfinite(scores_N).all():
        return float("nan")
    return float(roc_auc_score(positive_N, scores_N))


def auroc_spread(area: float, positives: int, negatives: int) -> float:
    """Return the standard error of an AUROC from so many scores (Hanley and McNeil 1982)."""
    if min(positives, negatives) == 0:
        return math.inf
    both_above, both_below = area / (2 - area), 2 * area**2 / (1 + area)
    variance = area * (1 - area)
    variance += (positives - 1) * (both_above - area**2) + (negatives - 1) * (both_below - area**2)
    return math.sqrt(max(0.0, variance) / (positives * negatives))


def fpr_at_tpr(scores_N: Values, positive_N: Flags, tpr: float = 0.95) -> float:
    """Return the share of negatives above the highest threshold that `tpr` of positives reach."""
    if not _varies(positive_N):
        return float("nan")
    return float((scores_N[~positive_N] >= threshold_at(scores_N[positive_N], tpr)).mean())


def threshold_at(certainty_N: Values, coverage: float) -> float:
    """Return the highest threshold on certainty that at least `coverage` of the images reach."""
    descending = np.sort(certainty_N)[::-1]
    return float(descending[_images_at(coverage, len(descending)) - 1])


def _images_at(coverage: float, count: int) -> int:
    """Return the smallest number of images, at least 1, that is this share of `count`.

    The small constant makes 0.95 of 20 exactly 19 in spite of rounding.
    """
    return min(count, max(1, int(np.ceil(coverage * count - 1e-9))))


def risk_coverage(
    certainty_N: Values, wrong_N: Flags
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (coverage, risk) of accepting the 1, 2, ... N most certain images.

    Risk is the share of accepted images that are wrong. Equally certain images have no order, so
    their risk is the mean over all orders.
    """
    _, group_N, count_G = np.unique(
        -np.asarray(certainty_N, dtype=np.float64), return_inverse=True, return_counts=True
    )
    wrong_G = np.bincount(group_N, weights=wrong_N.astype(np.float64), minlength=len(count_G))
    wrong_in_order_N = np.repeat(wrong_G / count_G, count_G)
    accepted_N = np.arange(1, len(wrong_N) + 1)
    return accepted_N / max(1, len(wrong_N)), np.cumsum(wrong_in_order_N) / accepted_N


def aurc(certainty_N: Values, wrong_N: Flags) -> float:
    """Return the area under the risk-coverage curve; a random order gives the error rate."""
    risk_N = risk_coverage(certainty_N, wrong_N)[1]
    return float(risk_N.mean()) if len(risk_N) else float("nan")


def accuracy_at_coverage(certainty_N: Values, wrong_N: Flags, coverage: float) -> float:
    """Return the accuracy on the most certain `coverage` of the images."""
    risk_N = risk_coverage(certainty_N, wrong_N)[1]
    return float(1 - risk_N[_images_at(coverage, len(risk_N)) - 1]) if len(risk_N) else float("nan")


class Bin(NamedTuple):
    """A bin of a reliability diagram: images with a confidence in (lower, upper]."""

    lower: float
    upper: float
    images: int
    confidence: float  # mean; NaN for an empty bin, as is accuracy
    accuracy: float


def reliability(confidence_N: Values, right_N: Flags, num_bins: int = 15) -> list[Bin]:
    """Sort images into bins of equal width over 0..1; the first includes 0."""
    edges = np.linspace(0, 1, num_bins + 1)
    bin_N = np.searchsorted(edges[1:-1], np.asarray(confidence_N, dtype=np.float64))
    bins = []
    for number, (lower, upper) in enumerate(pairwise(edges)):
        inside = bin_N == number
        count = int(inside.sum())
        confidence = float(confidence_N[inside].mean(dtype=np.float64)) if count else float("nan")
        accuracy = float(right_N[inside].mean()) if count else float("nan")
        bins.append(Bin(float(lower), float(upper), count, confidence, accuracy))
    return bins


def calibration_error(bins: Sequence[Bin]) -> float:
    """ECE: the distance between confidence and accuracy of the bins, averaged over the images."""
    total = sum(each.images for each in bins)
    gaps = (each.images * abs(each.accuracy - each.confidence) for each in bins if each.images)
    return sum(gaps) / total if total else float("nan")
