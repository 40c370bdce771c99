from typing import Any

import numpy as np
import pytest
import torch

from certvol.methods import _linear_svm as svm
from support import naive_walks as naive
from support.methods import CLASSES, make_method

RNG = np.random.default_rng(0)


class Watched:
    """Notes whether each classification names fitted classes only."""

    def __init__(self, fit: Any, classify: Any) -> None:
        self.fit, self.real, self.only_fitted = fit, classify, list[bool]()

    def __call__(self, rows: Any, labels: Any, classes: int, strength: float) -> Any:
        self.fitted = set(labels.tolist())
        return self.fit(rows, labels, classes, strength)

    def classify(self, rows: Any, weights: Any) -> Any:
        found = self.real(rows, weights)
        self.only_fitted.append(set(found.tolist()) <= self.fitted)
        return found


@pytest.mark.parametrize(("strength", "expected"), [(0.01, 0.04), (0.1, 0.4), (10.0, 0.5)])
def test_two_points_by_hand(strength: float, expected: float) -> None:
    """Points -2 and 2 want the margin 1 at w = 1/2; each adds at most 2 * strength to w."""
    rows, labels = np.array([[-2.0], [2.0]]), np.array([0, 1])
    found = svm.linear_svm(rows, labels, 3, strength)
    assert found[:, 0] == pytest.approx([-expected, expected, 0.0], rel=0.05)


@pytest.mark.parametrize("classes", [1, 2, 3])
def test_machines_are_those_of_the_loops_and_copies_are_repeated_rows(
    classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(svm, "TOLERANCE", 1e-8)
    rows = RNG.normal(size=(40, 4))
    labels = np.arange(40) % classes + 1  # class 0 is absent
    copies = RNG.integers(0, 3, size=40)
    rows[:, 0] += labels
    found = svm.linear_svm(rows, labels, 5, 0.3, copies)
    repeated = np.repeat(np.arange(40), copies)
    if classes == 1:
        assert np.allclose(found[1], rows[copies > 0].mean(0))
    else:
        expected = naive.machine(rows[repeated], labels[repeated].tolist(), 5, 0.3)
        assert np.allclose(found, expected, atol=1e-3)
    assert (found[[0, 4]] == 0).all()
    assert (found[1] != 0).any()


def test_no_rows_at_all_give_weights_of_zero() -> None:
    rows, labels = RNG.normal(size=(5, 3)), np.arange(5) % 2
    assert not svm.linear_svm(rows, labels, 2, 1.0, np.zeros(5)).any()


def test_the_scale_is_that_of_both_domains_and_1_for_a_constant() -> None:
    source, target = np.array([[1.0, 5.0], [2.0, 5.0]]), np.array([[6.0, 5.0]])
    assert svm.joint_scale(source, target) == pytest.approx([np.std([1, 2, 6], ddof=1), 1.0])


def test_the_best_strength_is_the_first_of_equals_and_fits_noisy_labels_little() -> None:
    labels = np.arange(60) % 2
    apart = np.where(labels[:, None] == 0, -1.0, 1.0) * np.ones((60, 3))
    assert svm.best_strength(apart, labels, 2, np.random.default_rng(0)) == svm.STRENGTHS[0]
    found = {}
    for strength in svm.STRENGTHS:
        order = np.random.default_rng(1).permutation(60)
        noisy = np.random.default_rng(2).normal(size=(60, 30)) + 0.4 * apart[:, :1]
        hits = 0
        for fitted, judged in ((order[::2], order[1::2]), (order[1::2], order[::2])):
            weights = svm.linear_svm(noisy[fitted], labels[fitted], 2, strength)
            guessed = naive.labels_of(noisy[judged], weights)
            hits += sum(a == b for a, b in zip(guessed, labels[judged], strict=True))
        found[strength] = hits
    best = svm.best_strength(noisy, labels, 2, np.random.default_rng(1))
    assert best == max(svm.STRENGTHS, key=lambda strength: found[strength])


def test_a_class_that_was_not_fitted_never_wins() -> None:
    rows = np.array([[-1.0, 0.0], [0.0, -1.0]])
    weights = np.array([[1.0, 0.5], [0.0, 0.0], [0.5, 1.0]])  # all scores of 0 and 2 are negative
    assert svm.classify(rows, weights).tolist() == [2, 0]
    pair = (torch.from_numpy(rows), torch.from_numpy(weights)[None])
    assert svm.vote_shares(*pair).argmax(1).tolist() == [2, 0]


def test_a_class_that_only_one_half_has_does_not_win_in_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each class of 40 has one or two rows, so that each half lacks some."""
    rng = np.random.default_rng(4)
    labels = np.concatenate([np.arange(40), np.arange(20)])
    rows = rng.normal(size=(40, 6))[labels] + 0.1 * rng.normal(size=(60, 6)) - 1
    order = np.random.default_rng(1).permutation(60)
    hits = []
    for strength in svm.STRENGTHS:
        count = 0
        for fitted, judged in ((order[::2], order[1::2]), (order[1::2], order[::2])):
            weights = svm.linear_svm(rows[fitted], labels[fitted], 40, strength)
            present = sorted(set(labels[fitted].tolist()))
            for row, label in zip(rows[judged], labels[judged], strict=True):
                count += max(present, key=lambda c: float(row @ weights[c])) == label
        hits.append(count)
    assert len(set(hits)) > 2
    monkeypatch.setattr(svm, "linear_svm", watched := Watched(svm.linear_svm, svm.classify))
    monkeypatch.setattr(svm, "classify", watched.classify)
    best = svm.best_strength(rows, labels, 40, np.random.default_rng(1))
    assert best == svm.STRENGTHS[hits.index(max(hits))]
    assert all(watched.only_fitted)


@pytest.mark.parametrize("name", ["rwa", "adrem"])
def test_shares_of_votes_are_probabilities(name: str) -> None:
    method = make_method(name).eval()
    voters, dim = RNG.normal(size=(7, CLASSES, 5)), 5
    method.keep(mean_D=np.zeros(dim), scale_D=np.full(dim, 2.0), weight_RCD=voters)
    rows = torch.from_numpy(RNG.normal(size=(6, dim))).float()
    expected = np.zeros((6, CLASSES))
    for n, row in enumerate(rows.double().numpy()):
        for voter in voters:
            expected[n, int(np.argmax(voter @ (row / 2)))] += 1 / 7
    assert method.logits(rows).softmax(1).numpy() == pytest.approx(expected, abs=1e-6)


def test_a_tie_goes_to_the_smaller_class() -> None:
    method = make_method("rwa").eval()
    voters = np.zeros((2, CLASSES, 3))
    voters[0, 1:], voters[1, 2:] = 1.0, 1.0
    method.keep(mean_D=np.zeros(3), scale_D=np.ones(3), weight_RCD=voters)
    shares = method.logits(torch.ones(1, 3)).softmax(1)[0].tolist()
    assert shares == pytest.approx([0, 0.5, 0.5, 0], abs=1e-6)
    assert method.logits(torch.ones(1, 3)).argmax(1).item() == 1
