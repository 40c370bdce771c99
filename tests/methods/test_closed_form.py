"""CORAL, JDA and GTDA against closed forms and the formulas written out."""

import math
from typing import Any

import numpy as np
import pytest
import torch

import references
from certvol.methods import coral, gtda, jda
from certvol.methods._closed_form import Problem, logistic_regression

RNG = np.random.default_rng(0)


def shifted_blobs(
    seed: int = 0, per_class: int = 30, dim: int = 6
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return source, labels, and a slightly rotated and shifted target with its labels."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(3, dim)) * 4
    labels = np.repeat(np.arange(3), per_class)
    source = centres[labels] + rng.normal(size=(len(labels), dim))
    turn = np.linalg.qr(np.eye(dim) + 0.15 * rng.normal(size=(dim, dim)))[0]
    turn *= np.sign(np.diag(turn))
    target = (centres[labels] + rng.normal(size=(len(labels), dim))) @ turn + 1.0
    return source, labels, target, labels


def test_coral_of_equal_covariances_changes_nothing() -> None:
    rows = RNG.normal(size=(50, 5))
    assert np.allclose(coral.coral(rows, rows + 7, 0.3), rows)


def test_coral_gives_the_source_the_covariance_of_the_target() -> None:
    source, target = (
        RNG.normal(size=(80, 4)) * [1, 2, 3, 4],
        RNG.normal(size=(90, 4)) @ RNG.normal(size=(4, 4)),
    )
    aligned = coral.coral(source, target, 1e-10)
    assert np.allclose(np.cov(aligned.T), np.cov(target.T), atol=1e-6)


def test_coral_of_one_dimension_by_hand() -> None:
    source, target = np.array([[-1.0], [1.0]]), np.array([[-3.0], [3.0]])  # variances 2 and 18
    assert np.allclose(coral.coral(source, target, 1.0), source / math.sqrt(3) * math.sqrt(19))


def test_coral_of_constant_features_is_finite() -> None:
    assert np.isfinite(coral.coral(np.zeros((5, 3)), np.ones((4, 3)))).all()
    assert np.isfinite(coral.coral(np.zeros((5, 3)), np.ones((1, 3)))).all()


@pytest.mark.parametrize("classes", [2, 3])
def test_a_class_without_rows_is_never_predicted(classes: int) -> None:
    rows = RNG.normal(size=(40, 3))
    labels = np.arange(40) % classes + 1  # class 0 and the last are absent
    weight, bias = logistic_regression(rows, labels, classes + 2, 1.0)
    assert weight.shape == (classes + 2, 3)
    assert set((rows @ weight.T + bias).argmax(1)) <= set(labels)


def jda_fit(problem: Problem, **settings: Any) -> dict[str, Any]:
    return jda.Method.fit(problem, jda.Method.Config(**settings), np.random.default_rng(0))


@pytest.mark.parametrize("pseudo", [False, True])
def test_jda_solves_the_eigenproblem_as_it_is_written(pseudo: bool) -> None:
    source, labels, target, _ = shifted_blobs(per_class=10)
    rows = jda.unit_rows(np.concatenate([source, target]))
    problem = Problem(source, labels, target, 3)
    first = jda_fit(problem, components=2, rounds=1)
    guessed = None
    if pseudo:
        projected = torch.from_numpy(jda.unit_rows(rows[len(source) :] @ first["projection_DK"]))
        logits = jda.nearest_logits(
            projected, torch.from_numpy(first["source_SK"]), torch.from_numpy(labels), 3, 1.0
        )
        guessed = logits.argmax(1).tolist()
        first = jda_fit(problem, components=2, rounds=2)
    expected = references.jda_projection(
        torch.from_numpy(rows), labels.tolist(), guessed, 3, 2, 1.0
    ).numpy()
    for ours, theirs in zip(first["projection_DK"].T, expected.T, strict=True):
        cosine = ours @ theirs / np.linalg.norm(ours) / np.linalg.norm(theirs)
        assert abs(cosine) == pytest.approx(1, abs=1e-6)


def test_jda_brings_the_means_together() -> None:
    source, labels, target, _ = shifted_blobs()
    problem = Problem(source, labels, target, 3)
    found = jda_fit(problem, components=3, ridge=0.01)
    rows = jda.unit_rows(np.concatenate([source, target]))
    projected = rows @ found["projection_DK"]
    gap = np.linalg.norm(projected[: len(source)].mean(0) - projected[len(source) :].mean(0))
    principal = np.linalg.svd(rows - rows.mean(0))[2][:3].T
    plain = rows @ principal
    plain_gap = np.linalg.norm(plain[: len(source)].mean(0) - plain[len(source) :].mean(0))
    assert gap / projected.std() < 0.5 * plain_gap / plain.std()


def test_nearest_logits_name_the_class_of_the_nearest_row() -> None:
    rows, source = torch.randn(30, 4), torch.randn(12, 4)
    labels = torch.arange(12) % 3
    logits = jda.nearest_logits(rows, source, labels, 4, 0.7)
    nearest = [min((float((row - s).norm()), j) for j, s in enumerate(source)) for row in rows]
    expected = [int(labels[j]) for _, j in nearest]
    assert logits.argmax(1).tolist() == expected
    assert (logits[:, 3] < -1e3).all()  # no source row has it
    assert logits[0, 1] == pytest.approx(
        -min(float((rows[0] - s).square().sum()) for s in source[labels == 1]) / 0.7, rel=1e-4
    )


def test_gtda_is_the_replicator_game_on_the_whole_graph() -> None:
    source, labels, target, _ = shifted_blobs(per_class=4)
    n = len(source) + len(target)
    start = RNG.dirichlet(np.ones(3), size=len(target))
    problem = Problem(source, labels, target, 3)
    game = gtda.gtda(problem, start, num_neighbours=n - 1, most_rounds=3)
    nodes = np.concatenate([source, target])
    distance = np.linalg.norm(nodes[:, None] - nodes[None], axis=2)
    scale = [sorted(distance[i])[7] for i in range(n)]  # the first is the node itself
    weights = [
        [
            0.0 if i == j else math.exp(-(distance[i, j] ** 2) / (scale[i] * scale[j]))
            for j in range(n)
        ]
        for i in range(n)
    ]
    one_hot = np.eye(3)[labels].tolist()
    expected = references.replicator_rounds(weights, one_hot + start.tolist(), len(source), 3)
    assert np.allclose(game.strategies_MC, expected, atol=1e-6)


def test_a_node_between_two_labels_follows_the_nearer_one() -> None:
    source, labels = np.array([[0.0], [1.0]]), np.array([0, 1])
    problem = Problem(source, labels, np.array([[0.2]]), 2)
    game = gtda.gtda(problem, np.array([[0.5, 0.5]]), num_neighbours=2)
    assert game.strategies_MC[2, 0] > 0.99
    assert np.array_equal(game.strategies_MC[:2], np.eye(2))


def test_a_row_of_the_game_has_its_strategy_and_a_new_one_moves_by_its_neighbours() -> None:
    source, labels, target, _ = shifted_blobs(per_class=10)
    start = np.full((len(target), 3), 1 / 3)
    game = gtda.gtda(Problem(source, labels, target, 3), start)
    rows = torch.from_numpy(target) + 1e-7
    again = gtda.gtda_strategies(rows, torch.from_numpy(start), game, 20)
    assert torch.equal(again, game.strategies_MC[len(source) :])
    new = torch.from_numpy(target[:1] + 0.05)
    moved = gtda.gtda_strategies(new, torch.full((1, 3), 1 / 3), game, 20)
    assert not torch.equal(moved, game.strategies_MC[len(source) : len(source) + 1])
    assert moved.sum() == pytest.approx(1)
    assert moved.argmax() == game.strategies_MC[len(source)].argmax()


def test_doubles_and_far_rows_give_finite_strategies() -> None:
    source, labels = np.zeros((10, 2)), np.arange(10) % 2
    target = np.array([[0.0, 0.0], [1e6, 1e6]])
    game = gtda.gtda(Problem(source, labels, target, 2), np.full((2, 2), 0.5))
    assert torch.isfinite(game.strategies_MC).all()
    assert np.allclose(game.strategies_MC.sum(1), 1)


def test_a_wide_row_is_hardly_away_from_itself() -> None:
    """float32 distances would fail this; TF32, a GPU's default, has larger errors yet."""
    rows = torch.randn(60, 2048, generator=torch.Generator().manual_seed(0))
    distances, numbers = gtda.neighbours(rows, rows, 2)
    assert numbers[:, 0].tolist() == list(range(60))
    assert distances[:, 0].max() < 1e-4 * distances[:, 1].min()
