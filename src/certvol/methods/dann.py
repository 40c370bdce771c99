"""Domain-Adversarial Neural Network (Ganin and Lempitsky, ICML 2015; RevGrad): features from which
a discriminator cannot recognise the domain.

Implemented: cross-entropy on the source + a discriminator's cross-entropy on a bottleneck's output,
its gradient reversed and scaled by the paper's ramp 2 / (1 + exp(-10 p)) - 1 over the progress p of
adaptation. Each domain counts for half.
Deliberate differences: all parts learn at one rate, the trainer's (published: the backbone at a
tenth). The discriminator, 1024 wide, has BatchNorm as in later work (`discriminator_norm: false` is
the paper's). `model.dropout` stands before the classifier. `target_ce` is not in the paper.
"""

from typing import Any

from torch import Tensor

from certvol.methods._adversary import AdversarialMethod
from certvol.methods._base import Batch
from certvol.nn.network import Network


class Method(AdversarialMethod):
    summary = "DANN: learn features from which a discriminator cannot recognise the domain"

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__(network, config)
        self.discriminator = self.new_discriminator(self.head.width)

    def domain_losses(self, batch: Batch, rows_NB: Tensor, logits_NC: Tensor) -> dict[str, Tensor]:
        return {"adversarial": self.adversarial_loss(batch, rows_NB)}
