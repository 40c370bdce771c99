"""t-SNE keeps clusters apart, repeats with the same seed, and turns two layouts to match."""

import numpy as np

from certvol.report.embedding import embed, rotate_onto, tsne
from certvol.report.records import Features


def _clusters(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(3), 40)
    return (np.eye(3, 60)[labels] * 40 + rng.normal(size=(120, 60))).astype(np.float32), labels


def test_clusters_far_apart_stay_apart() -> None:
    features, labels = _clusters()
    points = tsne(features, seed=0)
    assert points.shape == (120, 2)
    assert np.abs(points).max() == 1.0
    away = np.linalg.norm(points[:, None] - points[None], axis=2)
    np.fill_diagonal(away, np.inf)
    assert (labels[away.argmin(axis=1)] == labels).all()


def test_the_same_seed_gives_the_same_layout() -> None:
    features, _ = _clusters()
    np.testing.assert_array_equal(tsne(features, 3), tsne(features, 3))


def test_a_rotated_and_mirrored_layout_is_rotated_back() -> None:
    rng = np.random.default_rng(0)
    points = rng.normal(size=(50, 2))
    points = (points - points.mean(0)) / np.abs(points - points.mean(0)).max()
    turn = np.array([[np.cos(2), -np.sin(2)], [np.sin(2), np.cos(2)]]) @ np.diag([1, -1])
    np.testing.assert_allclose(rotate_onto(points @ turn, points), points, atol=1e-9)


def test_a_model_that_did_not_change_is_laid_out_once() -> None:
    features, _ = _clusters()
    rows = np.arange(120)
    assert embed(Features(rows, features, features.copy())).adapted_n2 is None
    both = embed(Features(rows, features, features[::-1].copy()))
    assert both.adapted_n2 is not None
    assert both.adapted_n2.shape == (120, 2)


def test_equal_features_are_one_point() -> None:
    assert (tsne(np.ones((20, 4), np.float32), 0) == 0).all()
    assert tsne(np.random.default_rng(0).normal(size=(9, 2)).astype(np.float32), 0).shape == (9, 2)
