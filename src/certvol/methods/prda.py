"""PrDA: progressive domain augmentation (Hua and Guo, arXiv 2004.01735).

Implemented: on fixed features (of the pretrained weights or, without these, of the run's own
pretraining). In four rounds, with lambda 0.8, 0.6, 0.4 and 0.2, virtual rows lambda x_s + (1 -
lambda) x_t of random source and target rows form a domain between the two. Source and virtual rows
each span several subspaces of principal axes: each further one fits the rows that the earlier ones
reconstruct badly. The subspaces are paired greedily by their distance on the Grassmann manifold,
and the source's are rotated onto the partner's. A classifier of the aligned source labels the
virtual rows, and sure ones join the source. At the end the enlarged source is aligned with the
target in the same way.
Our choices, which the paper leaves open or which we could not find: every domain is standardised
by itself; as many virtual rows as source rows; a row is reconstructed badly if its error exceeds
the median error of the first subspace, and a domain has at most `subspaces` subspaces; a row is
sure from a probability of `confidence` on; the classifier is a logistic regression on the
projections onto all pairs, one after the other.
Deliberate differences: features stay fixed between rounds (published: the network is trained on the
enlarged source).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch

from certvol.methods._closed_form import (
    Array,
    Fitted,
    LinearMethod,
    Problem,
    logistic_regression,
    mean_and_scale,
)
from certvol.settings import setting

RATIOS = (0.8, 0.6, 0.4, 0.2)  # of the source in virtual rows


def principal_axes(rows_ND: Array, count: int) -> tuple[Array, Array]:
    """Return the first principal axes, D x count, and each row's squared reconstruction error."""
    from sklearn.decomposition import PCA

    pca = PCA(count, random_state=0).fit(rows_ND)
    centred_ND = rows_ND - pca.mean_
    axes_DK = pca.components_.T
    left_ND = centred_ND - (centred_ND @ axes_DK) @ axes_DK.T
    return axes_DK, np.asarray((left_ND**2).sum(axis=1))


def subspaces(rows_ND: Array, dims: int, most: int) -> list[Array]:
    """Return the bases, D x dims, of subspaces: each of the rows that those before fit badly.

    A row fits badly if its error exceeds the median error of the first subspace.
    """
    bases: list[Array] = []
    bound = np.inf
    while len(bases) < most and (not bases or len(rows_ND) > dims):
        axes_DK, error_N = principal_axes(rows_ND, dims)
        bound = float(np.median(error_N)) if not bases else bound
        bases.append(axes_DK)
        rows_ND = rows_ND[error_N > bound]
    return bases


def chordal_distance(a_DK: Array, b_DK: Array) -> float:
    """Return the distance of two subspaces on the Grassmann manifold: sqrt(K - |A^T B|^2)."""
    return float(np.sqrt(max(0.0, a_DK.shape[1] - float(((a_DK.T @ b_DK) ** 2).sum()))))


def match(ours: Sequence[Array], others: Sequence[Array]) -> list[tuple[Array, Array]]:
    """Pair subspaces, the nearest first, until one side has none left."""
    pairs = product(range(len(ours)), range(len(others)))
    free, free_others = set(range(len(ours))), set(range(len(others)))
    found = []
    for i, j in sorted(pairs, key=lambda pair: chordal_distance(ours[pair[0]], others[pair[1]])):
        if i in free and j in free_others:
            found.append((ours[i], others[j]))
            free.remove(i)
            free_others.remove(j)
    return found


def alignment(pairs: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Return the projections of both domains, D x (pairs K), with the first rotated by A^T B."""
    rotated = [a_DK @ (a_DK.T @ b_DK) for a_DK, b_DK in pairs]
    return np.concatenate(rotated, axis=1), np.concatenate([b_DK for _, b_DK in pairs], axis=1)


def virtual_rows(
    source_SD: Array, target_TD: Array, ratio: float, draws: np.random.Generator
) -> Array:
    """Return a standardised virtual domain of as many rows as the source has."""
    from_source, from_target = (
        rows[draws.integers(len(rows), size=len(source_SD))] for rows in (source_SD, target_TD)
    )
    virtual_SD = ratio * from_source + (1 - ratio) * from_target
    mean_D, scale_D = mean_and_scale(virtual_SD)
    return np.asarray((virtual_SD - mean_D) / scale_D)


def aligned_classifier(problem: Problem, config: Any) -> tuple[Array, Array]:
    """Fit a classifier to the source aligned with another domain; return W and b for that."""
    source_SD, labels_S, other_ND, classes = problem
    fewest = min(len(source_SD), len(other_ND)) - 1
    dims = max(1, min(config.dims, fewest, source_SD.shape[1]))
    bases = [subspaces(rows, dims, config.subspaces) for rows in (source_SD, other_ND)]
    source_DE, other_DE = alignment(match(*bases))
    weight_CE, bias_C = logistic_regression(
        source_SD @ source_DE, labels_S, classes, config.strength
    )
    return weight_CE @ other_DE.T, bias_C


class Method(LinearMethod):
    summary = "PrDA on fixed features: virtual domains between source and target enlarge the source"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        dims: int = setting(44, above=0, at_most=2**16, help="Dimensions of a subspace.")
        subspaces: int = setting(3, above=0, at_most=1000, help="Most subspaces of a domain.")
        confidence: float = setting(
            0.9, at_least=0, at_most=1, help="Least probability of a virtual row to be added."
        )
        strength: float = setting(1.0, above=0, help="Inverse regularisation of the regression.")

    @staticmethod
    def fit(problem: Problem, config: Any, draws: np.random.Generator) -> Fitted:
        """Enlarge the source by virtual rows, round by round; return a classifier of the target."""
        rows_ND, labels_N, _, classes = problem
        target_TD = problem.target_or_source_TD
        for ratio in RATIOS:
            virtual_SD = virtual_rows(problem.source_SD, target_TD, ratio, draws)
            enlarged = Problem(rows_ND, labels_N, virtual_SD, classes)
            weight_CD, bias_C = aligned_classifier(enlarged, config)
            logits_SC = torch.from_numpy(virtual_SD @ weight_CD.T + bias_C)
            sure_S, found_S = (each.numpy() for each in logits_SC.softmax(dim=1).max(dim=1))
            kept_S = sure_S >= config.confidence
            rows_ND = np.concatenate([rows_ND, virtual_SD[kept_S]])
            labels_N = np.concatenate([labels_N, found_S[kept_S]])
        enlarged = Problem(rows_ND, labels_N, target_TD, classes)
        weight_CD, bias_C = aligned_classifier(enlarged, config)
        return {"weight_CD": weight_CD, "bias_C": bias_C}
