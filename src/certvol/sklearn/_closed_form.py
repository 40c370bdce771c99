"""Estimators that are fitted in closed form, without gradient steps."""

from typing import Any

import numpy as np
import torch

from certvol.methods import _alignment as alignment
from certvol.methods import adrem, coral, gtda, jda, prda, rwa
from certvol.methods._alignment import Array
from certvol.methods._linear_svm import joint_scale, vote_shares
from certvol.randomness import numpy_generator
from certvol.sklearn._rows import Labels, TargetClassifier, declared


class _LinearClassifier(TargetClassifier):
    """A linear classifier of standardised rows."""

    coef_: Array
    intercept_: Array

    def _probabilities(self, rows_ND: Array) -> Array:
        logits_NC = torch.from_numpy(rows_ND @ self.coef_.T + self.intercept_)
        return np.asarray(logits_NC.softmax(1).numpy())


class CORALClassifier(_LinearClassifier):
    """Correlation alignment: a logistic regression on the source with the target's covariance.

    - `standardize`: 'domain' (each domain's mean and variance, as in the paper), 'joint' or None
    - `ridge`: multiple of the identity that is added to both covariances
    - `C`: inverse regularisation of the logistic regression
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


class JDAClassifier(TargetClassifier):
    """Joint distribution adaptation: project both domains, label by the nearest source row.

    In the projection, the means of the domains and of their classes agree.

    - `n_components`: dimensions of the projection
    - `ridge`: lambda, the regularisation of the projection
    - `iterations`: rounds of projecting and relabelling, at most
    - `standardize`: None (rows are scaled to unit length in any case), 'joint' or 'domain'
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


class GTDAClassifier(_LinearClassifier):
    """A game on a graph of all rows, in which target rows adopt the labels of their neighbours.

    - `n_neighbors`: neighbours of each row in the graph
    - `iterations`: rounds of the game, at most
    - `C`: inverse regularisation of the logistic regression that target rows start from
    - `standardize`: 'domain' (each domain's own mean and variance), 'joint' or None
    """

    _settings = declared(
        gtda.Method.Config, n_neighbors="neighbours", iterations="rounds", C="strength"
    )

    def __init__(
        self,
        *,
        n_neighbors: int = 20,
        iterations: int = 200,
        C: float = 1.0,
        standardize: str | None = "domain",
        random_state: Any = None,
    ) -> None:
        self._store(locals())

    def _fit(self, source_SD: Array, labels_S: Labels, target_TD: Array, seed: int) -> None:
        self.coef_, self.intercept_ = alignment.logistic_regression(
            source_SD, labels_S, len(self.classes_), self.C
        )
        start_TC = super()._probabilities(target_TD)
        game = alignment.gtda(
            source_SD, labels_S, target_TD, start_TC, self.n_neighbors, self.iterations
        )
        self.nodes_, self.strategies_, self.scales_ = (each.numpy() for each in game)

    def _probabilities(self, rows_ND: Array) -> Array:
        arrays = (self.nodes_, self.strategies_, self.scales_)
        game = alignment.Game(*(torch.from_numpy(array) for array in arrays))
        start = torch.from_numpy(super()._probabilities(rows_ND))
        rows = torch.from_numpy(rows_ND)
        found_NC = alignment.gtda_strategies(rows, start, game, self.n_neighbors)
        return np.asarray(found_NC.numpy())


class _VotingClassifier(TargetClassifier):
    """A vote of linear support vector machines; probabilities are the shares of votes."""

    def _weights(
        self, source_SD: Array, labels_S: Labels, target_TD: Array, draws: np.random.Generator
    ) -> list[Array]:
        """Return the voters' weights, C x D each, for scaled features."""
        raise NotImplementedError

    def _fit(self, source_SD: Array, labels_S: Labels, target_TD: Array, seed: int) -> None:
        target_TD = target_TD if len(target_TD) else source_SD
        self.deviation_ = joint_scale(source_SD, target_TD)
        source_SD, target_TD = source_SD / self.deviation_, target_TD / self.deviation_
        draws = numpy_generator(seed, type(self).__name__)
        self.coef_ = np.stack(self._weights(source_SD, labels_S, target_TD, draws))

    def _probabilities(self, rows_ND: Array) -> Array:
        rows, weights = torch.from_numpy(rows_ND / self.deviation_), torch.from_numpy(self.coef_)
        return np.asarray(vote_shares(rows, weights).numpy())


class RWAClassifier(_VotingClassifier):
    """Random walks over target labels; support vector machines from the walk vote.

    - `iterations`: steps of the walk; published: 500
    - `target_share`: share of the target's weights in a step's classifier
    - `standardize`: None (features are divided by their deviation anyway), 'joint' or 'domain'
    """

    _settings = declared(rwa.Method.Config, iterations="steps")

    def __init__(
        self,
        *,
        iterations: int = 100,
        target_share: float = 0.5,
        standardize: str | None = None,
        random_state: Any = None,
    ) -> None:
        self._store(locals())

    def _weights(
        self, source_SD: Array, labels_S: Labels, target_TD: Array, draws: np.random.Generator
    ) -> list[Array]:
        walk = rwa.Walk(len(self.classes_), self.iterations, self.target_share)
        return walk.weights(source_SD, labels_S, target_TD, draws)


class AdREMClassifier(_VotingClassifier):
    """Randomised expectation maximisation: self-training on growing random parts of the target.

    - `rounds`: rounds in which the target's part grows to all of it
    - `repetitions`: repetitions from the source's labels, and voters
    - `standardize`: None (features are divided by their deviation anyway), 'joint' or 'domain'
    """

    _settings = declared(adrem.Method.Config)

    def __init__(
        self,
        *,
        rounds: int = 20,
        repetitions: int = 11,
        standardize: str | None = None,
        random_state: Any = None,
    ) -> None:
        self._store(locals())

    def _weights(
        self, source_SD: Array, labels_S: Labels, target_TD: Array, draws: np.random.Generator
    ) -> list[Array]:
        em = adrem.RandomisedEM(len(self.classes_), self.rounds, self.repetitions)
        return em.weights(source_SD, labels_S, target_TD, draws)


class PrDAClassifier(_LinearClassifier):
    """Progressive domain augmentation: virtual rows between the domains enlarge the source.

    - `n_components`: dimensions of a subspace
    - `subspaces`: most subspaces of a domain
    - `confidence`: least probability of a virtual row that is added
    - `C`: inverse regularisation of the logistic regression
    - `standardize`: 'domain' (each domain's own mean and variance), 'joint' or None
    """

    _settings = declared(prda.Method.Config, n_components="dims", C="strength")

    def __init__(
        self,
        *,
        n_components: int = 44,
        subspaces: int = 3,
        confidence: float = 0.9,
        C: float = 1.0,
        standardize: str | None = "domain",
        random_state: Any = None,
    ) -> None:
        self._store(locals())

    def _fit(self, source_SD: Array, labels_S: Labels, target_TD: Array, seed: int) -> None:
        rounds = prda.Augmentation(
            len(self.classes_), self.n_components, self.subspaces, self.confidence, self.C
        )
        target_TD = target_TD if len(target_TD) else source_SD
        draws = numpy_generator(seed, "PrDAClassifier")
        self.coef_, self.intercept_ = rounds.fit(source_SD, labels_S, target_TD, draws)
