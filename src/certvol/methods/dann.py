"""Domain-Adversarial Neural Network (Ganin and Lempitsky, ICML 2015; RevGrad): no discriminator should tell features' domain.

Implemented: cross-entropy on the source + a discriminator's cross-entropy on a bottleneck's output, its gradient reversed and
scaled by the paper's ramp 2 / (1 + exp(-10 p)) - 1 over the adaptation's progress p. Each domain counts for half.
Deliberate differences: the learning rate is the trainer's, one for all parts (published: the backbone at a tenth); the
discriminator, 1024 wide, has BatchNorm as in later work (`discriminator_norm: false`: the paper's); `model.dropout` stands before
the classifier. `target_ce` is not in the paper.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from certvol.bounds import bounded
from certvol.losses import domain_confusion, mean_cross_entropy, ramp
from certvol.methods.protocol import AdaptationMethod, Batch
from certvol.nn import bottleneck
from certvol.nn.adversary import DomainDiscriminator, reverse_gradient
from certvol.nn.network import Network


class Method(AdaptationMethod):
    summary = "DANN: features from which no discriminator tells the domain"
    batches = "plain"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        weight: float = bounded(1.0, least=0)  # of the discriminator's loss
        reversal: float = bounded(1.0, least=0)  # lambda at the end of its ramp
        bottleneck: int = bounded(256, least=0)  # its width; 0: none, and the common classifier
        discriminator_width: int = bounded(1024, above=0)
        discriminator_norm: bool = True
        target_ce: bool = False  # also train on this cycle's pseudo-labels, like `basic`

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__(network, config)
        width = bottleneck.install(network, config.bottleneck)
        self.discriminator = DomainDiscriminator(width, config.discriminator_width, config.discriminator_norm)

    @property
    def term_weights(self) -> dict[str, float]:
        return {"adversarial": self.config.weight}

    def loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        rows_NB, logits_NC = bottleneck.compared_rows(self.network, batch.images_NCHW)
        labelled = batch.num_labelled(self.config.target_ce)
        terms = {"ce": mean_cross_entropy(logits_NC[:labelled], batch.labels_N[:labelled])}
        if batch.adapting:
            reversed_NB = reverse_gradient(rows_NB, self.config.reversal * ramp(batch.progress))
            terms["adversarial"] = domain_confusion(self.discriminator(reversed_NB), batch.num_source)
        return terms
