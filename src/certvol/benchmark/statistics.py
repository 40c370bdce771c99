"""Whether a difference is more than noise, and how well a score ranks. Small and exact."""

from collections.abc import Sequence
from itertools import product

import numpy as np
from numpy.typing import NDArray

EXACT_PAIRS = 16  # up to here all sign flips are tried, 65,536 of them
DRAWN_FLIPS = 100_000
SIGNIFICANT = 0.05


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p of the mean of paired differences: the share of all ways to flip their signs that give one as large.

    Needs no distribution, only that without an effect a difference is as likely as its opposite. Zero differences count.
    """
    values = np.asarray(differences, dtype=np.float64)
    if len(values) == 0:
        return 1.0
    if len(values) <= EXACT_PAIRS:
        signs = np.array(list(product((1.0, -1.0), repeat=len(values))))
    else:
        signs = np.random.default_rng(0).choice((1.0, -1.0), size=(DRAWN_FLIPS, len(values)))
        signs[0] = 1  # the one that was seen
    sums = np.abs(signs @ values)
    seen = abs(values.sum())
    return float((sums >= seen - 1e-12 * max(1.0, seen)).mean())


def least_p(pairs: int) -> float:
    """The smallest that `sign_flip_p` can give."""
    return min(1.0, 2.0 ** (1 - pairs))


def ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """From 1; equals share the mean of theirs."""
    array = np.asarray(values, dtype=np.float64)
    below = (array[None, :] < array[:, None]).sum(axis=1)
    equal = (array[None, :] == array[:, None]).sum(axis=1)
    return np.asarray(below + (equal + 1) / 2, dtype=np.float64)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's; None where one of the two does not vary, or there are fewer than three values."""
    if len(first) < 3:
        return None
    a, b = ranks(first), ranks(second)
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return None if scale == 0 else float(a @ b) / scale
