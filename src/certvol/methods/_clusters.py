"""Group features: spherical k-means, nearest rows, and outliers of a group; tensors only."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SIMILARITIES_AT_ONCE = 2**25  # 128 MiB


def cosine_distance(units_ND: Tensor, centres_CD: Tensor) -> Tensor:
    """Return (1 - cos) / 2, N x C, for rows and centres of any length."""
    return 0.5 * (1 - F.normalize(units_ND, dim=1) @ F.normalize(centres_CD, dim=1).T)


def class_sums(rows_ND: Tensor, labels_N: Tensor, num_classes: int) -> Tensor:
    """Sum the rows of each class, C x D."""
    return rows_ND.new_zeros(num_classes, rows_ND.shape[1]).index_add_(0, labels_N, rows_ND)


def spherical_kmeans(
    features_ND: Tensor, centres_CD: Tensor, tolerance: float = 0.005, most_rounds: int = 100
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cluster of each row, its distance from the cluster's centre, and the centres.

    The rounds start at the given centres and end when these move by less than `tolerance` on
    average. A cluster without rows goes back to its first centre.
    """
    units_ND = F.normalize(features_ND.float(), dim=1)
    first_CD = centres_CD = F.normalize(centres_CD.float(), dim=1)
    for _ in range(most_rounds):
        clusters_N = cosine_distance(units_ND, centres_CD).argmin(dim=1)
        empty_C1 = torch.bincount(clusters_N, minlength=len(centres_CD))[:, None] == 0
        before_CD = centres_CD
        means_CD = F.normalize(class_sums(units_ND, clusters_N, len(first_CD)), dim=1)
        centres_CD = torch.where(empty_C1, first_CD, means_CD)
        if float((0.5 * (1 - (before_CD * centres_CD).sum(dim=1))).mean()) < tolerance:
            break
    distance_N, clusters_N = cosine_distance(units_ND, centres_CD).min(dim=1)
    return clusters_N, distance_N, centres_CD


def prototype_labels(rows_ND: Tensor, probabilities_NC: Tensor, least: int = 0) -> Tensor:
    """Label rows by the nearest of their classes' centres, by cosine; two rounds (Liang et al.).

    The first centres are means weighted by probability, the second those of the first labels.
    Rows get a 1 appended and unit length. In each round only classes that more than `least` rows
    have take part; if there is none, those of any row.
    """
    num_classes = probabilities_NC.shape[1]
    units_NE = F.normalize(F.pad(rows_ND.float(), (0, 1), value=1.0), dim=1)
    labels_N = probabilities_NC.argmax(dim=1)
    centres_CE = probabilities_NC.float().T @ units_NE
    for _ in range(2):
        counts_C = torch.bincount(labels_N, minlength=num_classes)
        takes_part_C = counts_C > (least if bool((counts_C > least).any()) else 0)
        cosine_NC = units_NE @ F.normalize(centres_CE, dim=1).T
        labels_N = cosine_NC.masked_fill(~takes_part_C, -torch.inf).argmax(dim=1)
        centres_CE = class_sums(units_NE, labels_N, num_classes)
    return labels_N


def nearest_others(units_ND: Tensor, count: int) -> Tensor:
    """Return the indices of each row's nearest other rows by cosine, N x at most `count`.

    Rows have unit length. The nearest come first. Memory grows with N, not with N squared.
    """
    size = max(1, SIMILARITIES_AT_ONCE // max(1, len(units_ND)))
    count = max(0, min(count, len(units_ND) - 1))
    found = [torch.empty(0, count, dtype=torch.int64, device=units_ND.device)]
    for first in range(0, len(units_ND), size):
        cosine_RN = units_ND[first : first + size] @ units_ND.T
        cosine_RN.diagonal(first).fill_(-torch.inf)
        found.append(cosine_RN.topk(count, dim=1).indices)
    return torch.cat(found)


def match_centres(found_CD: Tensor, known_CD: Tensor) -> Tensor:
    """Match each found centre to a known one, one to one, with the least total distance."""
    from scipy.optimize import linear_sum_assignment  # importing it takes long

    _, matched = linear_sum_assignment(cosine_distance(found_CD, known_CD).cpu().numpy())
    return torch.from_numpy(matched).to(found_CD.device)


def gaussian_uniform_posterior(
    distances_N: Tensor, most_rounds: int = 1000, tolerance: float = 1e-10
) -> Tensor:
    """Return each value's probability of a half-Gaussian from the smallest value, not an outlier.

    EM runs on the values with alternating signs, which makes the Gaussian a whole one, scaled to
    mean 0 and deviation 1. The Gaussian's share starts at 0.1 and stays at most 0.5. The uniform's
    density starts at 0.2 and follows from its moments. These are divided by the Gaussian's count,
    as in the code of RSDA: divided by their own, up to a third of small groups end with no member.
    """
    values = distances_N.double().cpu().numpy()
    if len(values) < 3 or values.std() == 0:
        return torch.ones_like(distances_N)  # too few or too similar for an outlier
    values = values - values.min()
    values[: len(values) // 2 * 2 : 2] *= -1
    values = (values - values.mean()) / values.std()
    share, variance, density = 0.1, 1.0, 0.2
    before = -math.inf
    for _ in range(most_rounds):
        wide = variance + 1e-3
        gaussian = share * np.exp(-0.5 * values**2 / wide) / math.sqrt(2 * math.pi * wide)
        both = gaussian + (1 - share) * density
        inside = gaussian / both
        likelihood = float(np.log(both).sum())
        if abs(likelihood - before) < tolerance:
            break
        before = likelihood
        count = max(float(inside.sum()), 1e-12)
        share = min(count / len(values), 0.5)
        variance = float((inside * values**2).sum() / count)
        outside, scale = 1 - inside, count * (1 - share)
        first = float((outside * values).sum() / scale)
        second = float((outside * values**2).sum() / scale)
        density = 1 / max(2 * math.sqrt(3 * max(second - first**2, 0.0)), 1e-3)
    return torch.from_numpy(inside).to(distances_N)
