"""t-SNE of the target's features before and after adaptation, laid out so that the two can be compared."""

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from certvol.report.records import Features

Points = NDArray[np.float64]
MOST_POINTS = 2000
_COMPONENTS = 50
_ITERATIONS = 500
_LEAST_POINTS = 8


class Embedding(NamedTuple):
    rows_n: NDArray[np.int64]
    pretrained_n2: Points
    adapted_n2: Points | None
    """None where the delivered model is the pretrained one."""


@lru_cache(maxsize=1)  # for the page, and once more for papers
def embed(features: Features, seed: int = 0, most: int = MOST_POINTS) -> Embedding:
    """Both with the same seed, side by side in two threads; the second turned to lie on the first as well as it can."""
    from threadpoolctl import threadpool_limits

    chosen = np.arange(len(features.rows_n))
    if len(chosen) > most:
        chosen = np.sort(np.random.default_rng(seed).choice(len(chosen), most, replace=False))
    before, after = features.pretrained_nD[chosen], features.adapted_nD[chosen]
    same = before.shape == after.shape and np.array_equal(before, after)
    # One thread each: scikit-learn's own threads wait for each other by spinning, which on a busy machine costs tenfold.
    # Of OpenMP every thread has a limit of its own.
    alone = partial(threadpool_limits, limits=1, user_api="openmp")
    with threadpool_limits(1), ThreadPoolExecutor(2, initializer=alone) as pool:
        laid_out = list(pool.map(lambda part: tsne(part, seed), [before] if same else [before, after]))
    return Embedding(features.rows_n[chosen], laid_out[0], None if same else turned(laid_out[1], laid_out[0]))


def tsne(features_nD: NDArray[np.float32], seed: int) -> Points:
    """Centred, and scaled so that all points lie between -1 and 1."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    count, dim = features_nD.shape
    features = features_nD.astype(np.float64)
    if count < _LEAST_POINTS or not features.std(axis=0).any():
        return np.zeros((count, 2))
    if min(count, dim) > _COMPONENTS:
        features = PCA(_COMPONENTS, random_state=seed).fit_transform(features)
    perplexity = min(30.0, (count - 1) / 3)
    start = "pca" if features.shape[1] > 1 else "random"
    fitted = TSNE(perplexity=perplexity, init=start, random_state=seed, max_iter=_ITERATIONS, n_jobs=1)
    points_n2 = np.asarray(fitted.fit_transform(features.astype(np.float32)), dtype=np.float64)
    return _scaled(points_n2)


def _scaled(points_n2: Points) -> Points:
    points_n2 = points_n2 - points_n2.mean(axis=0)
    return np.asarray(points_n2 / max(float(np.abs(points_n2).max()), 1e-12))


def turned(points_n2: Points, like_n2: Points) -> Points:
    """Rotated or mirrored, which means nothing to t-SNE, so that images lie near their place in the other layout."""
    left, _, right = np.linalg.svd(points_n2.T @ like_n2)
    return _scaled(points_n2 @ (left @ right))
