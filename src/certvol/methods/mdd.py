"""Margin Disparity Discrepancy, MDD (Zhang et al., ICML 2019): a second classifier agrees with the
first on the source and disagrees on the target; the bottleneck prevents that.

Implemented: cross-entropy on the source + `weight` * (`margin` * the second classifier's
cross-entropy to the first one's labels on the source, - log(1 - its probability of them) on the
target). The second classifier sees the bottleneck's output behind gradient reversal, whose factor
rises to `reversal` along DANN's ramp. The first one's labels have no gradient. Both classifiers
have two layers of the bottleneck's width behind a bottleneck of 1,024, as published.
Deliberate differences: hidden layers start as the identity, as all classifiers here (published:
normal of deviation 0.01), `model.dropout` stands before each layer, and the bottleneck has no
dropout. All parts learn at one rate (published: the backbone at a tenth). `target_ce` is not in the
paper. Published margin: 4 on Office-31, Office-Home and VisDA.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from certvol.methods._adversary import reverse_gradient
from certvol.methods._base import Batch
from certvol.methods._domain_loss import BottleneckClassifier, BottleneckMethod
from certvol.methods._losses import mean_cross_entropy, mean_or_zero, membership, ramp
from certvol.nn.heads import Classifier
from certvol.nn.network import Network
from certvol.settings import setting


def negative_log_rest(logits_NC: Tensor, labels_N: Tensor) -> Tensor:
    """Return -log(1 - p_label) of each row, finite for any finite logits of two classes or more."""
    logits_NC = logits_NC.float()
    own_NC = membership(labels_N, logits_NC.shape[1]).bool()
    rest_N = logits_NC.masked_fill(own_NC, -torch.inf).logsumexp(dim=1)
    return logits_NC.logsumexp(dim=1) - rest_N


class Method(BottleneckMethod):
    summary = (
        "MDD: features on which a second classifier that agrees on the source agrees everywhere"
    )
    weighted: ClassVar[dict[str, str]] = {"disparity": "weight"}
    ramps = True

    @dataclass(frozen=True, kw_only=True)
    class Config(BottleneckMethod.Config):
        bottleneck: int = setting(
            1024, above=0, at_most=2**16, help="Width of the bottleneck and both classifiers."
        )
        margin: float = setting(
            4.0, above=0, help="Weight of the agreement on the source, relative to the target's."
        )
        reversal: float = setting(0.1, at_least=0, help="Final factor of the reversed gradient.")

    def __init__(self, network: Network, config: Any) -> None:
        dropout, width, classes = network.classifier.dropout, config.bottleneck, network.num_classes
        super().__init__(network, config)
        self.network.classifier = BottleneckClassifier(network, width, layers=2)
        self.adversary = Classifier(width, classes, layers=2, dropout=dropout)

    def domain_losses(self, batch: Batch, rows_NB: Tensor, logits_NC: Tensor) -> dict[str, Tensor]:
        labels_N, split = logits_NC.detach().argmax(dim=1), batch.num_source
        coefficient = self.config.reversal * ramp(batch.progress)
        second_NC = self.adversary(reverse_gradient(rows_NB, coefficient))
        agreement = mean_cross_entropy(second_NC[:split], labels_N[:split])
        disagreement = mean_or_zero(negative_log_rest(second_NC[split:], labels_N[split:]))
        return {"disparity": self.config.margin * agreement + disagreement}
