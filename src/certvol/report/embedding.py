"""Lay out the target's features by t-SNE, before and after adaptation, for comparison."""

from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from certvol.data import Indices
from certvol.report.records import Features

Points = NDArray[np.float64]
_COMPONENTS = 50
_ITERATIONS = 500


class Embedding(NamedTuple):
    rows_n: Indices
    pretrained_n2: Points
    adapted_n2: Points | None
    """None if the delivered model is the pretrained one."""


@lru_cache(maxsize=1)  # the figures for papers need it again after the page
def embed(features: Features, seed: int = 0) -> Embedding:
    """Lay out both with the same seed, and turn the second to match the first."""
    from threadpoolctl import threadpool_limits

    before, after = features.pretrained_nD, features.adapted_nD
    same = before.shape == after.shape and np.array_equal(before, after)
    # One thread each: scikit-learn's threads wait for each other by spinning, which makes it ten
    # times slower on a busy machine. OpenMP needs the limit in every thread.
    one_thread = partial(threadpool_limits, limits=1, user_api="openmp")
    with threadpool_limits(1), ThreadPoolExecutor(2, initializer=one_thread) as pool:
        parts = [before] if same else [before, after]
        layouts = list(pool.map(lambda part: tsne(part, seed), parts))
    adapted_n2 = None if same else rotate_onto(layouts[1], layouts[0])
    return Embedding(features.rows_n, layouts[0], adapted_n2)


def tsne(features_nD: NDArray[np.float32], seed: int) -> Points:
    """Return a layout that is centred and scaled to lie between -1 and 1."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE

    count, dim = features_nD.shape
    features = features_nD.astype(np.float64)
    if not features.std(axis=0).any():
        return np.zeros((count, 2))
    if min(count, dim) > _COMPONENTS:
        features = PCA(_COMPONENTS, random_state=seed).fit_transform(features)
    fitted = TSNE(
        perplexity=min(30.0, (count - 1) / 3),
        init="pca" if features.shape[1] > 1 else "random",
        random_state=seed,
        max_iter=_ITERATIONS,
        n_jobs=1,
    )
    points_n2 = np.asarray(fitted.fit_transform(features.astype(np.float32)), dtype=np.float64)
    return _scaled(points_n2)


def _scaled(points_n2: Points) -> Points:
    points_n2 = points_n2 - points_n2.mean(axis=0)
    return np.asarray(points_n2 / max(float(np.abs(points_n2).max()), 1e-12))


def rotate_onto(points_n2: Points, like_n2: Points) -> Points:
    """Rotate or mirror a layout so that images keep their place, which t-SNE leaves to chance."""
    left, _, right = np.linalg.svd(points_n2.T @ like_n2)
    return _scaled(points_n2 @ (left @ right))
