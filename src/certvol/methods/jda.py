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
from torch import Tensor

from certvol.methods._alignment import Array, Problem, jda, nearest_logits, unit_rows
from certvol.methods._closed_form import ClosedFormMethod, Fitted
from certvol.settings import setting


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
        dim = source_SD.shape[1]
        return [(np.zeros(dim), np.ones(dim))] * 2

    @staticmethod
    def fit(problem: Problem, config: Any, draws: np.random.Generator) -> Fitted:
        found = jda(problem, config.components, config.ridge, config.rounds)
        return {**found._asdict(), "labels_S": problem.labels_S}

    def fitted_logits(self, rows_ND: Tensor) -> Tensor:
        rows_NK = unit_rows(unit_rows(rows_ND) @ self.projection_DK)
        classes = self.network.num_classes
        return nearest_logits(rows_NK, self.source_SK, self.labels_S, classes, self.temperature)
