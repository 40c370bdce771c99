"""RWA, AdREM and PrDA as their papers write them: repeated rows, one machine per class, loops."""

import math
import warnings
from typing import NamedTuple

import numpy as np
from sklearn.svm import LinearSVC

Rows = np.ndarray


def machine(rows: Rows, labels: list[int], classes: int, strength: float) -> Rows:
    """Fit a machine per class against all others; with two classes, one and its opposite."""
    found = np.zeros((classes, rows.shape[1]))
    present = sorted(set(labels))
    for label in present[1:] if len(present) == 2 else present:
        sides = [1 if other == label else -1 for other in labels]
        svm = LinearSVC(C=strength, loss="hinge", fit_intercept=False, tol=1e-8, max_iter=100_000)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[label] = svm.fit(rows, sides).coef_[0]
    if len(present) == 2:
        found[present[0]] = -found[present[1]]
    return found


def labels_of(rows: Rows, weights: Rows) -> list[int]:
    fitted = [c for c in range(len(weights)) if weights[c].any()]
    return [max(fitted, key=lambda c: float(row @ weights[c])) for row in rows]


class Problem(NamedTuple):
    source: Rows
    labels: list[int]
    target: Rows
    classes: int


def random_walk(
    problem: Problem,
    steps: int,
    strengths: tuple[float, float],
    draws: np.random.Generator,
    share: float,
) -> list[list[int]]:
    """Return the labels of the target after each step."""
    source, labels, target, classes = problem
    of_source = machine(source, labels, classes, strengths[0])
    now, found = labels_of(target, of_source), []
    for _ in range(steps):
        rows: list[int] = []
        for label in sorted(set(now)):
            members = [i for i, other in enumerate(now) if other == label]
            rows += draws.choice(members, math.ceil(len(target) / classes)).tolist()
        of_target = machine(target[rows], [now[i] for i in rows], classes, strengths[1])
        now = labels_of(target, share * of_target + (1 - share) * of_source)
        found.append(now)
    return found


def randomised_em(
    problem: Problem, rounds: int, strength: float, draws: np.random.Generator
) -> list[int]:
    """Return the labels of the target after one repetition."""
    source, labels, target, classes = problem
    now = labels_of(target, machine(source, labels, classes, strength))
    for number in range(1, rounds + 1):
        rows: list[int] = []
        for label in sorted(set(now)):
            members = [i for i, other in enumerate(now) if other == label]
            wanted = math.ceil(len(target) * number / rounds / classes)
            copies = wanted // len(members)
            rows += members * copies
            rows += draws.permutation(members)[: wanted - copies * len(members)].tolist()
        both = np.concatenate([source, target[rows]])
        now = labels_of(
            target, machine(both, [*labels, *(now[i] for i in rows)], classes, strength)
        )
    return now
