"""Conditional Domain Adversarial Network (Long et al., NeurIPS 2018): DANN on features joined with predicted classes.

Implemented: cross-entropy on the source + a discriminator's cross-entropy on the product z (x) p of a bottleneck's output and the
class probabilities (without gradient), its gradient reversed as in `dann`. A long product is replaced by the paper's random one,
(R_z z) * (R_p p) / sqrt(d). With `entropy` (CDAN+E, the default) a row counts by 1 + exp(-entropy) within its domain.
Deliberate differences: the weights of CDAN+E have no gradient; learning rate, discriminator and dropout as in `dann`.
`target_ce` is not in the paper.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from certvol.bounds import bounded
from certvol.losses import certainty_weights, domain_confusion, mean_cross_entropy, ramp
from certvol.methods.protocol import AdaptationMethod, Batch
from certvol.nn import bottleneck
from certvol.nn.adversary import DomainDiscriminator, reverse_gradient
from certvol.nn.network import Network

LONGEST_PRODUCT = 4096  # the paper's limit, above which it takes the random product


class OuterProduct(nn.Module):
    """N x (B C): entry b C + c is z_b p_c."""

    def forward(self, rows_NB: Tensor, probabilities_NC: Tensor) -> Tensor:
        return (rows_NB[:, :, None] * probabilities_NC[:, None, :]).flatten(1)


class RandomProduct(nn.Module):
    """N x d, whose inner products are those of the outer products on average."""

    random_rows_BR: Tensor
    random_probabilities_CR: Tensor

    def __init__(self, width: int, num_classes: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("random_rows_BR", torch.randn(width, dim))
        self.register_buffer("random_probabilities_CR", torch.randn(num_classes, dim))

    def forward(self, rows_NB: Tensor, probabilities_NC: Tensor) -> Tensor:
        left_NR, right_NR = rows_NB @ self.random_rows_BR, probabilities_NC @ self.random_probabilities_CR
        return left_NR * right_NR / math.sqrt(left_NR.shape[1])


class Method(AdaptationMethod):
    summary = "CDAN: DANN on features joined with predicted classes"
    batches = "plain"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        weight: float = bounded(1.0, least=0)  # of the discriminator's loss
        reversal: float = bounded(1.0, least=0)  # lambda at the end of its ramp
        entropy: bool = True  # CDAN+E: sure rows count more
        product: Literal["auto", "outer", "random"] = "auto"  # auto: outer, up to 4096 entries
        random_dim: int = bounded(1024, above=0)  # entries of the random product
        bottleneck: int = bounded(256, least=0)  # its width; 0: none, and the common classifier
        discriminator_width: int = bounded(1024, above=0)
        discriminator_norm: bool = True
        target_ce: bool = False  # also train on this cycle's pseudo-labels, like `basic`

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__(network, config)
        width, num_classes = bottleneck.install(network, config.bottleneck), network.num_classes
        length = width * num_classes
        random = config.product == "random" or (config.product == "auto" and length > LONGEST_PRODUCT)
        self.product = RandomProduct(width, num_classes, config.random_dim) if random else OuterProduct()
        self.discriminator = DomainDiscriminator(
            config.random_dim if random else length, config.discriminator_width, config.discriminator_norm
        )

    @property
    def term_weights(self) -> dict[str, float]:
        return {"adversarial": self.config.weight}

    def loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        rows_NB, logits_NC = bottleneck.compared_rows(self.network, batch.images_NCHW)
        labelled = batch.num_labelled(self.config.target_ce)
        terms = {"ce": mean_cross_entropy(logits_NC[:labelled], batch.labels_N[:labelled])}
        if batch.adapting:
            p_NC = logits_NC.detach().float().softmax(dim=1)
            joined = reverse_gradient(self.product(rows_NB, p_NC), self.config.reversal * ramp(batch.progress))
            certainty_N = certainty_weights(p_NC) if self.config.entropy else None
            terms["adversarial"] = domain_confusion(self.discriminator(joined), batch.num_source, certainty_N)
        return terms
