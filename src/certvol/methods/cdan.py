"""Conditional Domain Adversarial Network (Long et al., NeurIPS 2018): DANN on features combined
with predicted classes.

Implemented: cross-entropy on the source + a discriminator's cross-entropy on the product z (x) p of
a bottleneck's output and the class probabilities (without gradient), its gradient reversed as in
`dann`. The paper's random product (R_z z) * (R_p p) / sqrt(d) replaces a long one. With `entropy`
(CDAN+E, the default) a row counts by 1 + exp(-entropy) within its domain.
Deliberate differences: the weights of CDAN+E have no gradient. Learning rate, discriminator and
dropout are those of `dann`. `target_ce` is not in the paper.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from certvol.methods._adversary import AdversarialMethod
from certvol.methods._base import Batch
from certvol.methods._losses import certainty_weights
from certvol.nn.network import Network
from certvol.settings import setting

LONGEST_PRODUCT = 4096  # the paper takes the random product above this


class OuterProduct(nn.Module):
    """All products z_b p_c of a row, N x (B C), at entry b C + c."""

    def forward(self, rows_NB: Tensor, probabilities_NC: Tensor) -> Tensor:
        return (rows_NB[:, :, None] * probabilities_NC[:, None, :]).flatten(1)


class RandomProduct(nn.Module):
    """A random product, N x R, whose inner products equal the outer product's on average."""

    random_rows_BR: Tensor
    random_probabilities_CR: Tensor

    def __init__(self, width: int, num_classes: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("random_rows_BR", torch.randn(width, dim))
        self.register_buffer("random_probabilities_CR", torch.randn(num_classes, dim))

    def forward(self, rows_NB: Tensor, probabilities_NC: Tensor) -> Tensor:
        left_NR = rows_NB @ self.random_rows_BR
        right_NR = probabilities_NC @ self.random_probabilities_CR
        return left_NR * right_NR / math.sqrt(left_NR.shape[1])


class Method(AdversarialMethod):
    summary = "CDAN: DANN on features combined with predicted classes"

    @dataclass(frozen=True, kw_only=True)
    class Config(AdversarialMethod.Config):
        entropy: bool = setting(True, help="Weight rows by their certainty (CDAN+E).")
        product: Literal["auto", "outer", "random"] = setting(
            "auto",
            help="Product of features and probabilities; auto: outer up to 4,096 entries, "
            "else random.",
        )
        random_dim: int = setting(
            1024, above=0, at_most=2**16, help="Entries of the random product."
        )

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__(network, config)
        width, classes = self.head.width, network.num_classes
        length = width * classes
        long = config.product == "auto" and length > LONGEST_PRODUCT
        if config.product == "random" or long:
            length = config.random_dim
            self.product: nn.Module = RandomProduct(width, classes, length)
        else:
            self.product = OuterProduct()
        self.discriminator = self.new_discriminator(length)

    def domain_losses(self, batch: Batch, rows_NB: Tensor, logits_NC: Tensor) -> dict[str, Tensor]:
        p_NC = logits_NC.detach().float().softmax(dim=1)
        joined_NE = self.product(rows_NB, p_NC)
        certainty_N = certainty_weights(p_NC) if self.config.entropy else None
        loss = self.adversarial_loss(batch, joined_NE, certainty_N=certainty_N)
        return {"adversarial": loss}
