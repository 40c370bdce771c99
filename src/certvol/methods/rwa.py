"""RWA: unsupervised domain adaptation with random walks on target labelings (van Laarhoven and
Marchiori, arXiv 1706.05335).

Implemented: on fixed features (of the pretrained weights or, without these, of the run's own
pretraining), each divided by its deviation over both domains. A linear SVM that is trained on the
source labels the target. Each step of the walk draws target images with replacement, equally many
of each present label, trains an SVM on them, averages its weights with those of the source's SVM
(`target_share`), and labels the target again. The probability of a class is the share of steps that
gave an image this label. Two-fold cross-validation chooses the strength of the source's SVM, and of
the target's on the first labels.
Deliberate differences: 100 steps by default (published: 500). Negative features are kept
(published: set to 0; a ReLU network has none). The SVMs vote on new images too, so the model of a
run is the weights of all steps. `data.view_set: shifted` averages the 18 views of the published
features.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from certvol.methods._closed_form import Fitted, Labels, Problem
from certvol.methods._linear_svm import VotingMethod, best_strength, classify, linear_svm
from certvol.settings import setting


def balanced_bootstrap(labels_N: Labels, num_classes: int, draws: np.random.Generator) -> Labels:
    """Return how often each row is drawn: ceil(N / C) times with replacement from every class."""
    per_class = -(-len(labels_N) // num_classes)
    copies_N = np.zeros(len(labels_N), dtype=np.int64)
    for label in np.unique(labels_N):
        rows = np.flatnonzero(labels_N == label)
        np.add.at(copies_N, draws.choice(rows, per_class), 1)
    return copies_N


class Method(VotingMethod):
    summary = "RWA on fixed features: SVMs from a random walk over target labels vote"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        steps: int = setting(
            100, above=0, at_most=10_000, help="Steps of the walk; published: 500."
        )
        target_share: float = setting(
            0.5,
            at_least=0,
            at_most=1,
            help="Share of the target's SVM in a step's average of weights.",
        )

    @staticmethod
    def fit(problem: Problem, config: Any, draws: np.random.Generator) -> Fitted:
        """Return the weights that labelled the target after each step of the walk."""
        source_SD, labels_S, target_TD, classes = problem
        strength = best_strength(source_SD, labels_S, classes, draws)
        source_CD = linear_svm(source_SD, labels_S, classes, strength)
        labels_T = classify(target_TD, source_CD)
        strength = best_strength(target_TD, labels_T, classes, draws)
        found = []
        for _ in range(config.steps):
            copies_T = balanced_bootstrap(labels_T, classes, draws)
            target_CD = linear_svm(target_TD, labels_T, classes, strength, copies_T)
            found.append(config.target_share * target_CD + (1 - config.target_share) * source_CD)
            labels_T = classify(target_TD, found[-1])
        return {"weight_RCD": np.stack(found)}
