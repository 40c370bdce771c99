"""Measure oscillation: how often the predicted class changes between two images' features."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Layers = Sequence[tuple[Tensor, Tensor]]


class Oscillation(NamedTuple):
    """Sums over all pairs of images, in changes / K.

    `floor` is the least possible for a classifier with the same predictions: it counts the pairs
    that are predicted differently.
    """

    total: float
    floor: float


def pick_per_class(labels_N: NDArray[np.int64], per_class: int, seed: int) -> NDArray[np.int64]:
    """Draw up to `per_class` images of every class; return their ascending indices."""
    order_N = np.random.default_rng(seed).permutation(len(labels_N))
    picked = [order_N[labels_N[order_N] == label][:per_class] for label in np.unique(labels_N)]
    return np.sort(np.concatenate([order_N[:0], *picked]))


def oscillation_between(
    features_ND: Tensor, layers: Layers, *, num_points: int = 1000, chunk_points: int = 32768
) -> Oscillation:
    """Count changes of the predicted class on the segments between all pairs of features.

    `layers` holds weight and bias of one linear layer, or of two with a ReLU between them.
    `num_points` is K, the points of a segment with its ends; about `chunk_points` are in memory.
    The first layer is linear along a segment, so it is computed for the features and interpolated;
    the rest is computed at every point, so no change is missed. Float64 features are computed in
    float64, others in full float32: neighbouring points differ by 1/K of the distance between the
    ends, and rounding to TF32 or bfloat16 would flicker where two classes are close.
    """
    if len(layers) not in (1, 2):
        raise ValueError(f"oscillation needs one or two linear layers, found {len(layers)}")
    if num_points < 2:
        raise ValueError(f"num_points should be at least 2, found {num_points}")
    if not features_ND.isfinite().all():
        raise ValueError("some features are not finite; leave those images out")
    device = features_ND.device
    dtype = torch.float64 if features_ND.dtype == torch.float64 else torch.float32
    with torch.no_grad(), torch.autocast(device.type, enabled=False), _full_precision():
        (weight, bias), *rest = [(w.to(device, dtype), b.to(device, dtype)) for w, b in layers]
        first_NH = torch.addmm(bias, features_ND.to(dtype), weight.T)
        ends_NC = torch.addmm(rest[0][1], first_NH.relu(), rest[0][0].T) if rest else first_NH
        num_features, width = first_NH.shape

        pairs_at_once = min(max(1, chunk_points // num_points), max(1, num_features - 1))
        share_K1 = torch.linspace(0, 1, num_points, device=device, dtype=dtype)[:, None]
        hidden_RH = torch.empty(pairs_at_once * num_points, width, device=device, dtype=dtype)
        logits_RC = hidden_RH
        if rest:
            logits_RC = torch.empty(len(hidden_RH), ends_NC.shape[1], device=device, dtype=dtype)
        # Counted on the device and read once at the end, so that the loop never waits for it.
        changes = torch.zeros((), device=device, dtype=torch.int64)

        for start in range(num_features - 1):
            for begin in range(start + 1, num_features, pairs_at_once):
                ends_P1H = first_NH[begin : begin + pairs_at_once, None]
                rows = len(ends_P1H) * num_points
                hidden_PKH = hidden_RH[:rows].view(-1, num_points, width)
                torch.lerp(first_NH[start], ends_P1H, share_K1, out=hidden_PKH)
                if rest:
                    relu_RH, (weight, bias) = hidden_RH[:rows].relu_(), rest[0]
                    torch.addmm(bias, relu_RH, weight.T, out=logits_RC[:rows])
                predicted_PK = logits_RC[:rows].argmax(1).view(-1, num_points)
                changes += (predicted_PK[:, 1:] != predicted_PK[:, :-1]).sum()

        same_C = ends_NC.argmax(1).bincount()
        differing = (num_features * (num_features - 1) - (same_C * (same_C - 1)).sum()) // 2
        return Oscillation(int(changes) / num_points, int(differing) / num_points)


@contextmanager
def _full_precision() -> Iterator[None]:
    """Multiply float32 matrices in float32, whatever training has allowed."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
