"""Contrastive Adaptation Network, CAN (Kang et al., CVPR 2019): features of a class are close
across domains and far from those of other classes.

Implemented: before each cycle, spherical k-means on all target features, started at the centres of
the source's classes and matched back to them, gives the pseudo-labels. Images further than
`max_distance` from their centre, and classes with fewer than `min_images`, are left out. Loss:
cross-entropy on the source + `weight` * CDD, the contrastive domain discrepancy of the batch:
kernel discrepancy within classes minus that between classes, on the features and on the class
probabilities. `classes: all` divides CDD by the number of all classes and their pairs, as the
published code does; `batch` by those in the batch, as the paper writes it.
Deliberate differences: centres of the source's classes are those of unit features (published: sums
of unscaled features, so that long ones weigh more). Cross-entropy uses the source rows of the same
class-aware batch (published: another batch, at twice the cost). Network, pretraining and schedule
are the common ones (published: one linear layer at ten times the rate, layers up to the first block
fixed, ImageNet weights to begin with). A class that is left out still gets its turn in the batches:
source images replace its target ones and count in the cross-entropy (published: no turn). Published
with `model.norm dsbn`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from certvol.methods._base import AdaptationMethod, Batch, Labelled, Survey
from certvol.methods._clusters import match_centres, spherical_kmeans
from certvol.methods._losses import mean_cross_entropy, membership, squared_distances
from certvol.settings import setting

Layers = Sequence[tuple[Tensor, Tensor]]
"""Source and target rows of each layer on which the domains are compared."""


def _kernel(scaled: Tensor) -> Tensor:
    """Sum exp(-d^2 / (g 2^(i - 2))) over i = 0..4, from d^2 / g; each is the next one squared."""
    term = (-0.25 * scaled).exp()
    total = term
    for _ in range(4):
        term = term.square()
        total = total + term
    return total


def class_discrepancies(
    layers: Layers, source_labels_N: Tensor, target_labels_M: Tensor, num_classes: int
) -> tuple[Tensor, Tensor]:
    """Return e(c1, c2) of source class c1 and target class c2, and whether both are in the batch.

    Both are C x C; e is summed over the layers and 0 if a class is absent.
    e = mean k(s, s) + mean k(t, t) - 2 mean k(s, t). The kernels' width g, without gradient, is the
    mean squared distance of all pairs in the union of both classes.
    """
    total_CC = layers[0][0].new_zeros(num_classes, num_classes, dtype=torch.float32)
    member_s, member_t = (membership(y, num_classes) for y in (source_labels_N, target_labels_M))
    count_s, count_t = member_s.sum(dim=0), member_t.sum(dim=0)
    both_CC = (count_s[:, None] > 0) & (count_t > 0)
    divide_s, divide_t = count_s.clamp(min=1), count_t.clamp(min=1)
    rows_CC = count_s[:, None] + count_t
    pairs_CC = (rows_CC * (rows_CC - 1)).clamp(min=1)
    with torch.autocast(layers[0][0].device.type, enabled=False):
        same_s, same_t = member_s @ member_s.T, member_t @ member_t.T
        for rows_s, rows_t in layers:
            s, t = rows_s.float(), rows_t.float()
            d_ss, d_tt, d_st = (squared_distances(a, b) for a, b in ((s, s), (t, t), (s, t)))
            with torch.no_grad():
                within_s = ((member_s.T @ d_ss) * member_s.T).sum(dim=1)
                within_t = ((member_t.T @ d_tt) * member_t.T).sum(dim=1)
                across = member_s.T @ d_st @ member_t
                width_CC = ((within_s[:, None] + within_t + 2 * across) / pairs_CC).clamp(min=1e-5)
                # Width of each row's class paired with every class of the other domain.
                width_sC, width_tC = member_s @ width_CC, member_t @ width_CC.T
                width_st = member_s @ width_CC @ member_t.T
            # Sum over the rows of the same class, for each class of the other domain.
            k_ss = (same_s[:, :, None] * _kernel(d_ss[:, :, None] / width_sC[:, None])).sum(dim=1)
            k_tt = (same_t[:, :, None] * _kernel(d_tt[:, :, None] / width_tC[:, None])).sum(dim=1)
            k_st = _kernel(d_st / width_st)
            mean_ss = member_s.T @ k_ss / divide_s.square()[:, None]
            mean_tt = (member_t.T @ k_tt).T / divide_t.square()
            mean_st = member_s.T @ k_st @ member_t / (divide_s[:, None] * divide_t)
            total_CC = total_CC + torch.where(both_CC, mean_ss + mean_tt - 2 * mean_st, 0.0)
    return total_CC, both_CC


def contrastive_discrepancy(
    layers: Layers,
    source_labels_N: Tensor,
    target_labels_M: Tensor,
    num_classes: int,
    over_all: bool,
) -> Tensor:
    """Return CDD: mean e of equal classes minus mean e of different ones.

    `over_all` divides by the number of all classes and pairs instead of those in the batch.
    """
    if min(len(source_labels_N), len(target_labels_M)) == 0:
        zero = layers[0][0].new_zeros(())
        return sum((layer.sum() * 0.0 for pair in layers for layer in pair), zero)
    e_CC, both_CC = class_discrepancies(layers, source_labels_N, target_labels_M, num_classes)
    equal_CC = torch.eye(num_classes, device=e_CC.device)
    counted_CC = torch.ones_like(equal_CC) if over_all else both_CC
    equal, unequal = (
        (e_CC * part).sum() / (counted_CC * part).sum().clamp(min=1)
        for part in (equal_CC, 1 - equal_CC)
    )
    return equal - unequal


class Method(AdaptationMethod):
    summary = (
        "CAN: clusters of the target are pulled to their class in the source, away from others"
    )
    labels_whole_target = True
    surveys_source = True
    weighted: ClassVar[dict[str, str]] = {"cdd": "weight"}

    @dataclass(frozen=True, kw_only=True)
    class Config:
        weight: float = setting(0.3, at_least=0, help="Weight of the contrastive discrepancy.")
        max_distance: float = setting(
            1.0,
            at_least=0,
            help="Skip images at least this far from their cluster's centre, (1 - cos) / 2; "
            "published: 0.05 for A-D and A-W, else 1.",
        )
        min_images: int = setting(
            3, at_least=0, at_most=10**6, help="Skip classes with fewer target images."
        )
        classes: Literal["all", "batch"] = setting(
            "all", help="Average CDD over all classes, or over those of the batch."
        )

    def label_target(self, survey: Survey) -> Labelled:
        source_CD = survey.source_sums_CD
        assert source_CD is not None, "can surveys the source"
        clusters_N, distance_N, centres_CD = spherical_kmeans(survey.features_ND, source_CD)
        labels_N = match_centres(centres_CD, source_CD)[clusters_N]
        near_N = distance_N < self.config.max_distance
        counts_C = torch.bincount(labels_N[near_N], minlength=self.network.num_classes)
        return Labelled(labels_N.where(near_N & (counts_C >= self.config.min_images)[labels_N], -1))

    def loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        features_ND = self.network.features(batch.inputs)
        logits_NC = self.network.classifier(features_ND)
        split, num_classes = batch.num_source, self.network.num_classes
        source_N, target_N = batch.labels_N.tensor_split([split])
        terms = {"ce": mean_cross_entropy(logits_NC[:split], source_N)}
        if batch.adapting:
            compared = (features_ND, logits_NC.float().softmax(dim=1))
            layers = [(rows[:split], rows[split:]) for rows in compared]
            over_all = self.config.classes == "all"
            cdd = contrastive_discrepancy(layers, source_N, target_N, num_classes, over_all)
            terms["cdd"] = cdd
        return terms
