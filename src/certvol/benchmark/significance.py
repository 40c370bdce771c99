"""Test whether a difference is more than noise."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from certvol.scores.metrics import spearman

RESAMPLES = 2**14  # all sign flips of up to 14 pairs; of more pairs, that many at random
LEVEL = 0.05
TOO_FEW, NOISE, POSITIVE, NEGATIVE = "too few pairs", "noise", "positive", "negative"


def sign_flip_p(differences: Sequence[float]) -> float:
    """Return the two-sided p of a mean of paired differences, by flipping their signs.

    The test assumes only that a difference and its opposite are equally likely without an effect.
    """
    if len(differences) < 2:
        return 1.0

    def total(values: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
        sums: NDArray[np.float64] = np.round(values.sum(axis=axis), 12)  # so that ties are ties
        return sums

    test = stats.permutation_test(
        (np.asarray(differences, dtype=np.float64),),
        total,
        permutation_type="samples",
        vectorized=True,
        n_resamples=RESAMPLES,
        random_state=0,
    )
    return float(test.pvalue)


def least_p(pairs: int) -> float:
    """Return the smallest p that so many pairs can reach."""
    return min(1.0, 2.0 ** (1 - pairs))


@dataclass(frozen=True)
class PairedTest:
    """Differences between two methods, and whether they are more than noise."""

    by_pair: Mapping[tuple[str, int], float]
    """(task, seed) -> difference."""

    @property
    def differences(self) -> list[float]:
        return list(self.by_pair.values())

    @cached_property
    def p(self) -> float:
        return sign_flip_p(self.differences)

    @property
    def p_over_tasks(self) -> float | None:
        """p for the means of tasks, because seeds of one task are not independent.

        None if there are too few tasks.
        """
        by_task: dict[str, list[float]] = {}
        for (task, _), value in self.by_pair.items():
            by_task.setdefault(task, []).append(value)
        if least_p(len(by_task)) >= LEVEL:
            return None
        return sign_flip_p([fmean(values) for values in by_task.values()])

    @property
    def outcome(self) -> str:
        """One of TOO_FEW, NOISE, POSITIVE and NEGATIVE."""
        if least_p(len(self.by_pair)) >= LEVEL:
            return TOO_FEW
        if self.p >= LEVEL:
            return NOISE
        return POSITIVE if fmean(self.differences) > 0 else NEGATIVE


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Spearman's correlation; None for constant values and for fewer than three."""
    found = spearman(np.asarray(first), np.asarray(second)) if len(first) > 2 else math.nan
    return None if math.isnan(found) else found
