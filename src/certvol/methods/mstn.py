"""Moving Semantic Transfer Network (Xie et al., ICML 2018): DANN, and each class's centroid the same in both domains.

Implemented: cross-entropy on the source + DANN's term, of which the features get 0.1 of both domains' losses added (0.2 of their
mean) + lambda * sum over classes of the mean of (C_s - C_t)^2 over the dimensions of a bottleneck's output. A centroid moves by
0.3 towards its class's mean in the batch; the gradient flows through that 0.3 alone. Target rows are filed under what the
network, without dropout, makes of them at this step. lambda is DANN's ramp, for both terms. Plain batches, as published.
Deliberate differences: the published code scales the discriminator's own loss by 0.1 too, but lets it learn at ten times the
backbone's rate; here there is one rate, and the 0.1 is on the reversed gradient alone. The discriminator is that of `dann`, with
BatchNorm, and dropout as published: without, its loss stays at log 2 in short runs. The paper sums the squared distances over
classes and dimensions, its code takes the mean over both, on an unnormalised layer (for digits, on 10 logits); behind this
bottleneck's BatchNorm the first drowns the cross-entropy and the second is drowned by it. A class absent from a batch keeps its
centroid (the published code shrinks it towards 0); a centroid starts at its class's first mean instead of at 0, and counts once
both domains have one. `pseudo_labels: cycle` and `target_ce` are not in the paper.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from certvol.bounds import bounded
from certvol.losses import class_means, domain_confusion, mean_cross_entropy, ramp
from certvol.methods.protocol import AdaptationMethod, Batch
from certvol.nn import bottleneck
from certvol.nn.adversary import DomainDiscriminator, reverse_gradient
from certvol.nn.network import Network


class Method(AdaptationMethod):
    summary = "MSTN: DANN, and each class's centroid the same in both domains"
    batches = "plain"
    sums_2CB: Tensor
    seen_2C: Tensor

    @dataclass(frozen=True, kw_only=True)
    class Config:
        weight: float = bounded(1.0, least=0)  # of the centroids' distance
        adversarial_weight: float = bounded(0.2, least=0)  # of the reversed gradient
        reversal: float = bounded(1.0, least=0)  # lambda at the end of its ramp
        centroid_momentum: float = bounded(0.7, least=0, below=1)
        pseudo_labels: Literal["batch", "cycle"] = (
            "batch"  # of target rows: by the network now, or by this cycle's labels
        )
        bottleneck: int = bounded(256, least=0)  # its width; 0: none, and the common classifier
        discriminator_width: int = bounded(1024, above=0)
        discriminator_norm: bool = True
        discriminator_dropout: float = bounded(0.5, least=0, below=1)
        target_ce: bool = False  # also train on this cycle's pseudo-labels, like `basic`

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__(network, config)
        width = bottleneck.install(network, config.bottleneck)
        self.discriminator = DomainDiscriminator(
            width, config.discriminator_width, config.discriminator_norm, config.discriminator_dropout
        )
        # Centroids times `seen`, which is 0 or 1, or the share of processes that have seen a class once they are averaged.
        self.register_buffer("sums_2CB", torch.zeros(2, network.num_classes, width))
        self.register_buffer("seen_2C", torch.zeros(2, network.num_classes))

    @property
    def term_weights(self) -> dict[str, float]:
        return {"centroids": self.config.weight}

    def _moved_centroids(self, rows_NB: Tensor, labels_N: Tensor, domain: int) -> tuple[Tensor, Tensor]:
        """(centroids C x B, whether each class has one), after this batch; remembered while training."""
        means_CB, present_C = class_means(rows_NB, labels_N, self.network.num_classes)
        sums_CB, seen_C = self.sums_2CB[domain], self.seen_2C[domain]
        known_C, keep = (seen_C > 0)[:, None], self.config.centroid_momentum
        before_CB = torch.where(known_C, sums_CB / seen_C.clamp(min=1e-6)[:, None], means_CB.detach())
        moved_CB = torch.where(present_C[:, None] > 0, keep * before_CB + (1 - keep) * means_CB, before_CB)
        has_C = torch.maximum(present_C, known_C[:, 0].float())
        if self.training:
            with torch.no_grad():
                sums_CB.copy_(moved_CB)
                seen_C.copy_(has_C)
        return moved_CB, has_C

    def loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        rows_NB, logits_NC = bottleneck.compared_rows(self.network, batch.images_NCHW)
        labelled, split = batch.num_labelled(self.config.target_ce), batch.num_source
        terms = {"ce": mean_cross_entropy(logits_NC[:labelled], batch.labels_N[:labelled])}
        if batch.adapting:
            rate = ramp(batch.progress)
            reversed_NB = reverse_gradient(rows_NB, self.config.adversarial_weight * self.config.reversal * rate)
            terms["adversarial"] = domain_confusion(self.discriminator(reversed_NB), split)
            target_N = batch.labels_N[split:]
            if self.config.pseudo_labels == "batch":
                target_N = (
                    bottleneck.head_of(self.network).classify(rows_NB[split:].detach(), dropout=0.0).argmax(dim=1)
                )
            source_CB, has_source_C = self._moved_centroids(rows_NB[:split], batch.labels_N[:split], 0)
            target_CB, has_target_C = self._moved_centroids(rows_NB[split:], target_N, 1)
            distance_C = (source_CB - target_CB).square().mean(dim=1)
            terms["centroids"] = rate * (has_source_C * has_target_C * distance_C).sum()
        return terms
