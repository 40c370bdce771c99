"""Attracting and Dispersing, AaD (Yang et al., NeurIPS 2022): predictions agree with those of
nearest neighbours and differ from others, without the source.

Implemented: pretraining by smoothed cross-entropy on the source. Adaptation trains on target rows
alone: minus the sum of p_i . p_j over the `neighbours` nearest images j of i (attraction), + lambda
times the sum of p_i . p_m over the other target rows m of the batch (dispersion), both averaged
over i. lambda = (1 + 10 t)^-`decay` over the progress t of adaptation. Neighbours are nearest by
the cosine of bottleneck features.
Deliberate differences: neighbours and their probabilities are those before the cycle, of the whole
target (published: a bank whose rows of the batch are renewed in every step). The classifier is a
plain linear layer (published: weight-normalised), `model.dropout` stands before it, and all parts
learn at one rate (published: the backbone at a tenth). Published: 5 neighbours and decay 5 on
VisDA; smaller data were given 3 and a decay of up to 1. Smoothing of source labels spreads over the
other C - 1 classes (published: over all C).
Limit: dispersion favours many classes and does not know a target prior, which only shifts
predictions and labels. For a target of few or uneven classes, prefer `shot` with a prior.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from certvol.methods._base import Batch, Labelled, Survey
from certvol.methods._clusters import nearest_others
from certvol.methods._losses import mean_or_zero
from certvol.methods._self_labelling import SelfLabellingMethod
from certvol.settings import setting


def agreement_with_others(probabilities_NC: Tensor) -> Tensor:
    """Sum p_i . p_m over the other rows m, for each row i."""
    total_C = probabilities_NC.sum(dim=0)
    return (probabilities_NC * (total_C - probabilities_NC)).sum(dim=1)


class Method(SelfLabellingMethod):
    summary = "AaD: target predictions agree with those of neighbours and differ from others"
    source_free = True
    ramps = True

    @dataclass(frozen=True, kw_only=True)
    class Config(SelfLabellingMethod.Config):
        neighbours: int = setting(
            3, above=0, at_most=2**16, help="Nearest images whose predictions attract."
        )
        decay: float = setting(
            1.0,
            at_least=0,
            help="How fast the dispersion fades; 0: not at all. Published: 5 on VisDA.",
        )

    def label_target(self, survey: Survey) -> Labelled:
        p_NC = survey.probabilities_NC
        units_ND = F.normalize(self.head.bottleneck(survey.features_ND).float(), dim=1)
        near_NK = nearest_others(units_ND, self.config.neighbours)
        return Labelled(p_NC.argmax(dim=1), {"near": p_NC[near_NK].sum(dim=1)})

    def target_losses(self, batch: Batch, logits_TC: Tensor) -> dict[str, Tensor]:
        p_TC = logits_TC.softmax(dim=1)
        fading = (1 + 10 * batch.progress) ** -self.config.decay
        return {
            "attraction": -mean_or_zero((p_TC * batch.tables["near"]).sum(dim=1)),
            "dispersion": fading * mean_or_zero(agreement_with_others(p_TC)),
        }
