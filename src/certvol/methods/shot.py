"""Source Hypothesis Transfer, SHOT (Liang, Hu and Feng, ICML 2020): fit the target's features to
the source's classifier, without the source's images.

Implemented: pretraining by smoothed cross-entropy on the source. Adaptation leaves the classifier
as it is and trains everything before it on target rows alone: the mean entropy of predictions, less
the entropy of their mean (diversity), + `pseudo_weight` * cross-entropy to pseudo-labels. Before
each cycle these come from class centres of the target's bottleneck features: first weighted by
probability, then those of the first labels. `partial` is the published form for a target that lacks
classes: no diversity, and in each round only classes of more than `min_images` images get labels.
Under a target prior, all terms use the posterior under the prior. If it gives shares q, the
divergence KL(mean prediction || q) replaces diversity, which expects equal shares; if it only names
classes, diversity is over these.
Deliberate differences: pseudo-labels follow cycles (published: epochs). The classifier is a plain
linear layer (published: weight-normalised), `model.dropout` stands before it, and the backbone
learns at the common rate (published: a tenth). Source rows of a batch only take part in BatchNorm
statistics of `model.norm mixed`. Reviewed images do train the classifier. Smoothing spreads over
the other classes (published: over all).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from certvol.methods._base import Batch, Labelled, Survey
from certvol.methods._clusters import prototype_labels
from certvol.methods._losses import mean_cross_entropy, mean_or_zero
from certvol.methods._self_labelling import SelfLabellingMethod
from certvol.scores.uncertainty import entropy
from certvol.settings import setting


def negative_diversity(probabilities_NC: Tensor) -> Tensor:
    """Return minus the entropy of the mean probabilities; 0 without rows."""
    mean_1C = probabilities_NC.sum(dim=0, keepdim=True) / max(1, len(probabilities_NC))
    return -entropy(mean_1C)[0]


def divergence_from(shares_C: Tensor, probabilities_NC: Tensor) -> Tensor:
    """Return KL(mean probabilities || shares); 0 without rows."""
    mean_C = probabilities_NC.sum(dim=0) / max(1, len(probabilities_NC))
    log_C = shares_C.clamp_min(torch.finfo(torch.float32).tiny).log()
    return negative_diversity(probabilities_NC) - (mean_C * log_C).sum()


class Method(SelfLabellingMethod):
    summary = (
        "SHOT: fit target features to the source's fixed classifier; confident, varied predictions"
    )
    source_free = True
    weighted: ClassVar[dict[str, str]] = {"pseudo_ce": "pseudo_weight"}

    @dataclass(frozen=True, kw_only=True)
    class Config(SelfLabellingMethod.Config):
        pseudo_weight: float = setting(
            0.3, at_least=0, help="Weight of the cross-entropy to pseudo-labels."
        )
        partial: bool = setting(
            False,
            help="For a target that lacks classes: no diversity term; skip classes of few images.",
        )
        min_images: int = setting(
            10,
            at_least=0,
            at_most=10**6,
            help="With `partial`: skip classes of at most this many images.",
        )

    def label_target(self, survey: Survey) -> Labelled:
        least = self.config.min_images if self.config.partial else 0
        rows_NB = self.head.bottleneck(survey.features_ND)
        return Labelled(prototype_labels(rows_NB, survey.probabilities_NC, least))

    def target_logits(self, rows_TB: Tensor) -> Tensor:
        output = self.head.output
        rows_TB = F.dropout(rows_TB, self.head.dropout, self.training)
        return F.linear(rows_TB, output.weight.detach(), output.bias.detach())

    def target_losses(self, batch: Batch, logits_TC: Tensor) -> dict[str, Tensor]:
        if self.prior_shift_C is not None:
            logits_TC = logits_TC + self.prior_shift_C
        p_TC = logits_TC.softmax(dim=1)
        terms = {"entropy": mean_or_zero(entropy(p_TC))}
        if not self.config.partial:
            shares_C = self.target_shares_C
            terms["diversity"] = (
                negative_diversity(p_TC) if shares_C is None else divergence_from(shares_C, p_TC)
            )
        labels_T = batch.labels_N[batch.num_source :]
        return terms | {"pseudo_ce": mean_cross_entropy(logits_TC, labels_T)}
