"""Adaptation in closed form on fixed features: CORAL, JDA and GTDA, and the classifiers they need.

Fitting takes and gives numpy arrays in float64; what predicts takes torch tensors. N, S and T rows (any, source, target),
D features, K components, C classes. The methods `coral`, `jda`, `gtda` and the estimators of `certvol.sklearn` share this.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]
Labels = NDArray[np.int64]
SMALLEST_SCALE = 1e-12
ABSENT = -1e4  # logit of a class without any source row


def mean_and_scale(features_ND: Array) -> tuple[Array, Array]:
    """Of each feature; the scale of one that never changes is 1."""
    scale_D = features_ND.std(axis=0)
    return features_ND.mean(axis=0), np.where(scale_D > SMALLEST_SCALE, scale_D, 1.0)


def logistic_regression(features_ND: Array, labels_N: Labels, num_classes: int, strength: float) -> tuple[Array, Array]:
    """W (C x D) and b (C) of a multinomial logistic regression; `strength` is the weight of the data against the L2 penalty."""
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=strength, max_iter=1000, tol=1e-4).fit(features_ND, labels_N)
    weight_CD, bias_C = np.zeros((num_classes, features_ND.shape[1])), np.full(num_classes, float(ABSENT))
    if len(model.classes_) == 2:  # one row alone, for the second class against the first
        weight_CD[model.classes_] = np.stack([np.zeros_like(model.coef_[0]), model.coef_[0]])
        bias_C[model.classes_] = np.array([0.0, model.intercept_[0]])
    else:
        weight_CD[model.classes_], bias_C[model.classes_] = model.coef_, model.intercept_
    return weight_CD, bias_C


# CORAL


def symmetric_power(matrix_DD: Array, power: float) -> Array:
    """Of a positive definite matrix."""
    values_D, vectors_DD = np.linalg.eigh(matrix_DD)
    return np.asarray((vectors_DD * np.maximum(values_D, SMALLEST_SCALE) ** power) @ vectors_DD.T)


def covariance(features_ND: Array, ridge: float) -> Array:
    """With n - 1, and `ridge` times the identity; that alone where there is one row."""
    centred_ND = features_ND - features_ND.mean(axis=0)
    return np.asarray(centred_ND.T @ centred_ND / max(1, len(features_ND) - 1) + ridge * np.eye(features_ND.shape[1]))


def coral(source_SD: Array, target_TD: Array, ridge: float = 1.0) -> Array:
    """The source whitened and recoloured with the target's covariance: Xs Cs^-1/2 Ct^1/2, with C = cov + ridge I."""
    whiten_DD = symmetric_power(covariance(source_SD, ridge), -0.5)
    recolour_DD = symmetric_power(covariance(target_TD, ridge), 0.5)
    return np.asarray(source_SD @ (whiten_DD @ recolour_DD))


# JDA


@dataclass(frozen=True)
class JointAlignment:
    projection_DK: Array
    source_SK: Array
    """The source rows, projected, of unit length."""
    temperature: float
    """Typical squared distance of a target row to its nearest source row: what makes distances logits."""


def unit_rows(rows_ND: Any) -> Any:
    """Each row divided by its length. For arrays and tensors; a row of zeros stays as it is."""
    length_N1 = (rows_ND * rows_ND).sum(1)[:, None] ** 0.5
    return rows_ND / (length_N1 + (length_N1 == 0))


def jda(
    source_SD: Array,
    labels_S: Labels,
    target_TD: Array,
    num_classes: int,
    components: int = 100,
    ridge: float = 1.0,
    iterations: int = 10,
) -> JointAlignment:
    """Joint distribution adaptation: the components that keep the variance while means of domains and of classes agree.

    (X M X^T + ridge I) A = X H X^T A Phi is solved for its smallest Phi. M is a sum of C + 1 outer products e e^T, so
    X M X^T + ridge I has an inverse square root in closed form, and what is left is an ordinary symmetric problem.
    """
    from scipy.linalg import eigh

    rows_ND = unit_rows(np.concatenate([source_SD, target_TD]))
    num_source, dim = len(source_SD), rows_ND.shape[1]
    centred_ND = rows_ND - rows_ND.mean(axis=0)
    scatter_DD = centred_ND.T @ centred_ND  # X H X^T
    keep = min(components, dim)
    pseudo_T: Labels | None = None
    for _ in range(max(1, iterations)):
        contrasts_NE = _contrasts(labels_S, pseudo_T, len(target_TD), num_classes)
        size = float(np.linalg.norm(contrasts_NE.T @ contrasts_NE))  # ||M||_F, as M = E E^T
        differences_DE = rows_ND.T @ contrasts_NE / np.sqrt(max(size, SMALLEST_SCALE))
        left_DE, values_E, _ = np.linalg.svd(differences_DE, full_matrices=False)
        shrink_E = 1 / np.sqrt(values_E**2 + ridge) - 1 / np.sqrt(ridge)

        def inverse_root(matrix: Array, left: Array = left_DE, shrink: Array = shrink_E) -> Array:
            return np.asarray(matrix / np.sqrt(ridge) + left @ (shrink[:, None] * (left.T @ matrix)))

        inner_DD = inverse_root(inverse_root(scatter_DD).T)
        _, vectors_DK = eigh((inner_DD + inner_DD.T) / 2, subset_by_index=[dim - keep, dim - 1])
        projection_DK = inverse_root(vectors_DK[:, ::-1])
        projected_NK = unit_rows(rows_ND @ projection_DK)
        source_SK, target_TK = projected_NK[:num_source], projected_NK[num_source:]
        logits_TC = nearest_logits(_tensor(target_TK), _tensor(source_SK), torch.from_numpy(labels_S), num_classes, 1.0)
        found_T = logits_TC.argmax(1).numpy()
        if pseudo_T is not None and np.array_equal(found_T, pseudo_T):
            break
        pseudo_T = found_T
    nearest = float(-logits_TC.max(1).values.median()) if len(target_TD) else 1.0
    return JointAlignment(projection_DK, source_SK, max(nearest, 1e-3))


def _contrasts(labels_S: Labels, pseudo_T: Labels | None, num_target: int, num_classes: int) -> Array:
    """Columns e of M = sum e e^T: the difference of the domains' means, weighted by C, and of every class present in both."""
    num_source = len(labels_S)

    def column(in_source: NDArray[np.bool_], in_target: NDArray[np.bool_]) -> Array:
        means = [in_source / max(1, int(in_source.sum())), -1.0 * in_target / max(1, int(in_target.sum()))]
        return np.asarray(np.concatenate(means), dtype=np.float64)

    everything: Array = column(np.ones(num_source, bool), np.ones(num_target, bool)) * float(np.sqrt(num_classes))
    if pseudo_T is None:
        return everything[:, None]
    shared = [c for c in range(num_classes) if (labels_S == c).any() and (pseudo_T == c).any()]
    return np.stack([everything, *(column(labels_S == c, pseudo_T == c) for c in shared)], axis=1)


def _distances(rows_ND: Tensor, others_MD: Tensor) -> Tensor:
    """Summed in float64: by matrix products in float32, let alone TF32, a row of 2,048 features is not at 0 from itself."""
    return torch.cdist(rows_ND.double(), others_MD.double()).to(rows_ND.dtype)


def nearest_logits(
    rows_NK: Tensor,
    source_SK: Tensor,
    labels_S: Tensor,
    num_classes: int,
    temperature: float | Tensor,
    chunk: int = 4096,
) -> Tensor:
    """Minus the squared distance to the nearest source row of each class: their argmax is the class of the nearest row."""
    found = []
    for rows in torch.split(rows_NK, chunk):
        squared_NS = _distances(rows, source_SK).square()
        nearest_NC = torch.full((len(rows), num_classes), -ABSENT, dtype=rows.dtype, device=rows.device)
        nearest_NC.scatter_reduce_(1, labels_S.expand(len(rows), -1), squared_NS, "amin")
        found.append(-nearest_NC / temperature)
    return torch.cat(found) if found else rows_NK.new_zeros((0, num_classes))


# GTDA


@dataclass(frozen=True)
class Game:
    """A graph whose nodes have settled on mixed strategies, one share per class."""

    nodes_ND: Array
    strategies_NC: Array
    scales_N: Array
    """Distance of each node to its k-th neighbour."""


NEIGHBOUR_OF_SCALE = 7  # whose distance is a node's own bandwidth (Zelnik-Manor and Perona's self-tuning kernel)


def neighbours(rows_ND: Tensor, nodes_ND: Tensor, count: int, chunk: int = 2048) -> tuple[Tensor, Tensor]:
    """(distances, numbers) of the nearest nodes of each row, the nearest first."""
    count = min(count, len(nodes_ND))
    parts = [_distances(rows, nodes_ND).topk(count, largest=False) for rows in torch.split(rows_ND, chunk)]
    return torch.cat([part.values for part in parts]), torch.cat([part.indices for part in parts])


def similarities(distances_NK: Tensor, own_scale_N1: Tensor, other_scales_NK: Tensor) -> Tensor:
    """w_ij = exp(-d_ij^2 / (s_i s_j))."""
    return (-distances_NK.square() / (own_scale_N1 * other_scales_NK).clamp_min(SMALLEST_SCALE)).exp()


def payoffs(weights_NK: Tensor, numbers_NK: Tensor, strategies_MC: Tensor) -> Tensor:
    """u_i(h) = sum_j w_ij x_jh over the neighbours of each row."""
    return (weights_NK[:, :, None] * strategies_MC[numbers_NK]).sum(1)


def replicate(strategies_NC: Tensor, payoffs_NC: Tensor) -> Tensor:
    """x_ih <- x_ih u_i(h) / sum_k x_ik u_i(k). A row whose neighbours pay nothing keeps its strategy."""
    moved_NC = strategies_NC * payoffs_NC
    total_N1 = moved_NC.sum(1, keepdim=True)
    return torch.where(total_N1 > 0, moved_NC / total_N1.clamp_min(1e-300), strategies_NC)


def gtda(
    source_SD: Array,
    labels_S: Labels,
    target_TD: Array,
    start_TC: Array,
    num_neighbours: int = 20,
    most_rounds: int = 200,
    tolerance: float = 1e-6,
) -> Game:
    """Source nodes play their label, target nodes start from `start_TC`, and the target replicates until nothing moves."""
    num_source = len(source_SD)
    nodes_ND, start = _tensor(np.concatenate([source_SD, target_TD])), _tensor(start_TC)
    labels = torch.nn.functional.one_hot(torch.from_numpy(labels_S), start.shape[1]).double()
    strategies_NC = torch.cat([labels, start])
    distances, numbers = neighbours(nodes_ND, nodes_ND, max(num_neighbours, NEIGHBOUR_OF_SCALE) + 1)
    distances, numbers = distances[:, 1:], numbers[:, 1:]  # the nearest is the node itself, or its double
    scales_N = distances[:, min(NEIGHBOUR_OF_SCALE, distances.shape[1]) - 1].clamp_min(SMALLEST_SCALE)
    of_target = slice(num_source, None)
    distances, numbers = distances[of_target, :num_neighbours], numbers[of_target, :num_neighbours]
    weights_TK = similarities(distances, scales_N[of_target, None], scales_N[numbers])
    for _ in range(most_rounds):
        moved_TC = replicate(strategies_NC[of_target], payoffs(weights_TK, numbers, strategies_NC))
        change = float((moved_TC - strategies_NC[of_target]).abs().max()) if len(moved_TC) else 0.0
        strategies_NC[of_target] = moved_TC
        if change < tolerance:
            break
    return Game(nodes_ND.numpy(), strategies_NC.numpy(), scales_N.numpy())


def gtda_strategies(
    rows_ND: Tensor, start_NC: Tensor, nodes_ND: Tensor, strategies_MC: Tensor, scales_M: Tensor, num_neighbours: int
) -> Tensor:
    """Of a row that is a node of the game: the node's strategy. Of a new row: one move against its settled neighbours."""
    distances, numbers = neighbours(rows_ND, nodes_ND, max(num_neighbours, NEIGHBOUR_OF_SCALE))
    own_scale_N1 = distances[:, [min(NEIGHBOUR_OF_SCALE, distances.shape[1]) - 1]].clamp_min(SMALLEST_SCALE)
    distances, numbers = distances[:, :num_neighbours], numbers[:, :num_neighbours]
    weights_NK = similarities(distances, own_scale_N1, scales_M[numbers])
    moved_NC = replicate(start_NC, payoffs(weights_NK, numbers, strategies_MC))
    is_node_N1 = distances[:, :1] < 1e-3 * own_scale_N1  # up to what another batch size does to a feature's last digits
    return torch.where(is_node_N1, strategies_MC[numbers[:, 0]], moved_NC)


def _tensor(array: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float64))
