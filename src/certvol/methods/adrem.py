"""AdREM: domain adaptation with randomised expectation maximisation (van Laarhoven and Marchiori,
arXiv 1803.07634).

Implemented: on fixed features (of the pretrained weights or, without these, of the run's own
pretraining), each divided by its deviation over both domains. A linear SVM that is trained on the
source labels the target. In each of `rounds` rounds, an SVM is trained on the source and on a
growing number of target images with their present labels, equally many of each class, and labels
the target again; the last round takes as many as the target has. This is repeated from the first
labels, and the SVMs of the last rounds vote; the probability of a class is its share of the votes.
Two-fold cross-validation on the source chooses the strength. Images of a class are drawn without
replacement: each once before any twice.
Deliberate differences: negative features are kept (published: set to 0; a ReLU network has none).
The SVMs vote on new images too. The published variant with logistic regression is left out.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from certvol.methods._closed_form import Fitted, Labels, Problem
from certvol.methods._linear_svm import VotingMethod, best_strength, classify, linear_svm
from certvol.settings import setting


def balanced_copies(
    labels_N: Labels, num_classes: int, count: float, draws: np.random.Generator
) -> Labels:
    """Return how often each row is taken: ceil(count / C) rows of every class, as evenly as can be.

    Which rows of a class are taken once more than the others is random.
    """
    per_class = int(np.ceil(count / num_classes))
    copies_N = np.zeros(len(labels_N), dtype=np.int64)
    for label in np.unique(labels_N):
        rows = np.flatnonzero(labels_N == label)
        whole, rest = divmod(per_class, len(rows))
        copies_N[rows] = whole
        copies_N[draws.permutation(rows)[:rest]] += 1
    return copies_N


class Method(VotingMethod):
    summary = "AdREM on fixed features: SVMs, self-trained on growing parts of the target, vote"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        rounds: int = setting(
            20, above=0, at_most=10_000, help="Rounds in which the target's part grows to all."
        )
        repetitions: int = setting(
            11, above=0, at_most=10_000, help="Repetitions of the self-training; each adds a voter."
        )

    @staticmethod
    def fit(problem: Problem, config: Any, draws: np.random.Generator) -> Fitted:
        """Return the weights at the end of each repetition."""
        source_SD, labels_S, target_TD, classes = problem
        strength = best_strength(source_SD, labels_S, classes, draws)
        source_CD = linear_svm(source_SD, labels_S, classes, strength)
        rows_ND = np.concatenate([source_SD, target_TD])
        once_S = np.ones(len(source_SD), dtype=np.int64)
        found = []
        for _ in range(config.repetitions):
            weight_CD = source_CD
            for number in range(1, config.rounds + 1):
                labels_T = classify(target_TD, weight_CD)
                count = len(target_TD) * number / config.rounds
                copies_T = balanced_copies(labels_T, classes, count, draws)
                labels_N = np.concatenate([labels_S, labels_T])
                copies_N = np.concatenate([once_S, copies_T])
                weight_CD = linear_svm(rows_ND, labels_N, classes, strength, copies_N)
            found.append(weight_CD)
        return {"weight_RCD": np.stack(found)}
