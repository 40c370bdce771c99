import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from certvol.methods import prda
from certvol.methods._closed_form import Problem
from support.methods import make_method

RNG = np.random.default_rng(0)


def basis(dim: int, dims: int, seed: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(dim, dims)))[0]


def test_the_distance_of_subspaces_in_closed_forms() -> None:
    axes = np.eye(5)
    assert prda.chordal_distance(axes[:, :2], axes[:, [1, 0]]) == pytest.approx(0)
    assert prda.chordal_distance(axes[:, :2], axes[:, 2:4]) == pytest.approx(np.sqrt(2))
    turned = np.array([[np.cos(0.3)], [np.sin(0.3)]])
    assert prda.chordal_distance(np.array([[1.0], [0.0]]), turned) == pytest.approx(np.sin(0.3))


def test_the_distance_is_the_sum_over_all_pairs_of_axes() -> None:
    a, b = basis(6, 3, 0), basis(6, 3, 1)
    total = sum(float(a[:, i] @ b[:, j]) ** 2 for i in range(3) for j in range(3))
    assert prda.chordal_distance(a, b) == pytest.approx(np.sqrt(3 - total))


def test_subspaces_are_those_of_rows_that_fit_badly() -> None:
    rows = RNG.normal(size=(60, 8)) * [5, 4, 1, 1, 1, 1, 1, 1]
    found = prda.subspaces(rows, 2, 3)
    left, bound = rows, None
    for base in found:
        centred = left - left.mean(0)
        axes = np.linalg.svd(centred, full_matrices=False)[2][:2].T
        assert prda.chordal_distance(base, axes) == pytest.approx(0, abs=1e-6)
        errors = ((centred - centred @ axes @ axes.T) ** 2).sum(1)
        bound = np.median(errors) if bound is None else bound
        left = left[errors > bound]
    assert len(found) == 3
    assert len(prda.subspaces(rows, 2, 1)) == 1
    assert len(prda.subspaces(rows[:4], 3, 3)) == 1, "too few rows are left for a second"


def test_pairs_are_the_nearest_first_and_each_side_once() -> None:
    ours, others = [basis(6, 2, 0), basis(6, 2, 1)], [basis(6, 2, seed) for seed in (2, 3)]
    others.insert(1, ours[1])
    pairs = prda.match(ours, others)
    assert len(pairs) == 2
    assert pairs[0][0] is ours[1]
    assert pairs[0][1] is others[1]
    rest = min((others[0], others[2]), key=lambda other: prda.chordal_distance(ours[0], other))
    assert pairs[1][0] is ours[0]
    assert pairs[1][1] is rest


def test_alignment_is_the_least_distance_over_rotations_of_the_source() -> None:
    a, b = basis(6, 2, 0), basis(6, 2, 1)
    ours, other = prda.alignment([(a, b), (b, b)])
    assert np.allclose(ours[:, 2:], b)
    assert np.allclose(other, np.concatenate([b, b], axis=1))
    least = np.linalg.lstsq(a, b, rcond=None)[0]
    assert np.allclose(ours[:, :2], a @ least), "A minimises |B_s A - B_u|"


def rounds_by_hand(
    source: np.ndarray, labels: np.ndarray, target: np.ndarray, draws: np.random.Generator
) -> np.ndarray:
    """Follow the paper's steps with two subspaces per domain; return the target's logits."""

    def projected(ours: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        left, right = [], []
        for a, b in prda.match(*(prda.subspaces(rows, 3, 2) for rows in (ours, other))):
            left.append(ours @ a @ (a.T @ b))
            right.append(other @ b)
        assert len(left) == 2
        return np.concatenate(left, axis=1), np.concatenate(right, axis=1)

    rows, known = source.tolist(), labels.tolist()
    for ratio in (0.8, 0.6, 0.4, 0.2):
        i = draws.integers(len(source), size=len(source))
        j = draws.integers(len(target), size=len(source))
        virtual = np.array(
            [ratio * source[a] + (1 - ratio) * target[b] for a, b in zip(i, j, strict=True)]
        )
        virtual = (virtual - virtual.mean(0)) / virtual.std(0)
        ours, other = projected(np.array(rows), virtual)
        model = LogisticRegression(C=0.1, max_iter=1000).fit(ours, known)
        for row, p in zip(virtual, model.predict_proba(other), strict=True):
            if p.max() >= 0.7:
                rows.append(row.tolist())
                known.append(int(p.argmax()))
    ours, other = projected(np.array(rows), target)
    last = LogisticRegression(C=0.1, max_iter=1000).fit(ours, known)
    return np.asarray(last.decision_function(other))


def blobs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    centres, labels = rng.normal(size=(3, 6)), np.repeat(np.arange(3), 15)
    source, target = (centres[labels] + 0.8 * rng.normal(size=(45, 6)) for _ in range(2))
    return source, labels, target


def test_all_rounds_are_those_of_the_loops() -> None:
    source, labels, target = (
        (rows - rows.mean(0)) / rows.std(0) if rows.ndim == 2 else rows for rows in blobs()
    )
    config = prda.Method.Config(dims=3, subspaces=2, confidence=0.7, strength=0.1)
    problem = Problem(source, labels, target, 3)
    fitted = prda.Method.fit(problem, config, np.random.default_rng(2))
    expected = rounds_by_hand(source, labels, target, np.random.default_rng(2))
    found = target @ fitted["weight_CD"].T + fitted["bias_C"]
    found, expected = (each - each.mean(1, keepdims=True) for each in (found, expected))
    assert found == pytest.approx(expected, abs=1e-3)
    assert set(expected.argmax(1).tolist()) == {0, 1, 2}


def test_the_fitted_method_classifies_and_follows_the_runs_seed() -> None:
    source, labels, target = blobs()
    rows = [torch.from_numpy(each).float() for each in (source, target + 3)]
    found = []
    for seed in (1, 1, 2):
        method = make_method("prda", dims=3).eval()
        method.network.num_classes = 5  # two classes are absent
        method.seed = seed
        method.fit_features(rows[0], torch.from_numpy(labels), rows[1])
        found.append(method.logits(rows[1]).softmax(1))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert (found[0].argmax(1).numpy() == labels).mean() > 0.6
    assert found[0][:, 3:].max() < 1e-6


@pytest.mark.parametrize("count", [2, 3])
def test_few_rows_give_finite_classifiers(count: int) -> None:
    source, labels, target = blobs()
    problem = Problem(source, labels, target[:count], 3)
    fitted = prda.Method.fit(problem, prda.Method.Config(), np.random.default_rng(0))
    assert np.isfinite(fitted["weight_CD"]).all()
    assert np.isfinite(fitted["bias_C"]).all()
