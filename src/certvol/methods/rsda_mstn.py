"""RSDA-MSTN (Gu, Sun and Xu, CVPR 2020): RSDA, with centroids of the classes drawn together across the domains as in
MSTN.

Implemented: all of `rsda_dann`, in each of its trainings with ramp * sum over classes of 1 - cos(centroid of the
source, centroid of the target). Centroids are moving averages of the batches' class means on the sphere; the gradient
flows through this batch's share. Target rows count for the class that the model predicts now.
Deliberate differences: as in `rsda_dann`; a class without rows in a batch keeps its centroid, and one that a domain has
not shown yet is left out. `semantic_weight` is not in the paper, where it is 1.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from certvol.bounds import bounded
from certvol.losses import class_means
from certvol.methods import rsda_dann
from certvol.methods.protocol import Batch
from certvol.nn.network import Network
from certvol.nn.sphere import unit


def moved_centroids(centroids_CD: Tensor, rows_ND: Tensor, labels_N: Tensor, share: float) -> Tensor:
    """(1 - share) of the old + share of the class's mean; as before for a class without rows."""
    means_CD, there_C = class_means(rows_ND, labels_N, len(centroids_CD))
    return torch.where(there_C[:, None] > 0, (1 - share) * centroids_CD + share * means_CD, centroids_CD)


def semantic_distance(source_CD: Tensor, target_CD: Tensor) -> Tensor:
    """Sum of 1 - cos over the classes that both domains have shown; a centroid of 0 has not been."""
    shown_C = (source_CD.detach().abs().sum(dim=1) > 0) & (target_CD.detach().abs().sum(dim=1) > 0)
    return (shown_C * (1 - (unit(source_CD) * unit(target_CD)).sum(dim=1))).sum()


class Method(rsda_dann.Method):
    summary = "RSDA on MSTN: RSDA with centroids of classes drawn together across the domains"

    @dataclass(frozen=True, kw_only=True)
    class Config(rsda_dann.Method.Config):
        centroid_share: float = bounded(0.3, least=0, below=1)  # of a batch in the moving average
        semantic_weight: float = bounded(1.0, least=0)

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__(network, config)
        self.source_centroids_CD: Tensor
        self.target_centroids_CD: Tensor
        for name in ("source_centroids_CD", "target_centroids_CD"):
            self.register_buffer(name, torch.zeros(network.num_classes, config.width))

    @property
    def term_weights(self) -> dict[str, float]:
        return {**super().term_weights, "semantic": self.config.semantic_weight}

    def further_terms(self, batch: Batch, z_ND: Tensor, logits_NC: Tensor, rising: Tensor) -> dict[str, Tensor]:
        split, share = batch.num_source, self.config.centroid_share
        with torch.autocast(z_ND.device.type, enabled=False):
            source_CD = moved_centroids(self.source_centroids_CD, z_ND[:split], batch.labels_N[:split], share)
            predicted_N = logits_NC[split:].argmax(dim=1)
            target_CD = moved_centroids(self.target_centroids_CD, z_ND[split:], predicted_N, share)
            distance = semantic_distance(source_CD, target_CD)
        self.source_centroids_CD.copy_(source_CD.detach())
        self.target_centroids_CD.copy_(target_CD.detach())
        return {"semantic": rising * distance}
