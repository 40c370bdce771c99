"""ATDOC-NA (Liang, Hu and Feng, CVPR 2021): target images are labelled by their nearest neighbours.

Implemented: smoothed cross-entropy on the source + `weight` * t * cross-entropy of target rows to
their neighbours' label, over the progress t of adaptation. The probabilities of all target images
are squared and divided by their class's sum, so that all classes weigh the same; an image's label
is the class of the largest mean over its `neighbours` nearest other images, by the cosine of
bottleneck features, and that mean is its weight in the batch.
Deliberate differences: labels are made before each cycle from the whole target (published: in every
step, from a memory in which the batch's rows are renewed). Source classes have no weights:
pretraining is balanced, and adaptation takes the source as it is. `model.dropout` stands before the
classifier, and all parts learn at one rate (published: the backbone at a tenth). Probabilities are
divided by their class's sum over the whole target (published: over a batch), so the weights are
small; a batch's are scaled to sum 1. Smoothing spreads over the other C - 1 classes (published:
over all C).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from certvol.methods._base import Batch, Labelled, Survey
from certvol.methods._clusters import nearest_others
from certvol.methods._losses import cross_entropy
from certvol.methods._self_labelling import SelfLabellingMethod
from certvol.settings import setting

LEAST_MASS = 1e-8  # of a class that no image is predicted as


def neighbour_labels(
    rows_ND: Tensor, probabilities_NC: Tensor, neighbours: int
) -> tuple[Tensor, Tensor]:
    """Return each row's label by its neighbours, and the weight of that label."""
    sharp_NC = probabilities_NC.float().square()
    sharp_NC = sharp_NC / sharp_NC.sum(dim=0).clamp(min=LEAST_MASS)
    near_NK = nearest_others(F.normalize(rows_ND.float(), dim=1), neighbours)
    if near_NK.shape[1] == 0:  # a single image is its own neighbour
        near_NK = near_NK.new_zeros(1, 1)
    weights_N, labels_N = sharp_NC[near_NK].mean(dim=1).max(dim=1)
    return labels_N, weights_N


class Method(SelfLabellingMethod):
    summary = (
        "ATDOC: target images get the labels of their nearest neighbours, with balanced classes"
    )
    ramps = True
    weighted: ClassVar[dict[str, str]] = {"neighbour_ce": "weight"}

    @dataclass(frozen=True, kw_only=True)
    class Config(SelfLabellingMethod.Config):
        weight: float = setting(
            0.2, at_least=0, help="Weight of the target's cross-entropy at the end of its ramp."
        )
        neighbours: int = setting(
            5, above=0, at_most=2**16, help="Nearest images that label an image."
        )

    def label_target(self, survey: Survey) -> Labelled:
        rows_NB = self.head.bottleneck(survey.features_ND)
        labels_N, weights_N = neighbour_labels(
            rows_NB, survey.probabilities_NC, self.config.neighbours
        )
        return Labelled(labels_N, {"weights": weights_N})

    def target_losses(self, batch: Batch, logits_TC: Tensor) -> dict[str, Tensor]:
        labels_T, weights_T = batch.labels_N[batch.num_source :], batch.tables["weights"]
        ce_T = cross_entropy(logits_TC, labels_T)
        mean = (weights_T * ce_T).sum() / weights_T.sum().clamp(min=1e-12)
        return {"neighbour_ce": batch.progress * mean}
