"""Rank methods over tasks: mean ranks with their uncertainty, and what each method costs.

Friedman's test asks whether the methods differ at all. Two mean ranks differ if they are further
apart than Nemenyi's critical difference (Demsar, JMLR 7, 2006). That test is strict if there are
many methods and few tasks, so each mean rank also has a bootstrap interval over tasks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from certvol.benchmark.significance import LEVEL
from certvol.benchmark.table_formats import Cell, Row, Table

FEWEST_METHODS = 3  # for Friedman's test
FEWEST_TASKS = 2
RESAMPLES = 2000

Scores = Mapping[str, Mapping[str, float]]
"""Method -> task -> accuracy."""


@dataclass(frozen=True)
class Standing:
    """The place of one method among the ranked ones."""

    method: str
    mean_rank: float
    low: float
    high: float
    """Ends of the bootstrap interval of the mean rank over tasks, 95 %."""
    accuracy: float
    """The mean accuracy over tasks."""


@dataclass(frozen=True)
class Ranking:
    """Methods by mean rank, the best first; rank 1 is best."""

    standings: list[Standing]
    tasks: list[str]
    p: float
    """Friedman's test of no difference between the methods."""
    critical_difference: float
    incomplete: list[str]
    """Methods that lack a task that another has; they are not ranked."""

    def near_best(self, standing: Standing) -> bool:
        """Return whether a method is within the critical difference of the best."""
        return standing.mean_rank - self.standings[0].mean_rank <= self.critical_difference


def rank(scores: Scores) -> Ranking | None:
    """Rank methods over all tasks; None if too few methods have them all, or there are too few."""
    tasks = list(dict.fromkeys(task for own in scores.values() for task in own))
    complete = [method for method, own in scores.items() if len(own) == len(tasks)]
    if len(complete) < FEWEST_METHODS or len(tasks) < FEWEST_TASKS:
        return None
    accuracies_MT = np.array([[scores[method][task] for task in tasks] for method in complete])
    # Rounded as results are written, so that ties are ties.
    ranks_MT = stats.rankdata(-accuracies_MT.round(6), axis=0)
    low_M, high_M = _intervals(ranks_MT)
    standings = [
        Standing(
            method,
            float(ranks_MT[i].mean()),
            float(low_M[i]),
            float(high_M[i]),
            fmean(accuracies_MT[i].tolist()),
        )
        for i, method in enumerate(complete)
    ]
    standings.sort(key=lambda standing: standing.mean_rank)
    return Ranking(
        standings,
        tasks,
        _friedman_p(ranks_MT),
        critical_difference(len(complete), len(tasks)),
        [method for method in scores if method not in complete],
    )


def critical_difference(methods: int, tasks: int) -> float:
    """Return the distance from which two mean ranks differ at 5 %, by Nemenyi."""
    q = float(stats.studentized_range.ppf(1 - LEVEL, methods, math.inf)) / math.sqrt(2)
    return q * math.sqrt(methods * (methods + 1) / (6 * tasks))


def _friedman_p(ranks_MT: NDArray[np.float64]) -> float:
    if (ranks_MT == ranks_MT[0]).all():  # all methods tie everywhere
        return 1.0
    return float(stats.friedmanchisquare(*ranks_MT).pvalue)


def _intervals(ranks_MT: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    tasks = ranks_MT.shape[1]
    draws_RT = np.random.default_rng(0).integers(tasks, size=(RESAMPLES, tasks))
    means_MR = ranks_MT[:, draws_RT].mean(axis=2)
    low_M, high_M = np.quantile(means_MR, [LEVEL / 2, 1 - LEVEL / 2], axis=1)
    return low_M, high_M


def mean_by_task(values: Mapping[tuple[str, str], Sequence[float]]) -> dict[str, dict[str, float]]:
    """Average the seeds of (method, task), as `rank` takes them."""
    found: dict[str, dict[str, float]] = {}
    for (method, task), own in values.items():
        found.setdefault(method, {})[task] = fmean(own)
    return found


def ranking_table(ranking: Ranking, cpu_seconds: Mapping[str, float]) -> Table:
    """Show a ranking; `cpu_seconds` are those of a run, by method, where they are known."""
    rows = []
    for each in ranking.standings:
        cost = cpu_seconds.get(each.method)
        words = [
            f"{each.mean_rank:.2f}",
            f"{each.low:.2f} to {each.high:.2f}",
            "yes" if ranking.near_best(each) else "no",
        ]
        cells = [*(Cell(text=word) for word in words), Cell(each.accuracy)]
        rows.append(Row(each.method, [*cells, Cell(text="" if cost is None else f"{cost:.0f}")]))
    p = "below 0.001" if ranking.p < 0.0005 else f"{ranking.p:.3f}"
    notes = [
        f"Ranks of accuracy (mean over seeds) on {len(ranking.tasks)} tasks; 1 is best, ties share "
        f"the mean. Friedman's test of no difference: p {p}.",
        f"Two mean ranks differ at 5 % if they are {ranking.critical_difference:.2f} or more apart "
        "(Nemenyi's critical difference). Interval: bootstrap over tasks, 95 %.",
        "CPU s: processor time of a run, over all its threads, without decoding and extraction.",
    ]
    if ranking.incomplete:
        notes.append(f"Not ranked, because a task is missing: {', '.join(ranking.incomplete)}.")
    columns = ["mean rank", "interval", "not worse than the best", "average", "CPU s"]
    title = f"ranking of {len(rows)} methods over {len(ranking.tasks)} tasks"
    return Table(title, columns, rows, notes=notes)
