"""Clusters of target images, named by the classifier; classes without images are left out.

1. Compare images in a space in which the source's classes are round (`_space`).
2. Smooth the classifier's probabilities over neighbours (`_graph.smooth`).
3. Start a cluster at the mean of each class still in use, and run spherical k-means. The
   classifier keeps a vote in every assignment, so a cluster cannot drift to another class. But the
   classifier learns from these labels: images of an unknown class could fill a cluster and push its
   own images out, cycle by cycle. If features are fixed, the class means of the source vote too;
   in a network that is trained, they are a poor guide to a target that looks very different. If few
   classes are in use, large clusters attract more images: plain k-means prefers equal sizes.
4. Drop clusters that are left with few images, and assign those again. This is what makes the rule
   safe when the target lacks classes: plain k-means would give each absent class a cluster.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from certvol.methods._base import Survey
from certvol.methods._clusters import class_sums
from certvol.scores.validators import effective_number
from certvol.settings import setting
from certvol.training.pseudo_labels._comparing import ComparingRule
from certvol.training.pseudo_labels._graph import smooth

MIN_PROBABILITY = 1e-4


class Rule(ComparingRule):
    summary = "clusters of target images, named by the classifier; small clusters are dropped"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        neighbours: int = setting(
            5, above=0, at_most=1000, help="Most neighbours that must agree before clustering."
        )
        vote: float = setting(
            0.02,
            at_least=0,
            help="Weight of the classifier's log-probability against the cosine to a cluster, if "
            "all classes are in use; with half of them in use it is four times that.",
        )
        source_vote: float = setting(
            0.2,
            at_least=0,
            help="Weight of the cosine to a class's mean in the source, against that to a cluster; "
            "only if the backbone is frozen.",
        )
        drop_below: float = setting(
            0.1,
            at_least=0,
            at_most=1,
            help="Drop clusters with fewer images than this share of an even cluster's.",
        )
        rounds: int = setting(10, above=0, at_most=10_000, help="Most rounds of k-means.")

    def label_target(self, survey: Survey) -> Tensor:
        compared = self.compared(survey)
        smoothed_NC = smooth(survey.probabilities_NC, compared.neighbours)
        config = self.config if survey.fixed_features else replace(self.config, source_vote=0.0)
        return anchored_clusters(compared.units_ND, smoothed_NC, config, compared.source_centres_CD)


def anchored_clusters(
    units_ND: Tensor, opinion_NC: Tensor, config: Rule.Config, source_centres_CD: Tensor
) -> Tensor:
    """Return a cluster per row by spherical k-means, started from and weighted by an opinion."""
    count, num_classes = opinion_NC.shape
    few = config.drop_below * count / num_classes
    labels_N = opinion_NC.argmax(dim=1)
    sizes_C = torch.bincount(labels_N, minlength=num_classes)
    vote = config.vote * (num_classes / effective_number(sizes_C.cpu().numpy())) ** 2
    in_use_C = sizes_C > few
    if not in_use_C.any():
        in_use_C = sizes_C == sizes_C.max()
    vote_NC = vote * opinion_NC.clamp(min=MIN_PROBABILITY).log()
    vote_NC += config.source_vote * (units_ND @ source_centres_CD.T)
    attraction = vote - config.vote  # 0 if all classes are in use
    shares_NC = opinion_NC * in_use_C
    centres_CD = F.normalize(shares_NC.T @ units_ND, dim=1)
    for _ in range(config.rounds):
        shares_C = (sizes_C + 1) / (count + num_classes)
        before_N = labels_N
        score_NC = units_ND @ centres_CD.T + vote_NC + attraction * shares_C.log()
        labels_N = score_NC.masked_fill(~in_use_C, -torch.inf).argmax(dim=1)
        sizes_C = torch.bincount(labels_N, minlength=num_classes)
        large_C = in_use_C & (sizes_C > few)
        if large_C.any() and not torch.equal(large_C, in_use_C):
            in_use_C = large_C
            labels_N = score_NC.masked_fill(~in_use_C, -torch.inf).argmax(dim=1)
            sizes_C = torch.bincount(labels_N, minlength=num_classes)
        if torch.equal(labels_N, before_N):
            break
        sums_CD = class_sums(units_ND, labels_N, num_classes)
        centres_CD = torch.where(sizes_C[:, None] > 0, F.normalize(sums_CD, dim=1), centres_CD)
    return labels_N
