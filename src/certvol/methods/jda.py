"""JDA: joint distribution adaptation (Long, Wang, Ding, Sun and Yu, ICCV 2013), with the linear kernel.

Implemented: on fixed features (of pretrained weights, or else those that pretraining has made):
rows of unit length; the projection in which the means of the domains and, by pseudo-labels, of the classes agree
while the variance is kept; ten rounds of it; the class of the nearest projected source row.
Differences: the eigenproblem is solved at D dimensions by the closed inverse root of its low-rank side (equal results, see
the tests); its vectors are scaled so that the projected variance is what the eigenvalue says, where the usual code has
vectors of unit length (lengths differ by a few per cent, which the nearest neighbour of a few rows notices); rounds end early
where no pseudo-label changes; a class without pseudo-labels counts for nothing in a round; logits are minus the squared
distance to each class's nearest row, whose argmax is the nearest neighbour's class.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from certvol.alignment import jda, nearest_logits, unit_rows
from certvol.bounds import bounded
from certvol.closed_form import ClosedFormMethod


class Method(ClosedFormMethod):
    summary = "JDA on fixed features: a projection that aligns domains and classes; nearest neighbour"
    arrays = ("projection_DK", "source_SK", "labels_S", "temperature")
    projection_DK: Tensor
    source_SK: Tensor
    labels_S: Tensor
    temperature: Tensor

    @dataclass(frozen=True, kw_only=True)
    class Config:
        components: int = bounded(100, above=0)  # K
        ridge: float = bounded(1.0, above=0)  # lambda
        rounds: int = bounded(10, above=0)

    def fit_features(self, source_SD: Tensor, labels_S: Tensor, target_TD: Tensor) -> None:
        dim, classes, settings = source_SD.shape[1], self.network.num_classes, self.config
        source, target = (rows.double().numpy() for rows in (source_SD, target_TD))
        found = jda(source, labels_S.numpy(), target, classes, settings.components, settings.ridge, settings.rounds)
        self.keep(
            mean_D=np.zeros(dim),
            scale_D=np.ones(dim),
            projection_DK=found.projection_DK,
            source_SK=found.source_SK,
            labels_S=labels_S.numpy(),
            temperature=np.array([found.temperature]),
        )

    def fitted_logits(self, rows_ND: Tensor) -> Tensor:
        projected_NK = unit_rows(unit_rows(rows_ND) @ self.projection_DK)
        return nearest_logits(projected_NK, self.source_SK, self.labels_S, self.network.num_classes, self.temperature)
