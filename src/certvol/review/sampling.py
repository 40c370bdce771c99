"""Choose which target images to label: random ones first, then those that help training most.

The model is judged by the random ones. They are drawn from strata of equal size by certainty, so
that any first part of the order represents the target. The order never depends on the answers.
N images.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from certvol.randomness import numpy_generator, torch_seed
from certvol.report.records import Features
from certvol.runs.review_labels import Kind

Indices = NDArray[np.int64]
Values = NDArray[np.floating]

STRATA = 5
MOST_CHOSEN = 1000
_ITERATIONS = 30  # of k-means: the choice need not converge


@dataclass(frozen=True)
class Item:
    """An image to label: its row in predictions.csv."""

    row: int
    kind: Kind


def strata(certainty_N: Values) -> Indices:
    """Return the stratum of each image: equal shares of the images in order of certainty."""
    ranks_N = np.empty(len(certainty_N), np.int64)
    ranks_N[np.argsort(certainty_N, kind="stable")] = np.arange(len(certainty_N))
    return ranks_N * STRATA // max(1, len(certainty_N))


def random_order(stratum_N: Indices, seed: int) -> Indices:
    """Return all images in random order, one of each stratum in every round."""
    generator = numpy_generator(seed, "review.random")
    place_N, within_N = generator.random(len(stratum_N)), np.empty(len(stratum_N), np.int64)
    for stratum in np.unique(stratum_N):
        rows = np.flatnonzero(stratum_N == stratum)
        within_N[rows[np.argsort(place_N[rows])]] = np.arange(len(rows))
    return np.lexsort((place_N, within_N)).astype(np.int64)


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
