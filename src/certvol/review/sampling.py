"""Choose which target images to label so that training gains most; n images have features."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from certvol.data import Indices
from certvol.randomness import torch_seed
from certvol.report.records import Features
from certvol.runs.review_labels import Kind

Values = NDArray[np.floating]

MOST_CHOSEN = 1000
_ITERATIONS = 30  # of k-means: the choice need not converge


@dataclass(frozen=True)
class Item:
    """An image to label: its row in predictions.csv."""

    row: int
    kind: Kind


def useful_order(
    count: int,
    uncertainty_N: Values,
    predicted_N: Indices,
    features: Features | None,
    taken: Sequence[int],
    seed: int,
) -> Indices:
    """Return `count` images that help training most: uncertain ones that differ from each other.

    The features of the images are clustered, each image weighted by its uncertainty, and the image
    nearest to each centre is taken (CLUE, Prabhu et al. 2021). Without features, the most uncertain
    images of each predicted class take turns.
    """
    free_N = np.ones(len(uncertainty_N), np.bool_)
    free_N[list(taken)] = False
    count = min(count, MOST_CHOSEN)
    if features is not None:
        kept = free_N[features.rows_n]
        if kept.sum() > count:
            rows = features.rows_n[kept]
            return rows[_centres(features.adapted_nD[kept], uncertainty_N[rows], count, seed)]
    rows = np.flatnonzero(free_N)
    rows = rows[np.argsort(-uncertainty_N[rows], kind="stable")]
    turn_n = np.empty(len(rows), np.int64)
    for label in np.unique(predicted_N[rows]):
        same = predicted_N[rows] == label
        turn_n[same] = np.arange(same.sum())
    return rows[np.argsort(turn_n, kind="stable")][:count]


def _centres(features_nD: Values, uncertainty_n: Values, count: int, seed: int) -> Indices:
    """Return the image nearest to each of `count` weighted centres, the heaviest cluster first."""
    from sklearn.cluster import KMeans

    norm_n1 = np.linalg.norm(features_nD, axis=1, keepdims=True)
    unit_nD = features_nD / np.maximum(norm_n1, np.finfo(np.float32).tiny)
    weight_n = uncertainty_n - uncertainty_n.min() + 1e-3
    state = torch_seed(seed, "review.chosen") % 2**32
    with threadpool_limits(1):  # on a busy machine, its threads wait for each other
        means = KMeans(count, n_init=1, max_iter=_ITERATIONS, random_state=state)
        distance_nK = means.fit(unit_nD, sample_weight=weight_n).transform(unit_nD)
    heaviest = np.argsort(-np.bincount(means.labels_, weight_n, count), kind="stable")
    found: list[int] = []
    for cluster in heaviest:
        order = np.argsort(distance_nK[:, cluster], kind="stable")
        found.append(next(int(i) for i in order if int(i) not in found))
    return np.array(found, dtype=np.int64)
