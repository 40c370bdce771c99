"""Contrastive Adaptation Network, CAN (Kang et al., CVPR 2019): classes near across domains, apart from other classes.

Implemented: before each cycle, spherical k-means on all target features, started at the centres of the source's classes
and matched back to them, gives the pseudo-labels; images further than `max_distance` from their centre, and classes
with fewer than `min_images`, are left out. Loss: cross-entropy on the source + `weight` * CDD, the contrastive domain
discrepancy of the batch: kernel discrepancy within classes minus that between classes, on the feature and on the class
probabilities.
Deliberate differences: centres of the source's classes are those of unit features (published: sums of features as they
are, so that long ones weigh more); cross-entropy is of the source rows of the same class-aware batch (published: of
another batch, so twice the cost); the common network, pretraining and schedule (published: one linear layer, ten times
its rate, layers up to the first block fixed, ImageNet weights to begin with); a class that is left out still has its
turn in the batches, with source images in the place of its target ones, which then count in the cross-entropy
(published: no turn). Published with `model.norm dsbn`. `classes: all` divides CDD by the number of all classes and
their pairs, as the published code does; `batch` by those in the batch, as the paper writes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from certvol.bounds import bounded
from certvol.clusters import match_centres, spherical_kmeans
from certvol.losses import mean_cross_entropy, membership, squared_distances
from certvol.methods.protocol import AdaptationMethod, Batch, Labelled, Survey


def _kernel(scaled: Tensor) -> Tensor:
    """Sum over i = 0..4 of exp(-d^2 / (g 2^(i - 2))), from d^2 / g: each term is the square of the one after it."""
    term = (-0.25 * scaled).exp()
    total = term
    for _ in range(4):
        term = term.square()
        total = total + term
    return total


def class_discrepancies(
    layers: Sequence[tuple[Tensor, Tensor]], source_labels_N: Tensor, target_labels_M: Tensor, num_classes: int
) -> tuple[Tensor, Tensor]:
    """(e(c1, c2) of source class c1 and target class c2, summed over the layers, C x C; whether both are in the batch).

    e = mean k(s, s) + mean k(t, t) - 2 mean k(s, t); the kernels' width g, without gradient, is the mean squared distance of all
    pairs in the union of both classes. 0 where a class is absent.
    """
    total_CC = layers[0][0].new_zeros(num_classes, num_classes, dtype=torch.float32)
    member_s, member_t = (membership(labels, num_classes) for labels in (source_labels_N, target_labels_M))
    count_s, count_t = member_s.sum(dim=0), member_t.sum(dim=0)
    both_CC = (count_s[:, None] > 0) & (count_t > 0)
    divide_s, divide_t = count_s.clamp(min=1), count_t.clamp(min=1)
    rows_CC = count_s[:, None] + count_t
    pairs_CC = (rows_CC * (rows_CC - 1)).clamp(min=1)
    with torch.autocast(layers[0][0].device.type, enabled=False):
        same_s, same_t = member_s @ member_s.T, member_t @ member_t.T
        for source, target in layers:
            source, target = source.float(), target.float()
            d_ss, d_tt, d_st = (
                squared_distances(a, b) for a, b in ((source, source), (target, target), (source, target))
            )
            with torch.no_grad():
                within_s = ((member_s.T @ d_ss) * member_s.T).sum(dim=1)
                within_t = ((member_t.T @ d_tt) * member_t.T).sum(dim=1)
                across = member_s.T @ d_st @ member_t
                width_CC = ((within_s[:, None] + within_t + 2 * across) / pairs_CC).clamp(min=1e-5)
                width_sC, width_tC = member_s @ width_CC, member_t @ width_CC.T  # of the row's class and every other
                width_st = member_s @ width_CC @ member_t.T
            # Rows with all of their own class, in the width of their class and each class of the other domain.
            k_ss = (same_s[:, :, None] * _kernel(d_ss[:, :, None] / width_sC[:, None, :])).sum(dim=1)
            k_tt = (same_t[:, :, None] * _kernel(d_tt[:, :, None] / width_tC[:, None, :])).sum(dim=1)
            k_st = _kernel(d_st / width_st)
            mean_ss = member_s.T @ k_ss / divide_s.square()[:, None]
            mean_tt = (member_t.T @ k_tt).T / divide_t.square()
            mean_st = member_s.T @ k_st @ member_t / (divide_s[:, None] * divide_t)
            total_CC = total_CC + torch.where(both_CC, mean_ss + mean_tt - 2 * mean_st, 0.0)
    return total_CC, both_CC


def contrastive_discrepancy(
    layers: Sequence[tuple[Tensor, Tensor]],
    source_labels_N: Tensor,
    target_labels_M: Tensor,
    num_classes: int,
    over_all: bool,
) -> Tensor:
    """CDD: mean e of equal classes minus mean e of different ones. `over_all`: divided by the number of all classes (pairs)."""
    if min(len(source_labels_N), len(target_labels_M)) == 0:
        return sum((layer.sum() * 0.0 for pair in layers for layer in pair), layers[0][0].new_zeros(()))
    e_CC, both_CC = class_discrepancies(layers, source_labels_N, target_labels_M, num_classes)
    equal_CC = torch.eye(num_classes, device=e_CC.device)
    if over_all:
        alike, unlike = num_classes, max(1, num_classes * (num_classes - 1))
        return (e_CC * equal_CC).sum() / alike - (e_CC * (1 - equal_CC)).sum() / unlike
    alike_here, unlike_here = ((both_CC * part).sum().clamp(min=1) for part in (equal_CC, 1 - equal_CC))
    return (e_CC * equal_CC).sum() / alike_here - (e_CC * (1 - equal_CC)).sum() / unlike_here


class Method(AdaptationMethod):
    summary = "CAN: clusters of the target, drawn to their class in the source and away from the others"
    labels_whole_target = True
    surveys_source = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        weight: float = bounded(0.3, least=0)  # of CDD
        max_distance: float = bounded(
            1.0, least=0
        )  # from the cluster's centre, (1 - cos) / 2; published: 0.05 for A-D and A-W
        min_images: int = bounded(3, least=0)
        classes: Literal["all", "batch"] = "all"  # what CDD is divided by

    @property
    def term_weights(self) -> dict[str, float]:
        return {"cdd": self.config.weight}

    def label_target(self, survey: Survey) -> Labelled:
        if survey.source_centres_CD is None:
            raise ValueError("clusters start at the source's centres")
        clusters_N, distance_N, centres_CD = spherical_kmeans(survey.features_ND, survey.source_centres_CD)
        labels_N = match_centres(centres_CD, survey.source_centres_CD)[clusters_N]
        near_N = distance_N < self.config.max_distance
        counts_C = torch.bincount(labels_N[near_N], minlength=self.network.num_classes)
        return Labelled(labels_N.where(near_N & (counts_C >= self.config.min_images)[labels_N], -1))

    def loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        features_ND = self.network.features(batch.images_NCHW)
        logits_NC = self.network.classifier(features_ND)
        split, labels_N = batch.num_source, batch.labels_N
        terms = {"ce": mean_cross_entropy(logits_NC[:split], labels_N[:split])}
        if batch.adapting:
            probabilities_NC = logits_NC.float().softmax(dim=1)
            layers = [(rows[:split], rows[split:]) for rows in (features_ND, probabilities_NC)]
            terms["cdd"] = contrastive_discrepancy(
                layers, labels_N[:split], labels_N[split:], self.network.num_classes, self.config.classes == "all"
            )
        return terms
