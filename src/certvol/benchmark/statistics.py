"""Whether a difference is more than noise, and how well a score ranks. Small and exact."""

import math
from collections.abc import Mapping, Sequence
from itertools import product
from statistics import fmean

import numpy as np

from certvol.metrics import spearman

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


def tasks_p(differences: Mapping[tuple[str, int], float]) -> float | None:
    """The same over tasks, each by its mean over seeds, so that seeds do not pass for tasks. None where tasks are too few for
    anything to be found. `differences`: by task and seed."""
    by_task: dict[str, list[float]] = {}
    for (task, _), value in differences.items():
        by_task.setdefault(task, []).append(value)
    if least_p(len(by_task)) >= SIGNIFICANT:
        return None
    return sign_flip_p([fmean(values) for values in by_task.values()])


def least_p(pairs: int) -> float:
    """The smallest that `sign_flip_p` can give."""
    return min(1.0, 2.0 ** (1 - pairs))


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Spearman's; None where one of the two does not vary, or there are fewer than three values."""
    if len(first) < 3:
        return None
    found = spearman(np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64))
    return None if math.isnan(found) else found
