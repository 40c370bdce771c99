"""RSDA-MSTN (Gu, Sun and Xu, CVPR 2020): RSDA, with the class centroids of both domains pulled
together as in MSTN.

Implemented: all of `rsda_dann`, in each of its trainings with ramp * sum over classes of 1 -
cos(centroid of the source, centroid of the target). Centroids are moving averages of the batches'
class means on the sphere; the gradient flows through this batch's share. Target rows count for the
class that the model predicts now.
Deliberate differences: as in `rsda_dann`. A class without rows in a batch keeps its centroid. A
class that a domain has not shown so far is left out. `semantic_weight` is not in the paper, which
has 1.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from certvol.methods import rsda_dann
from certvol.methods._base import Batch
from certvol.methods._losses import class_means, ramp
from certvol.methods._sphere import unit
from certvol.nn.network import Network
from certvol.settings import setting


def moved_centroids(
    centroids_CD: Tensor, rows_ND: Tensor, labels_N: Tensor, share: float
) -> Tensor:
    """Move each centroid by `share` towards its class's mean; a class without rows stays."""
    means_CD, there_C = class_means(rows_ND, labels_N, len(centroids_CD))
    moved_CD = (1 - share) * centroids_CD + share * means_CD
    return torch.where(there_C[:, None] > 0, moved_CD, centroids_CD)


def semantic_distance(source_CD: Tensor, target_CD: Tensor) -> Tensor:
    """Sum 1 - cos over the classes that both domains have shown: neither centroid is 0."""
    shown_C = (source_CD.detach().abs().sum(dim=1) > 0) & (target_CD.detach().abs().sum(dim=1) > 0)
    return (shown_C * (1 - (unit(source_CD) * unit(target_CD)).sum(dim=1))).sum()


class Method(rsda_dann.Method):
    summary = "RSDA on MSTN: RSDA, with the class centroids of both domains pulled together"
    weighted: ClassVar[dict[str, str]] = {
        **rsda_dann.Method.weighted,
        "semantic": "semantic_weight",
    }

    @dataclass(frozen=True, kw_only=True)
    class Config(rsda_dann.Method.Config):
        centroid_share: float = setting(
            0.3,
            at_least=0,
            below=1,
            help="Share of the newest batch in the moving average of centroids.",
        )
        semantic_weight: float = setting(1.0, at_least=0, help="Weight of the centroids' distance.")

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__(network, config)
        self.source_centroids_CD: Tensor
        self.target_centroids_CD: Tensor
        for name in ("source_centroids_CD", "target_centroids_CD"):
            self.register_buffer(name, torch.zeros(network.num_classes, config.width))

    def adaptation_terms(self, batch: Batch, z_ND: Tensor, logits_NC: Tensor) -> dict[str, Tensor]:
        terms = super().adaptation_terms(batch, z_ND, logits_NC)
        split, share = batch.num_source, self.config.centroid_share
        source, target = self.source_centroids_CD, self.target_centroids_CD
        with torch.autocast(z_ND.device.type, enabled=False):
            source_CD = moved_centroids(source, z_ND[:split], batch.labels_N[:split], share)
            predicted_N = logits_NC[split:].argmax(dim=1)
            target_CD = moved_centroids(target, z_ND[split:], predicted_N, share)
            distance = semantic_distance(source_CD, target_CD)
        source.copy_(source_CD.detach())
        target.copy_(target_CD.detach())
        return {**terms, "semantic": ramp(batch.progress) * distance}
