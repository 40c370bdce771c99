"""Figures about predictions and classifiers, from arrays and tensors. N images, D features, C classes, K points of a segment."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def accuracy(predicted_N: NDArray[np.int64], true_N: NDArray[np.int64]) -> float:
    """Share of images that are right."""
    return float((predicted_N == true_N).mean())


def per_class_accuracy(
    predicted_N: NDArray[np.int64], true_N: NDArray[np.int64], num_classes: int
) -> NDArray[np.float64]:
    """Accuracy over the images of each true class; NaN for a class without images."""
    count_C = np.bincount(true_N, minlength=num_classes)
    right_C = np.bincount(true_N[predicted_N == true_N], minlength=num_classes)
    return np.where(count_C > 0, right_C / np.maximum(count_C, 1), np.nan)


def mean_class_accuracy(predicted_N: NDArray[np.int64], true_N: NDArray[np.int64], num_classes: int) -> float:
    """Mean over the classes that have images."""
    return float(np.nanmean(per_class_accuracy(predicted_N, true_N, num_classes)))


Values = NDArray[np.floating]
Flags = NDArray[np.bool_]


def confusion_matrix(predicted_N: NDArray[np.int64], true_N: NDArray[np.int64], num_classes: int) -> NDArray[np.int64]:
    """C x C counts: a row per true class, a column per predicted one."""
    cells = np.bincount(true_N * num_classes + predicted_N, minlength=num_classes**2)
    return cells.reshape(num_classes, num_classes).astype(np.int64)


def pearson(x_N: Values, y_N: Values) -> float:
    """Linear correlation; NaN where one of the two does not vary."""
    x, y = (_centred(values) for values in (x_N, y_N))
    if len(x) < 2 or not x.any() or not y.any():
        return float("nan")
    # Each divided by its own length before the product, so that neither very large nor very small values overflow.
    return float(np.clip(np.dot(x / np.linalg.norm(x), y / np.linalg.norm(y)), -1, 1))


def _centred(values_N: Values) -> NDArray[np.float64]:
    values = np.asarray(values_N, dtype=np.float64)
    if len(values) == 0 or (values == values[0]).all():
        return np.zeros(len(values))  # the mean of equal values may differ from them by rounding
    centred = values - values.mean()
    return np.asarray(centred / np.abs(centred).max())


def ranks(values_N: Values) -> NDArray[np.float64]:
    """From 1; equal values share the mean of their ranks."""
    _, group_N, count_G = np.unique(values_N, return_inverse=True, return_counts=True)
    last_G = np.cumsum(count_G)
    return np.asarray((last_G - (count_G - 1) / 2)[group_N])


def spearman(x_N: Values, y_N: Values) -> float:
    """Correlation of the ranks; NaN where one of the two does not vary."""
    return pearson(ranks(x_N), ranks(y_N))


def auroc(scores_N: Values, positive_N: Flags) -> float:
    """How likely a positive has a higher score than a negative, ties counting half; NaN where one of the two is missing."""
    positives = int(positive_N.sum())
    negatives = len(positive_N) - positives
    if positives == 0 or negatives == 0:
        return float("nan")
    above = ranks(scores_N)[positive_N].sum() - positives * (positives + 1) / 2
    return float(above / (positives * negatives))


def fpr_at_tpr(scores_N: Values, positive_N: Flags, tpr: float = 0.95) -> float:
    """Share of negatives that pass the highest threshold which at least `tpr` of the positives pass; NaN as for `auroc`."""
    positives = np.sort(scores_N[positive_N])[::-1]
    negatives = scores_N[~positive_N]
    if len(positives) == 0 or len(negatives) == 0:
        return float("nan")
    return float((negatives >= positives[_first(tpr, len(positives)) - 1]).mean())


def _first(share: float, count: int) -> int:
    """How many of `count` are at least this share, and at least one; 0.95 of 20 is 19, whatever floats make of it."""
    return min(count, max(1, int(np.ceil(share * count - 1e-9))))


def risk_coverage(certainty_N: Values, wrong_N: Flags) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(coverage, risk) with the most certain 1, 2, ... N images accepted: their share, and how many of them are wrong.

    Equally certain images have no order: the risk is its mean over all their orders.
    """
    _, group_N, count_G = np.unique(-np.asarray(certainty_N, dtype=np.float64), return_inverse=True, return_counts=True)
    wrong_G = np.bincount(group_N, weights=wrong_N.astype(np.float64), minlength=len(count_G))
    wrong_in_order_N = np.repeat(wrong_G / np.maximum(count_G, 1), count_G)
    accepted_N = np.arange(1, len(wrong_N) + 1)
    return accepted_N / max(1, len(wrong_N)), np.cumsum(wrong_in_order_N) / accepted_N


def aurc(certainty_N: Values, wrong_N: Flags) -> float:
    """Area under the risk-coverage curve: the mean of its risks. An order by chance gives the error rate; less is better."""
    risk_N = risk_coverage(certainty_N, wrong_N)[1]
    return float(risk_N.mean()) if len(risk_N) else float("nan")


def accuracy_at_coverage(certainty_N: Values, wrong_N: Flags, coverage: float) -> float:
    """Accuracy of the most certain `coverage` of the images."""
    if len(wrong_N) == 0:
        return float("nan")
    return float(1 - risk_coverage(certainty_N, wrong_N)[1][_first(coverage, len(wrong_N)) - 1])


class Bin(NamedTuple):
    """Of a reliability diagram: images whose confidence lies above `lower` and not above `upper`."""

    lower: float
    upper: float
    images: int
    confidence: float  # mean; NaN for an empty bin
    accuracy: float  # NaN for an empty bin


def reliability(confidence_N: Values, right_N: Flags, num_bins: int = 15) -> list[Bin]:
    """Bins of equal width over 0..1; the first holds 0 too."""
    confidence = np.asarray(confidence_N, dtype=np.float64)
    edges = np.linspace(0, 1, num_bins + 1)
    bin_N = np.searchsorted(edges[1:-1], confidence, side="left")
    count_B = np.bincount(bin_N, minlength=num_bins)
    divisor_B = np.where(count_B > 0, count_B, np.nan)
    confidence_B = np.bincount(bin_N, weights=confidence, minlength=num_bins) / divisor_B
    accuracy_B = np.bincount(bin_N, weights=right_N.astype(np.float64), minlength=num_bins) / divisor_B
    columns = (edges[:-1].tolist(), edges[1:].tolist(), count_B.tolist(), confidence_B.tolist(), accuracy_B.tolist())
    return [Bin(*row) for row in zip(*columns, strict=True)]


def calibration_error(bins: Sequence[Bin]) -> float:
    """ECE: the distance of confidence from accuracy, averaged over images by their bins."""
    total = sum(each.images for each in bins)
    if total == 0:
        return float("nan")
    return sum(each.images * abs(each.accuracy - each.confidence) for each in bins if each.images) / total


def threshold_at(certainty_N: Values, coverage: float) -> float:
    """The highest certainty that at least `coverage` of the images reach; one of theirs, so it is met exactly."""
    descending = np.sort(certainty_N)[::-1]
    return float(descending[_first(coverage, len(descending)) - 1])


def pick_per_class(labels_N: NDArray[np.int64], per_class: int, seed: int) -> NDArray[np.int64]:
    """Indices, ascending, of `per_class` images of every class, drawn by the seed; all of them of a class that has fewer."""
    order_N = np.random.default_rng(seed).permutation(len(labels_N))
    picked = [order_N[labels_N[order_N] == label][:per_class] for label in np.unique(labels_N)]
    return np.sort(np.concatenate([order_N[:0], *picked]))


class Oscillation(NamedTuple):
    total: float  # sum over pairs of O = changes of the predicted class / K
    floor: float  # what a classifier with the same predictions at the ends cannot go below: pairs whose ends differ / K


def oscillation(
    features_ND: Tensor,
    layers: Sequence[tuple[Tensor, Tensor]],
    *,
    num_points: int = 1000,
    chunk_points: int = 32768,
) -> Oscillation:
    """How often the predicted class changes on the way between two features, over all unordered pairs.

    `layers`: weight and bias of each linear layer in order: one, or two with a ReLU between. `num_points` is K, ends included.
    The first layer is linear along a segment, so it is evaluated at the features alone and interpolated; every one of the K
    points is then evaluated, so no change is missed. Memory is that of `chunk_points` points, on the device of the features.
    Computed in float64 where the features are, else in float32 without shortcuts: neighbouring points differ by about 1/K of
    the ends' difference, and the rounding of TF32 or bfloat16 would flicker where two classes are close.
    """
    _check_oscillation(features_ND, layers, num_points, chunk_points)
    device = features_ND.device
    dtype = torch.float64 if features_ND.dtype == torch.float64 else torch.float32
    with torch.no_grad(), torch.autocast(device.type, enabled=False), _full_precision():
        first, *rest = [(weight.to(device, dtype), bias.to(device, dtype)) for weight, bias in layers]
        first_NH = torch.addmm(first[1], features_ND.to(dtype), first[0].T)
        ends_NC = torch.addmm(rest[0][1], first_NH.relu(), rest[0][0].T) if rest else first_NH
        num_features, width = first_NH.shape

        at_once = min(num_points, chunk_points)  # points of one segment
        pairs_at_once = min(max(1, chunk_points // at_once), max(1, num_features - 1))
        share_K = torch.linspace(0, 1, num_points, device=device, dtype=dtype)
        hidden_RH = torch.empty(pairs_at_once * at_once, width, device=device, dtype=dtype)
        logits_RC = torch.empty(len(hidden_RH), ends_NC.shape[1], device=device, dtype=dtype) if rest else hidden_RH
        # Counted on the device and read once, at the end: the loop never waits for it.
        changes = torch.zeros((), device=device, dtype=torch.int64)

        for start in range(num_features - 1):
            for begin in range(start + 1, num_features, pairs_at_once):
                others_PH = first_NH[begin : begin + pairs_at_once]
                # Pieces of a segment share a point, so that the change between two pieces is counted, once.
                for point in range(0, num_points - 1, at_once - 1):
                    piece_k = share_K[point : point + at_once]
                    pairs, points = len(others_PH), len(piece_k)
                    rows = pairs * points
                    hidden_PkH = hidden_RH[:rows].view(pairs, points, width)
                    torch.lerp(first_NH[start], others_PH[:, None], piece_k[:, None], out=hidden_PkH)
                    if rest:
                        output_weight, output_bias = rest[0]
                        torch.addmm(output_bias, hidden_RH[:rows].relu_(), output_weight.T, out=logits_RC[:rows])
                    predicted_Pk = logits_RC[:rows].argmax(1).view(pairs, points)
                    changes += (predicted_Pk[:, 1:] != predicted_Pk[:, :-1]).sum()

        same_C = ends_NC.argmax(1).bincount()
        differing = (num_features * (num_features - 1) - (same_C * (same_C - 1)).sum()) // 2
        return Oscillation(int(changes) / num_points, int(differing) / num_points)


def _check_oscillation(
    features_ND: Tensor, layers: Sequence[tuple[Tensor, Tensor]], num_points: int, chunk_points: int
) -> None:
    if len(layers) not in (1, 2):
        raise ValueError(f"oscillation takes a classifier of one or two linear layers, not {len(layers)}.")
    if num_points < 2 or chunk_points < 2:
        raise ValueError(f"A segment and a chunk have at least 2 points, not {num_points} and {chunk_points}.")
    if not features_ND.isfinite().all():
        raise ValueError("Some features are not finite numbers; between those there is no segment. Leave them out.")


@contextmanager
def _full_precision() -> Iterator[None]:
    """Products of float32 matrices in float32, whatever training has allowed."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
