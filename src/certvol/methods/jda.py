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

import numpy as np
from torch import Tensor

from certvol.methods._alignment import JDA, nearest_logits, unit_rows
from certvol.methods._closed_form import ClosedFormMethod
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

    def fit_features(self, source_SD: Tensor, labels_S: Tensor, target_TD: Tensor) -> None:
        dim, config = source_SD.shape[1], self.config
        source, target = (rows.double().numpy() for rows in (source_SD, target_TD))
        jda = JDA(self.network.num_classes, config.components, config.ridge, config.rounds)
        found = jda.fit(source, labels_S.numpy(), target)
        self.keep(
            mean_D=np.zeros(dim),
            scale_D=np.ones(dim),
            projection_DK=found.projection_DK,
            source_SK=found.source_SK,
            labels_S=labels_S.numpy(),
            temperature=np.array([found.temperature]),
        )

    def fitted_logits(self, rows_ND: Tensor) -> Tensor:
        rows_NK = unit_rows(unit_rows(rows_ND) @ self.projection_DK)
        classes = self.network.num_classes
        return nearest_logits(rows_NK, self.source_SK, self.labels_S, classes, self.temperature)
