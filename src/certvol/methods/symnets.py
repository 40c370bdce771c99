"""SymNets (Zhang et al., CVPR 2019): two classifiers tell the domains apart, and the backbone confuses them class by class.

Implemented: one linear layer of 2 C logits, whose first half is the source's classifier C_s and whose second the target's C_t, as
one softmax P. The classifiers minimise both their cross-entropies on the source, and -log of the probability of a row's own half.
The backbone minimises even parts of -log P[y] and -log P[y + C] on the source and, with DANN's ramp, even parts of -log of both
halves' probabilities and the entropy of P_s + P_t on the target. Each part's gradients reach that part alone: the classifiers
see features without gradient, the backbone classifiers without. The classifiers learn at `classifier_rate` times the backbone's
rate: at the same rate they hardly tell the domains apart while the ramp rises, and what is left is entropy. Predictions and
pseudo-labels are C_t's.
Deliberate differences: the published code reports the better of C_s and C_t at the best epoch by target labels, and has no
pretraining; ours trains both classifiers by the mean of their cross-entropies, where adaptation takes the sum; `model.dropout`
stands before the layer (published: none). `target_ce` is not in the paper.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from certvol.bounds import bounded
from certvol.losses import mean_cross_entropy, mean_or_zero, ramp
from certvol.methods.protocol import AdaptationMethod, Batch
from certvol.nn.heads import Classifier
from certvol.nn.network import Network


class TwoClassifiers(Classifier):
    """Logits of the source's and of the target's classifier side by side; as a network's classifier it is the target's alone."""

    def __init__(self, dim: int, num_classes: int, dropout: float) -> None:
        super().__init__(dim, 2 * num_classes, layers=1, dropout=dropout)
        self.num_classes = num_classes

    def forward(self, features: Tensor, dropout: float | None = None) -> Tensor:
        return super().forward(features, dropout)[..., self.num_classes :]


def half_log_probabilities(logits_NE: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row: log of the probability of the first half of all logits, and of the second."""
    whole_N = logits_NE.logsumexp(dim=1)
    first_NC, second_NC = logits_NE.chunk(2, dim=1)
    return first_NC.logsumexp(dim=1) - whole_N, second_NC.logsumexp(dim=1) - whole_N


def pair_entropy(logits_NE: Tensor) -> Tensor:
    """Of each row: the entropy of P_s + P_t, the two halves' probabilities added class by class."""
    log_NC = torch.logaddexp(*logits_NE.log_softmax(dim=1).chunk(2, dim=1))
    return -(log_NC.exp() * log_NC).sum(dim=1)


class Method(AdaptationMethod):
    summary = "SymNets: two classifiers tell the domains apart, the backbone confuses them class by class"
    batches = "plain"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        weight: float = bounded(1.0, least=0)  # of the backbone's terms on the target, at the end of their ramp
        classifier_rate: float = bounded(10.0, above=0)  # the classifiers' learning rate, over the backbone's
        target_ce: bool = False  # also train on this cycle's pseudo-labels, like `basic`

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__(network, config)
        network.classifier = TwoClassifiers(network.info.dim, network.num_classes, network.classifier.dropout)

    @property
    def term_weights(self) -> dict[str, float]:
        return {"domain_confusion": self.config.weight, "entropy": self.config.weight}

    def rate_of(self, weight: str) -> float:
        return float(self.config.classifier_rate) if weight.startswith("network.classifier.") else 1.0

    def loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        classifier, num_classes = self.network.classifier, self.network.num_classes
        weight, bias = classifier.output.weight, classifier.output.bias
        features_ND = F.dropout(self.network.features(batch.images_NCHW), classifier.dropout, self.training)
        if not batch.adapting:
            own_NE = F.linear(features_ND, weight, bias)
            return {"ce": self._both_cross_entropies(own_NE, batch.labels_N) / 2}

        labelled, split = batch.num_labelled(self.config.target_ce), batch.num_source
        labels = batch.labels_N[:labelled]
        own_NE = F.linear(features_ND.detach(), weight, bias).float()  # trains the classifiers
        shared_NE = F.linear(features_ND, weight.detach(), bias.detach()).float()  # trains the backbone
        as_source_N, as_target_N = half_log_probabilities(own_NE)
        confused_S, confused_T = half_log_probabilities(shared_NE[split:])
        rate = ramp(batch.progress)
        category = mean_cross_entropy(shared_NE[:labelled], labels)
        category_twin = mean_cross_entropy(shared_NE[:labelled], labels + num_classes)
        return {
            "ce": self._both_cross_entropies(own_NE[:labelled], labels),
            "discrimination": -mean_or_zero(as_source_N[:split]) - mean_or_zero(as_target_N[split:]),
            "category_confusion": (category + category_twin) / 2,
            "domain_confusion": -rate * mean_or_zero(confused_S + confused_T) / 2,
            "entropy": rate * mean_or_zero(pair_entropy(shared_NE[split:])),
        }

    def _both_cross_entropies(self, logits_NE: Tensor, labels_N: Tensor) -> Tensor:
        source_NC, target_NC = logits_NE.chunk(2, dim=1)
        return mean_cross_entropy(source_NC, labels_N) + mean_cross_entropy(target_NC, labels_N)
