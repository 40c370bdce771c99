"""JDA: joint distribution adaptation (Long, Wang, Ding, Sun and Yu, ICCV 2013), linear kernel.

Implemented: fixed features (of the pretrained weights or, without these, of the run's own
pretraining) are scaled to unit length and projected, so that the means of the domains and, by
pseudo-labels, of the classes agree while the variance is kept. Ten rounds renew the pseudo-labels.
An image gets the class of the nearest projected source row.
Deliberate differences: the eigenvectors are scaled so that the projected variance equals the
eigenvalue; the usual code scales them to unit length (lengths differ by a few per cent, which
changes the nearest neighbour of a few rows). Rounds end early if no pseudo-label changes. A class
without pseudo-labels is left out of a round. Logits are minus the squared distance to each
class's nearest row; their argmax is the nearest neighbour's class.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from certvol.methods._closed_form import (
    ABSENT,
    SMALLEST_SCALE,
    Array,
    ClosedFormMethod,
    Fitted,
    Labels,
    Problem,
    row_distances,
    row_parts,
)
from certvol.settings import setting


def unit_rows(rows_ND: Any) -> Any:
    """Scale the rows of an array or tensor to length 1; a row of zeros stays."""
    length_N1 = (rows_ND * rows_ND).sum(1)[:, None] ** 0.5
    return rows_ND / (length_N1 + (length_N1 == 0))


def _contrasts(problem: Problem, pseudo_T: Labels | None) -> Array:
    """Return the columns e of M = sum e e^T: differences between the domains' means.

    The first is that of all rows, weighted by C; the others are those of the classes present in
    both domains.
    """

    def column(in_source: NDArray[np.bool_], in_target: NDArray[np.bool_]) -> Array:
        means = [rows / max(1, int(rows.sum())) for rows in (in_source, in_target)]
        return np.concatenate([means[0], -means[1]])

    labels_S, num_target = problem.labels_S, len(problem.target_or_source_TD)
    everything = column(np.ones(len(labels_S), bool), np.ones(num_target, bool))
    columns = [everything * float(np.sqrt(problem.num_classes))]
    if pseudo_T is not None:
        shared = np.intersect1d(labels_S, pseudo_T)
        columns += [column(labels_S == label, pseudo_T == label) for label in shared]
    return np.stack(columns, axis=1)


def nearest_logits(
    rows_NK: Tensor,
    source_SK: Tensor,
    labels_S: Tensor,
    num_classes: int,
    temperature: float | Tensor,
) -> Tensor:
    """Return minus the squared distance to the nearest source row of each class."""
    found = []
    for rows in row_parts(rows_NK):
        squared_NS = row_distances(rows, source_SK).square()
        count = rows.shape[0]  # `len` would fix the number in an exported graph
        nearest_NC = rows.new_full((count, num_classes), -ABSENT)
        nearest_NC = nearest_NC.scatter_reduce(1, labels_S.expand(count, -1), squared_NS, "amin")
        found.append(-nearest_NC / temperature)
    return torch.cat(found)


class Method(ClosedFormMethod):
    summary = (
        "JDA on fixed features: align domains and classes by a projection, then nearest neighbour"
    )
    arrays = ("projection_DK", "source_SK", "labels_S", "temperature")
    projection_DK: Tensor
    source_SK: Tensor
    labels_S: Tensor
    temperature: Tensor

    @dataclass(frozen=True, kw_only=True)
    class Config:
        components: int = setting(
            100, above=0, at_most=2**16, help="K, the number of components to keep."
        )
        ridge: float = setting(1.0, at_least=1e-12, help="Lambda, the regularisation.")
        rounds: int = setting(
            10, above=0, at_most=10_000, help="Most rounds of projecting and relabelling."
        )

    @staticmethod
    def moments(source_SD: Array, target_TD: Array) -> list[tuple[Array, Array]]:
        """Leave the features as they are: `fit` scales rows to unit length."""
        dim = source_SD.shape[1]
        return [(np.zeros(dim), np.ones(dim))] * 2

    @staticmethod
    def fit(problem: Problem, config: Any, draws: np.random.Generator) -> Fitted:
        """Align the means of domains and classes, and keep the variance.

        Each round solves (X M X^T + ridge I) A = X H X^T A Phi for its smallest Phi. M is a sum of
        C + 1 outer products e e^T (`_contrasts`).
        """
        from scipy.linalg import eigh

        labels, target_TD = torch.from_numpy(problem.labels_S), problem.target_or_source_TD
        rows_ND = unit_rows(np.concatenate([problem.source_SD, target_TD]))
        dim = rows_ND.shape[1]
        centred_ND = rows_ND - rows_ND.mean(axis=0)
        scatter_DD = centred_ND.T @ centred_ND  # X H X^T
        largest = [max(0, dim - config.components), dim - 1]
        pseudo_T: Labels | None = None
        for _ in range(max(1, config.rounds)):
            contrasts_NE = _contrasts(problem, pseudo_T)
            size = float(np.linalg.norm(contrasts_NE.T @ contrasts_NE))  # ||M||_F, as M = E E^T
            means_DE = rows_ND.T @ contrasts_NE / np.sqrt(max(size, SMALLEST_SCALE))
            penalty_DD = means_DE @ means_DE.T + config.ridge * np.eye(dim)
            _, vectors_DK = eigh(scatter_DD, penalty_DD, subset_by_index=largest)
            projection_DK = vectors_DK[:, ::-1]
            projected_NK = torch.from_numpy(unit_rows(rows_ND @ projection_DK))
            source_SK, target_TK = projected_NK.tensor_split([len(labels)])
            logits_TC = nearest_logits(target_TK, source_SK, labels, problem.num_classes, 1.0)
            found_T = logits_TC.argmax(1).numpy()
            if pseudo_T is not None and np.array_equal(found_T, pseudo_T):
                break
            pseudo_T = found_T
        # The median squared distance of a target row to its nearest source row scales the logits.
        nearest = float(-logits_TC.max(1).values.median())
        return {
            "projection_DK": projection_DK,
            "source_SK": source_SK.numpy(),
            "labels_S": problem.labels_S,
            "temperature": max(nearest, 1e-3),
        }

    def fitted_logits(self, rows_ND: Tensor) -> Tensor:
        rows_NK = unit_rows(unit_rows(rows_ND) @ self.projection_DK)
        classes = self.network.num_classes
        return nearest_logits(rows_NK, self.source_SK, self.labels_S, classes, self.temperature)
