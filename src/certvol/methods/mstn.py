"""Moving Semantic Transfer Network (Xie et al., ICML 2018): DANN, and the same centroid for each
class in both domains.

Implemented: cross-entropy on the source + DANN's term, whose gradient reaches the features with
factor 0.1 on the sum of both domains' losses (0.2 on their mean) + lambda * sum over classes of the
mean of (C_s - C_t)^2 over the dimensions of a bottleneck's output. A centroid moves by 0.3 towards
its class's mean in the batch; the gradient flows through that 0.3 alone. Target rows are labelled
by the network at this step, without dropout. lambda is DANN's ramp, for both terms. Plain batches,
as published.
Deliberate differences: the published code scales the discriminator's own loss by 0.1 too, but lets
it learn at ten times the backbone's rate; here there is one rate, and only the reversed gradient is
scaled. The discriminator is that of `dann`, with BatchNorm, and dropout as published: without, its
loss stays at log 2 in short runs. The paper sums the squared distances over classes and dimensions;
its code takes the mean over both, on an unnormalised layer (for digits, on 10 logits). Behind this
bottleneck's BatchNorm the sum far outweighs the cross-entropy, and the mean hardly counts. A class
that a batch lacks keeps its centroid (the published code shrinks it towards 0). A centroid starts
at its class's first mean instead of at 0, and counts once both domains have one. `pseudo_labels:
cycle` and `target_ce` are not in the paper.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from certvol.methods._adversary import AdversarialMethod
from certvol.methods._base import Batch
from certvol.methods._losses import class_means, ramp
from certvol.nn.network import Network
from certvol.settings import setting


class Method(AdversarialMethod):
    summary = "MSTN: DANN, and the same centroid for each class in both domains"
    weighted: ClassVar[dict[str, str]] = {"centroids": "weight"}
    sums_2CB: Tensor
    """Centroids times `seen_2C`."""
    seen_2C: Tensor
    """1 if a domain has shown a class; after averaging, the share of processes that saw it."""

    @dataclass(frozen=True, kw_only=True)
    class Config(AdversarialMethod.Config):
        weight: float = setting(1.0, at_least=0, help="Weight of the centroids' distance.")
        adversarial_weight: float = setting(
            0.2, at_least=0, help="Factor of the reversed gradient."
        )
        centroid_momentum: float = setting(
            0.7, at_least=0, below=1, help="Share of a centroid that stays when a batch updates it."
        )
        pseudo_labels: Literal["batch", "cycle"] = setting(
            "batch",
            help="Labels of target rows: batch (by the network at each step) or cycle (this "
            "cycle's).",
        )
        discriminator_dropout: float = setting(0.5, at_least=0, below=1, help="Dropout rate.")

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__(network, config)
        width = self.head.width
        self.discriminator = self.new_discriminator(width, config.discriminator_dropout)
        self.register_buffer("sums_2CB", torch.zeros(2, network.num_classes, width))
        self.register_buffer("seen_2C", torch.zeros(2, network.num_classes))

    def _move_centroids(
        self, rows_NB: Tensor, labels_N: Tensor, domain: int
    ) -> tuple[Tensor, Tensor]:
        """Return centroids, C x B, and whether each class has one; store them while training."""
        means_CB, present_C = class_means(rows_NB, labels_N, self.network.num_classes)
        sums_CB, seen_C = self.sums_2CB[domain], self.seen_2C[domain]
        known_C1, keep = (seen_C > 0)[:, None], self.config.centroid_momentum
        stored_CB = sums_CB / seen_C.clamp(min=1e-6)[:, None]
        before_CB = torch.where(known_C1, stored_CB, means_CB.detach())
        after_CB = keep * before_CB + (1 - keep) * means_CB
        moved_CB = torch.where(present_C[:, None] > 0, after_CB, before_CB)
        has_C = torch.maximum(present_C, known_C1[:, 0].float())
        if self.training:
            with torch.no_grad():
                sums_CB.copy_(moved_CB)
                seen_C.copy_(has_C)
        return moved_CB, has_C

    def domain_losses(self, batch: Batch, rows_NB: Tensor, logits_NC: Tensor) -> dict[str, Tensor]:
        adversarial = self.adversarial_loss(batch, rows_NB, self.config.adversarial_weight)
        source_SB, target_TB = rows_NB.tensor_split([batch.num_source])
        source_S, target_T = batch.labels_N.tensor_split([batch.num_source])
        if self.config.pseudo_labels == "batch":
            target_T = self.head.classify(target_TB.detach(), nn.Identity()).argmax(dim=1)
        source_CB, has_source_C = self._move_centroids(source_SB, source_S, 0)
        target_CB, has_target_C = self._move_centroids(target_TB, target_T, 1)
        distance_C = (source_CB - target_CB).square().mean(dim=1)
        distance = (has_source_C * has_target_C * distance_C).sum()
        return {"adversarial": adversarial, "centroids": ramp(batch.progress) * distance}
