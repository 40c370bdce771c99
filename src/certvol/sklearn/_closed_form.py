"""Estimators in closed form."""

from typing import Any

import numpy as np
import torch

from certvol.methods import _alignment as alignment
from certvol.methods import coral, jda
from certvol.methods._alignment import Array
from certvol.sklearn._rows import Labels, TargetClassifier, declared


class CORALClassifier(TargetClassifier):
    """Correlation alignment: a logistic regression on the source with the target's covariance.

    standardize : 'domain' (each domain's own mean and variance, as in the paper), 'joint' or None
    ridge : multiple of the identity that is added to both covariances
    C : inverse regularisation of the logistic regression
    """

    _settings = declared(coral.Method.Config, C="strength")

    def __init__(
        self,
        *,
        ridge: float = 1.0,
        C: float = 1.0,
        standardize: str | None = "domain",
        random_state: Any = None,
    ) -> None:
        self._store(locals())

    def _fit(self, source_SD: Array, labels_S: Labels, target_TD: Array, seed: int) -> None:
        if len(target_TD):
            source_SD = alignment.coral(source_SD, target_TD, self.ridge)
        self.coef_, self.intercept_ = alignment.logistic_regression(
            source_SD, labels_S, len(self.classes_), self.C
        )

    def _probabilities(self, rows_ND: Array) -> Array:
        logits = torch.from_numpy(rows_ND @ self.coef_.T + self.intercept_)
        return np.asarray(logits.softmax(1).numpy())


class JDAClassifier(TargetClassifier):
    """Joint distribution adaptation: project both domains, label by the nearest source row.

    In the projection, the means of the domains and of their classes agree.

    n_components : dimensions of the projection
    ridge : lambda, the regularisation of the projection
    iterations : rounds of projecting and relabelling, at most
    standardize : None (rows are scaled to unit length in any case), 'joint' or 'domain'
    """

    _settings = declared(jda.Method.Config, n_components="components", iterations="rounds")

    def __init__(
        self,
        *,
        n_components: int = 100,
        ridge: float = 1.0,
        iterations: int = 10,
        standardize: str | None = None,
        random_state: Any = None,
    ) -> None:
        self._store(locals())

    def _fit(self, source_SD: Array, labels_S: Labels, target_TD: Array, seed: int) -> None:
        fit = alignment.JDA(len(self.classes_), self.n_components, self.ridge, self.iterations).fit
        found = fit(source_SD, labels_S, target_TD if len(target_TD) else source_SD)
        self.projection_, self.source_ = found.projection_DK, found.source_SK
        self.temperature_, self.source_labels_ = found.temperature, labels_S

    def _probabilities(self, rows_ND: Array) -> Array:
        projected_NK = alignment.unit_rows(alignment.unit_rows(rows_ND) @ self.projection_)
        arrays = (projected_NK, self.source_, self.source_labels_)
        rows, source, labels = (torch.from_numpy(array) for array in arrays)
        classes = len(self.classes_)
        logits = alignment.nearest_logits(rows, source, labels, classes, self.temperature_)
        return np.asarray(logits.softmax(1).numpy())
