"""Deep Adaptation Network (Long et al., ICML 2015): source and target of a batch should have the same mean in a kernel's space.

Implemented: cross-entropy on the source + `weight` * MMD^2 on a bottleneck's output, without bias, with a sum of Gaussian kernels
whose widths are multiples of the mean squared distance in the batch (1/8, 1/4, .. 2; the mean has no gradient). Plain batches.
Deliberate differences: the paper compares AlexNet's last three layers with linear-time estimates and learned weights of 33
kernels (2^-8 to 2^8); this is its usual form for residual networks, one layer, even weights, five kernels, with all pairs. All
parts learn at one rate (published: the backbone at a tenth), and `model.dropout` stands before the classifier. `target_ce` is
not in the paper.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from certvol.bounds import bounded
from certvol.losses import maximum_mean_discrepancy, mean_cross_entropy
from certvol.methods.protocol import AdaptationMethod, Batch
from certvol.nn import bottleneck
from certvol.nn.network import Network

KERNEL_WIDTHS = (0.125, 0.25, 0.5, 1.0, 2.0)  # times the mean squared distance


class Method(AdaptationMethod):
    summary = "DAN: equal kernel means of source and target (MK-MMD)"
    batches = "plain"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        weight: float = bounded(1.0, least=0)
        bottleneck: int = bounded(256, least=0)  # its width; 0: none, and the common classifier
        target_ce: bool = False  # also train on this cycle's pseudo-labels, like `basic`

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__(network, config)
        bottleneck.install(network, config.bottleneck)

    @property
    def term_weights(self) -> dict[str, float]:
        return {"mmd": self.config.weight}

    def loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        rows_NB, logits_NC = bottleneck.compared_rows(self.network, batch.images_NCHW)
        labelled = batch.num_labelled(self.config.target_ce)
        terms = {"ce": mean_cross_entropy(logits_NC[:labelled], batch.labels_N[:labelled])}
        if batch.adapting:
            terms["mmd"] = maximum_mean_discrepancy(
                rows_NB[: batch.num_source], rows_NB[batch.num_source :], KERNEL_WIDTHS
            )
        return terms
