"""Estimators that are fitted in closed form, without gradient steps, by the methods' own fits."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from certvol.methods import adrem, coral, gtda, jda, prda, rwa
from certvol.methods._closed_form import Array, ClosedFormMethod, Problem
from certvol.methods._linear_svm import joint_scale, vote_shares
from certvol.randomness import numpy_generator
from certvol.sklearn._rows import UNLABELLED, Rows, TargetClassifier, declared

ATTRIBUTES = {
    "weight_CD": "coef_",
    "weight_RCD": "coef_",
    "bias_C": "intercept_",
    "projection_DK": "projection_",
    "source_SK": "source_",
    "labels_S": "source_labels_",
    "temperature": "temperature_",
    "nodes_MD": "nodes_",
    "strategies_MC": "strategies_",
    "scales_M": "scales_",
}
"""Maps the name of a fitted array to the estimator's attribute."""


class _ClosedFormClassifier(TargetClassifier):
    """An estimator that calls the fit of a method in closed form."""

    _method: ClassVar[type[ClosedFormMethod]]

    def _fit_rows(self, rows: Rows, seed: int) -> None:
        """Fit; labelled target rows join the source."""
        is_known_T = rows.known_T != UNLABELLED
        source_SD = np.concatenate([rows.source_SD, rows.target_TD[is_known_T]])
        labels_S = np.concatenate([rows.labels_S, rows.known_T[is_known_T]])
        self._fit(Problem(source_SD, labels_S, rows.target_TD, len(self.classes_)), seed)

    def _fit(self, problem: Problem, seed: int) -> None:
        given, declared_as = self.get_params(deep=False), self._settings
        settings = {declared_as[name].name: given[name] for name in given if name in declared_as}
        draws = numpy_generator(seed, type(self).__name__)
        fitted = self._method.fit(problem, self._method.Config(**settings), draws)
        for name, value in fitted.items():
            setattr(self, ATTRIBUTES[name], value)


class _LinearClassifier(_ClosedFormClassifier):
    """A linear classifier of standardised rows."""

    coef_: Array
    intercept_: Array

    def _probabilities(self, rows_ND: Array) -> Array:
        logits_NC = torch.from_numpy(rows_ND @ self.coef_.T + self.intercept_)
        return np.asarray(logits_NC.softmax(1).numpy())


class _VotingClassifier(_ClosedFormClassifier):
    """A vote of linear support vector machines; probabilities are the shares of votes."""

    def _fit(self, problem: Problem, seed: int) -> None:
        source_SD, labels_S, _, classes = problem
        target_TD = problem.target_or_source_TD
        scale_D = self.deviation_ = joint_scale(source_SD, target_TD)
        super()._fit(Problem(source_SD / scale_D, labels_S, target_TD / scale_D, classes), seed)

    def _probabilities(self, rows_ND: Array) -> Array:
        rows, weights = torch.from_numpy(rows_ND / self.deviation_), torch.from_numpy(self.coef_)
        return np.asarray(vote_shares(rows, weights).numpy())


@dataclass(kw_only=True, eq=False, repr=False)
class CORALClassifier(_LinearClassifier):
    """Correlation alignment: a logistic regression on the source with the target's covariance.

    - `standardize`: 'domain' (each domain's mean and variance, as in the paper), 'joint' or None
    - `ridge`: multiple of the identity that is added to both covariances
    - `C`: inverse regularisation of the logistic regression
    """

    _method, _settings = coral.Method, declared(coral.Method.Config, C="strength")

    ridge: float = 1.0
    C: float = 1.0
    standardize: str | None = "domain"


@dataclass(kw_only=True, eq=False, repr=False)
class JDAClassifier(_ClosedFormClassifier):
    """Joint distribution adaptation: project both domains, label by the nearest source row.

    In the projection, the means of the domains and of their classes agree.

    - `n_components`: dimensions of the projection
    - `ridge`: lambda, the regularisation of the projection
    - `iterations`: rounds of projecting and relabelling, at most
    - `standardize`: None (rows are scaled to unit length in any case), 'joint' or 'domain'
    """

    _method = jda.Method
    _settings = declared(jda.Method.Config, n_components="components", iterations="rounds")

    n_components: int = 100
    ridge: float = 1.0
    iterations: int = 10

    def _probabilities(self, rows_ND: Array) -> Array:
        projected_NK = jda.unit_rows(jda.unit_rows(rows_ND) @ self.projection_)
        arrays = (projected_NK, self.source_, self.source_labels_)
        rows, source, labels = (torch.from_numpy(array) for array in arrays)
        classes = len(self.classes_)
        logits = jda.nearest_logits(rows, source, labels, classes, self.temperature_)
        return np.asarray(logits.softmax(1).numpy())


@dataclass(kw_only=True, eq=False, repr=False)
class GTDAClassifier(_LinearClassifier):
    """A game on a graph of all rows, in which target rows adopt the labels of their neighbours.

    - `n_neighbors`: neighbours of each row in the graph
    - `iterations`: rounds of the game, at most
    - `C`: inverse regularisation of the logistic regression that target rows start from
    - `standardize`: 'domain' (each domain's own mean and variance), 'joint' or None
    """

    _method = gtda.Method
    _settings = declared(
        gtda.Method.Config, n_neighbors="neighbours", iterations="rounds", C="strength"
    )

    n_neighbors: int = 20
    iterations: int = 200
    C: float = 1.0
    standardize: str | None = "domain"

    def _probabilities(self, rows_ND: Array) -> Array:
        arrays = (self.nodes_, self.strategies_, self.scales_)
        game = gtda.Game(*(torch.from_numpy(array) for array in arrays))
        start = torch.from_numpy(super()._probabilities(rows_ND))
        rows = torch.from_numpy(rows_ND)
        found_NC = gtda.gtda_strategies(rows, start, game, self.n_neighbors)
        return np.asarray(found_NC.numpy())


@dataclass(kw_only=True, eq=False, repr=False)
class RWAClassifier(_VotingClassifier):
    """Random walks over target labels; support vector machines from the walk vote.

    - `iterations`: steps of the walk; published: 500
    - `target_share`: share of the target's weights in a step's classifier
    - `standardize`: None (features are divided by their deviation anyway), 'joint' or 'domain'
    """

    _method, _settings = rwa.Method, declared(rwa.Method.Config, iterations="steps")

    iterations: int = 100
    target_share: float = 0.5


@dataclass(kw_only=True, eq=False, repr=False)
class AdREMClassifier(_VotingClassifier):
    """Randomised expectation maximisation: self-training on growing random parts of the target.

    - `rounds`: rounds in which the target's part grows to all of it
    - `repetitions`: repetitions from the source's labels, and voters
    - `standardize`: None (features are divided by their deviation anyway), 'joint' or 'domain'
    """

    _method, _settings = adrem.Method, declared(adrem.Method.Config)

    rounds: int = 20
    repetitions: int = 11


@dataclass(kw_only=True, eq=False, repr=False)
class PrDAClassifier(_LinearClassifier):
    """Progressive domain augmentation: virtual rows between the domains enlarge the source.

    - `n_components`: dimensions of a subspace
    - `subspaces`: most subspaces of a domain
    - `confidence`: least probability of a virtual row that is added
    - `C`: inverse regularisation of the logistic regression
    - `standardize`: 'domain' (each domain's own mean and variance), 'joint' or None
    """

    _method = prda.Method
    _settings = declared(prda.Method.Config, n_components="dims", C="strength")

    n_components: int = 44
    subspaces: int = 3
    confidence: float = 0.9
    C: float = 1.0
    standardize: str | None = "domain"
