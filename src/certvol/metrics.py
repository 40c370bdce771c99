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
