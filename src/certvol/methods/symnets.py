"""SymNets (Zhang et al., CVPR 2019): two classifiers separate the domains, and the backbone
confuses them class by class.

Implemented: one linear layer of 2 C logits, whose first half is the source's classifier C_s and
whose second the target's C_t, as one softmax P. The classifiers minimise both their cross-entropies
on the source, and -log of the probability of a row's own half. The backbone minimises even parts of
-log P[y] and -log P[y + C] on the source and, with DANN's ramp, even parts of -log of both halves'
probabilities and the entropy of P_s + P_t on the target. Each part's gradients reach that part
alone: the classifiers see features without gradient, the backbone classifiers without. The
classifiers learn at `classifier_rate` times the backbone's rate: at the same rate they hardly
separate the domains while the ramp rises, and only the entropy is left. Predictions and
pseudo-labels are C_t's.
Deliberate differences: the published code reports the better of C_s and C_t at the best epoch by
target labels, and has no pretraining; ours trains both classifiers by the mean of their
cross-entropies, while adaptation takes the sum. `model.dropout` stands before the layer (published:
none). `target_ce` is not in the paper.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from certvol.methods._base import AdaptationMethod, Batch
from certvol.methods._losses import mean_cross_entropy, mean_or_zero, ramp
from certvol.nn.heads import Classifier, Drop
from certvol.nn.network import Network
from certvol.scores.uncertainty import entropy
from certvol.settings import setting


class TwoClassifiers(Classifier):
    """One layer with the logits of both classifiers; as a network's classifier, the target's."""

    def __init__(self, dim: int, num_classes: int, dropout: float) -> None:
        super().__init__(dim, 2 * num_classes, layers=1, dropout=dropout)
        self.num_classes = num_classes

    def forward(self, features: Tensor, drop: Drop | None = None) -> Tensor:
        return super().forward(features, drop)[..., self.num_classes :]


def half_log_probabilities(logits_NE: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's log probability of the first half of all logits, and of the second."""
    whole_N = logits_NE.logsumexp(dim=1)
    first_NC, second_NC = logits_NE.chunk(2, dim=1)
    return first_NC.logsumexp(dim=1) - whole_N, second_NC.logsumexp(dim=1) - whole_N


def pair_entropy(logits_NE: Tensor) -> Tensor:
    """Return each row's entropy of P_s + P_t, both halves' probabilities added class by class."""
    source_NC, target_NC = logits_NE.softmax(dim=1).chunk(2, dim=1)
    return entropy(source_NC + target_NC)


def both_cross_entropies(logits_NE: Tensor, labels_N: Tensor) -> Tensor:
    source_NC, target_NC = logits_NE.chunk(2, dim=1)
    return mean_cross_entropy(source_NC, labels_N) + mean_cross_entropy(target_NC, labels_N)


class Method(AdaptationMethod):
    summary = (
        "SymNets: two classifiers separate the domains, the backbone confuses them class by class"
    )
    batches = "plain"
    ramps = True
    weighted: ClassVar[dict[str, str]] = {"domain_confusion": "weight", "entropy": "weight"}

    @dataclass(frozen=True, kw_only=True)
    class Config:
        weight: float = setting(
            1.0,
            at_least=0,
            help="Weight of the backbone's terms on the target at the end of their ramp.",
        )
        classifier_rate: float = setting(
            10.0, above=0, help="Learning rate of the classifiers, relative to the backbone's."
        )
        target_ce: bool = setting(False, help="Also train on this cycle's pseudo-labels.")

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__(network, config)
        dim, dropout = network.dim, network.classifier.dropout
        network.classifier = TwoClassifiers(dim, network.num_classes, dropout)

    def rate_of(self, weight: str) -> float:
        in_classifiers = weight.startswith("network.classifier.")
        return float(self.config.classifier_rate) if in_classifiers else 1.0

    def loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        classifier, num_classes = self.network.classifier, self.network.num_classes
        weight, bias = classifier.output.weight, classifier.output.bias
        features_ND = self.network.features(batch.inputs)
        features_ND = F.dropout(features_ND, classifier.dropout, self.training)
        if not batch.adapting:
            own_NE = F.linear(features_ND, weight, bias)
            return {"ce": both_cross_entropies(own_NE, batch.labels_N) / 2}

        labelled, split = batch.num_labelled(self.config.target_ce), batch.num_source
        labels = batch.labels_N[:labelled]
        # The first logits train the classifiers, the second the backbone.
        own_NE = F.linear(features_ND.detach(), weight, bias).float()
        shared_NE = F.linear(features_ND, weight.detach(), bias.detach()).float()
        as_source_N, as_target_N = half_log_probabilities(own_NE)
        confused_S, confused_T = half_log_probabilities(shared_NE[split:])
        rate = ramp(batch.progress)
        category = mean_cross_entropy(shared_NE[:labelled], labels)
        category_twin = mean_cross_entropy(shared_NE[:labelled], labels + num_classes)
        told_apart = mean_or_zero(as_source_N[:split]) + mean_or_zero(as_target_N[split:])
        return {
            "ce": both_cross_entropies(own_NE[:labelled], labels),
            "discrimination": -told_apart,
            "category_confusion": (category + category_twin) / 2,
            "domain_confusion": -rate * mean_or_zero(confused_S + confused_T) / 2,
            "entropy": rate * mean_or_zero(pair_entropy(shared_NE[split:])),
        }
