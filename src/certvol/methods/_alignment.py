"""CORAL, JDA and GTDA in closed form on fixed features, and the classifiers they need.

Fitting takes and returns numpy arrays in float64; prediction uses torch tensors. N, S and T rows
(any, source, target), D features, K components, C classes. The methods `coral`, `jda` and `gtda`
and the estimators of `certvol.sklearn` share this module.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]
Labels = NDArray[np.int64]
SMALLEST_SCALE = 1e-12
ABSENT = -1e4  # logit of a class without source rows
ROWS_AT_ONCE = 4096  # for distances to all source rows
# Its distance is a node's bandwidth (the self-tuning kernel of Zelnik-Manor and Perona).
SCALE_NEIGHBOUR = 7
SETTLED = 1e-6  # largest change of a strategy at which the game ends


class Problem(NamedTuple):
    """Labelled rows of the source and unlabelled ones of the target."""

    source_SD: Array
    labels_S: Labels
    target_TD: Array
    num_classes: int

    @property
    def compared_TD(self) -> Array:
        """The target's rows or, without any, the source's in their place."""
        return self.target_TD if len(self.target_TD) else self.source_SD


def mean_and_scale(features_ND: Array) -> tuple[Array, Array]:
    """Return each feature's mean and standard deviation; 1 for a constant feature."""
    scale_D = features_ND.std(axis=0)
    return features_ND.mean(axis=0), np.where(scale_D > SMALLEST_SCALE, scale_D, 1.0)


def logistic_regression(
    features_ND: Array, labels_N: Labels, num_classes: int, strength: float
) -> tuple[Array, Array]:
    """Fit a multinomial logistic regression; return W (C x D) and b (C).

    `strength` is the weight of the data against the L2 penalty.
    """
    from sklearn.linear_model import LogisticRegression

    if len(classes := np.unique(labels_N)) == 1:  # the only answer
        return np.zeros((num_classes, features_ND.shape[1])), np.where(
            np.arange(num_classes) == classes[0], 0.0, ABSENT
        )
    model = LogisticRegression(C=strength, max_iter=1000, tol=1e-4).fit(features_ND, labels_N)
    coef, intercept = model.coef_, model.intercept_
    if len(model.classes_) == 2:  # one row, for the second class against the first
        coef = np.concatenate([np.zeros_like(coef), coef])
        intercept = np.concatenate([[0.0], intercept])
    weight_CD = np.zeros((num_classes, features_ND.shape[1]))
    bias_C = np.full(num_classes, ABSENT)
    weight_CD[model.classes_], bias_C[model.classes_] = coef, intercept
    return weight_CD, bias_C


# CORAL


def symmetric_power(matrix_DD: Array, power: float) -> Array:
    """Raise a positive definite matrix to a power."""
    values_D, vectors_DD = np.linalg.eigh(matrix_DD)
    return np.asarray((vectors_DD * np.maximum(values_D, SMALLEST_SCALE) ** power) @ vectors_DD.T)


def covariance(features_ND: Array, ridge: float) -> Array:
    """Return the covariance with n - 1, plus `ridge` times the identity."""
    centred_ND = features_ND - features_ND.mean(axis=0)
    covariance_DD = centred_ND.T @ centred_ND / max(1, len(features_ND) - 1)
    return np.asarray(covariance_DD + ridge * np.eye(features_ND.shape[1]))


def coral(source_SD: Array, target_TD: Array, ridge: float = 1.0) -> Array:
    """Whiten the source and recolour it with the target's covariance: Xs Cs^-1/2 Ct^1/2.

    C is the covariance + ridge I.
    """
    whiten_DD = symmetric_power(covariance(source_SD, ridge), -0.5)
    recolour_DD = symmetric_power(covariance(target_TD, ridge), 0.5)
    return np.asarray(source_SD @ (whiten_DD @ recolour_DD))


# JDA


class JointAlignment(NamedTuple):
    """The result of JDA: a projection, and the projected source rows."""

    projection_DK: Array
    source_SK: Array
    """The projected source rows, of unit length."""
    temperature: float
    """Median squared distance of a target row to its nearest source row; it scales the logits."""


def unit_rows(rows_ND: Any) -> Any:
    """Scale the rows of an array or tensor to length 1; a row of zeros stays."""
    length_N1 = (rows_ND * rows_ND).sum(1)[:, None] ** 0.5
    return rows_ND / (length_N1 + (length_N1 == 0))


def jda(
    problem: Problem, components: int = 100, ridge: float = 1.0, rounds: int = 10
) -> JointAlignment:
    """Joint distribution adaptation: align the means of domains and classes, keep the variance.

    Each round solves (X M X^T + ridge I) A = X H X^T A Phi for its smallest Phi. M is a sum of C +
    1 outer products e e^T (`_contrasts`).
    """
    from scipy.linalg import eigh

    labels, target_TD = torch.from_numpy(problem.labels_S), problem.compared_TD
    rows_ND = unit_rows(np.concatenate([problem.source_SD, target_TD]))
    dim = rows_ND.shape[1]
    centred_ND = rows_ND - rows_ND.mean(axis=0)
    scatter_DD = centred_ND.T @ centred_ND  # X H X^T
    largest = [max(0, dim - components), dim - 1]
    pseudo_T: Labels | None = None
    for _ in range(max(1, rounds)):
        contrasts_NE = _contrasts(problem, pseudo_T)
        size = float(np.linalg.norm(contrasts_NE.T @ contrasts_NE))  # ||M||_F, as M = E E^T
        means_DE = rows_ND.T @ contrasts_NE / np.sqrt(max(size, SMALLEST_SCALE))
        penalty_DD = means_DE @ means_DE.T + ridge * np.eye(dim)
        _, vectors_DK = eigh(scatter_DD, penalty_DD, subset_by_index=largest)
        projection_DK = vectors_DK[:, ::-1]
        projected_NK = torch.from_numpy(unit_rows(rows_ND @ projection_DK))
        source_SK, target_TK = projected_NK.tensor_split([len(labels)])
        logits_TC = nearest_logits(target_TK, source_SK, labels, problem.num_classes, 1.0)
        found_T = logits_TC.argmax(1).numpy()
        if pseudo_T is not None and np.array_equal(found_T, pseudo_T):
            break
        pseudo_T = found_T
    nearest = float(-logits_TC.max(1).values.median())
    return JointAlignment(projection_DK, source_SK.numpy(), max(nearest, 1e-3))


def _contrasts(problem: Problem, pseudo_T: Labels | None) -> Array:
    """Return the columns e of M = sum e e^T: differences between the domains' means.

    The first is that of all rows, weighted by C; the others are those of the classes present in
    both domains.
    """

    def column(in_source: NDArray[np.bool_], in_target: NDArray[np.bool_]) -> Array:
        means = [rows / max(1, int(rows.sum())) for rows in (in_source, in_target)]
        return np.concatenate([means[0], -means[1]])

    labels_S = problem.labels_S
    everything = column(np.ones(len(labels_S), bool), np.ones(len(problem.compared_TD), bool))
    columns = [everything * float(np.sqrt(problem.num_classes))]
    if pseudo_T is not None:
        shared = np.intersect1d(labels_S, pseudo_T)
        columns += [column(labels_S == label, pseudo_T == label) for label in shared]
    return np.stack(columns, axis=1)


def _distances(rows_ND: Tensor, others_MD: Tensor) -> Tensor:
    """Return distances, computed in float64.

    With matrix products in float32 or TF32, a row of 2,048 features is not at distance 0 from
    itself.
    """
    pair = (rows_ND.double(), others_MD.double())
    return torch.cdist(*pair, compute_mode="use_mm_for_euclid_dist").to(rows_ND.dtype)


def _parts(rows_ND: Tensor) -> Sequence[Tensor]:
    """Split rows to bound memory, but not in an exported graph, whose number of rows is open."""
    return [rows_ND] if torch.compiler.is_compiling() else torch.split(rows_ND, ROWS_AT_ONCE)


def nearest_logits(
    rows_NK: Tensor,
    source_SK: Tensor,
    labels_S: Tensor,
    num_classes: int,
    temperature: float | Tensor,
) -> Tensor:
    """Return minus the squared distance to the nearest source row of each class."""
    found = []
    for rows in _parts(rows_NK):
        squared_NS = _distances(rows, source_SK).square()
        count = rows.shape[0]  # `len` would fix the number in an exported graph
        nearest_NC = rows.new_full((count, num_classes), -ABSENT)
        nearest_NC = nearest_NC.scatter_reduce(1, labels_S.expand(count, -1), squared_NS, "amin")
        found.append(-nearest_NC / temperature)
    return torch.cat(found)


# GTDA


class Game(NamedTuple):
    """A graph whose nodes have settled on mixed strategies, one share per class."""

    nodes_MD: Tensor
    strategies_MC: Tensor
    scales_M: Tensor
    """Distance of each node to its seventh neighbour."""


def neighbours(rows_ND: Tensor, nodes_MD: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return distances and numbers of the nearest nodes of each row, the nearest first."""
    count = min(count, len(nodes_MD))
    parts = [_distances(rows, nodes_MD).topk(count, largest=False) for rows in _parts(rows_ND)]
    return torch.cat([part.values for part in parts]), torch.cat([part.indices for part in parts])


def _own_scale(distances_NK: Tensor) -> Tensor:
    return distances_NK[:, min(SCALE_NEIGHBOUR, distances_NK.shape[1]) - 1].clamp_min(
        SMALLEST_SCALE
    )


def similarities(distances_NK: Tensor, own_scale_N1: Tensor, other_scales_NK: Tensor) -> Tensor:
    """Return w_ij = exp(-d_ij^2 / (s_i s_j))."""
    scales_NK = (own_scale_N1 * other_scales_NK).clamp_min(SMALLEST_SCALE)
    return (-distances_NK.square() / scales_NK).exp()


def payoffs(weights_NK: Tensor, numbers_NK: Tensor, strategies_MC: Tensor) -> Tensor:
    """Return u_i(h) = sum_j w_ij x_jh over the neighbours of each row."""
    return (weights_NK[:, :, None] * strategies_MC[numbers_NK]).sum(1)


def replicate(strategies_NC: Tensor, payoffs_NC: Tensor) -> Tensor:
    """Return x_ih u_i(h) / sum_k x_ik u_i(k); a row without payoffs keeps its strategy."""
    moved_NC = strategies_NC * payoffs_NC
    total_N1 = moved_NC.sum(1, keepdim=True)
    return torch.where(total_N1 > 0, moved_NC / total_N1.clamp_min(1e-300), strategies_NC)


def gtda(
    problem: Problem, start_TC: Array, num_neighbours: int = 20, most_rounds: int = 200
) -> Game:
    """Play the game from `start_TC` until target nodes settle; source nodes are fixed."""
    num_source = len(problem.source_SD)
    nodes_MD = torch.from_numpy(np.concatenate([problem.source_SD, problem.target_TD]))
    one_hot_SC = np.eye(problem.num_classes)[problem.labels_S]
    strategies_MC = torch.from_numpy(np.concatenate([one_hot_SC, start_TC]))
    distances, numbers = neighbours(nodes_MD, nodes_MD, max(num_neighbours, SCALE_NEIGHBOUR) + 1)
    distances, numbers = distances[:, 1:], numbers[:, 1:]  # without the node itself, or its double
    scales_M = _own_scale(distances)
    distances = distances[num_source:, :num_neighbours]
    numbers = numbers[num_source:, :num_neighbours]
    weights_TK = similarities(distances, scales_M[num_source:, None], scales_M[numbers])
    target_TC = strategies_MC[num_source:]
    for _ in range(most_rounds):
        moved_TC = replicate(target_TC, payoffs(weights_TK, numbers, strategies_MC))
        change = float((moved_TC - target_TC).abs().max()) if len(moved_TC) else 0.0
        target_TC.copy_(moved_TC)
        if change < SETTLED:
            break
    return Game(nodes_MD, strategies_MC, scales_M)


def gtda_strategies(rows_ND: Tensor, start_NC: Tensor, game: Game, num_neighbours: int) -> Tensor:
    """Return the strategy of a row that is a node; move a new row once from `start_NC`."""
    nodes_MD, strategies_MC, scales_M = game
    distances, numbers = neighbours(rows_ND, nodes_MD, max(num_neighbours, SCALE_NEIGHBOUR))
    own_scale_N1 = _own_scale(distances)[:, None]
    distances, numbers = distances[:, :num_neighbours], numbers[:, :num_neighbours]
    weights_NK = similarities(distances, own_scale_N1, scales_M[numbers])
    moved_NC = replicate(start_NC, payoffs(weights_NK, numbers, strategies_MC))
    # Another batch size changes the last digits of a feature.
    is_node_N1 = distances[:, :1] < 1e-3 * own_scale_N1
    return torch.where(is_node_N1, strategies_MC[numbers[:, 0]], moved_NC)
