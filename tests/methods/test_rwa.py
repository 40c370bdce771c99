"""RWA and AdREM against the walks written out."""

import math

import numpy as np
import pytest
import torch

from certvol.methods import _linear_svm as svm
from certvol.methods import adrem, rwa
from certvol.methods._closed_form import Problem
from certvol.methods.adrem import balanced_copies
from certvol.methods.rwa import balanced_bootstrap
from certvol.randomness import numpy_generator
from support import naive_walks as naive
from support.methods import make_method


def overlapping(per_class: int = 12, dim: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return source, labels and a shifted target whose classes overlap; class 3 is absent."""
    rng = np.random.default_rng(3)
    centres = rng.normal(size=(3, dim))
    labels = np.repeat(np.arange(3), per_class)
    source, target = (centres[labels] + rng.normal(size=(len(labels), dim)) for _ in "st")
    return source, labels, target + 0.8


def test_a_bootstrap_draws_as_many_of_each_class_that_is_there() -> None:
    labels = np.array([0] * 7 + [2] * 2 + [3])
    copies = balanced_bootstrap(labels, 4, np.random.default_rng(0))
    for label in (0, 2, 3):
        assert copies[labels == label].sum() == 3, "a quarter of ten, rounded up"
    assert copies[9] == 3


@pytest.mark.parametrize("count", [10, 4.0, 0.5])
def test_copies_are_even_and_as_many_for_each_class(count: float) -> None:
    labels = np.array([0] * 7 + [2] * 2 + [3])
    copies = balanced_copies(labels, 4, count, np.random.default_rng(0))
    for label in (0, 2, 3):
        of_class = copies[labels == label]
        assert of_class.sum() == math.ceil(count / 4)
        assert of_class.max() - of_class.min() <= 1


def test_a_walk_is_that_of_the_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svm, "TOLERANCE", 1e-8)
    source, labels, target = overlapping()
    config = rwa.Method.Config(steps=6, target_share=0.7)
    fitted = rwa.Method.fit(Problem(source, labels, target, 4), config, np.random.default_rng(5))
    draws = np.random.default_rng(5)
    strengths = [svm.best_strength(source, labels, 4, draws)]
    guessed = np.array(
        naive.labels_of(target, naive.machine(source, labels.tolist(), 4, strengths[0]))
    )
    strengths.append(svm.best_strength(target, guessed, 4, draws))
    problem = naive.Problem(source, labels.tolist(), target, 4)
    walked = naive.random_walk(problem, 6, (strengths[0], strengths[1]), draws, 0.7)
    assert [svm.classify(target, each).tolist() for each in fitted["weight_RCD"]] == walked
    assert len({tuple(each) for each in walked}) > 1, "the walk moves"


def test_randomised_em_is_that_of_the_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(svm, "TOLERANCE", 1e-8)
    source, labels, target = overlapping()
    config = adrem.Method.Config(rounds=3, repetitions=3)
    fitted = adrem.Method.fit(Problem(source, labels, target, 4), config, np.random.default_rng(5))
    draws = np.random.default_rng(5)
    strength = svm.best_strength(source, labels, 4, draws)
    problem = naive.Problem(source, labels.tolist(), target, 4)
    expected = [naive.randomised_em(problem, 3, strength, draws) for _ in range(3)]
    assert [svm.classify(target, each).tolist() for each in fitted["weight_RCD"]] == expected


@pytest.mark.parametrize("name", ["rwa", "adrem"])
def test_labels_are_the_most_frequent_and_follow_the_runs_seed(name: str) -> None:
    source, labels, target = overlapping()
    rows = [torch.from_numpy(each).float() for each in (source, target)]
    shares = []
    for seed in (1, 1, 2):
        settings = {"steps": 9} if name == "rwa" else {"rounds": 3, "repetitions": 5}
        method = make_method(name, **settings).eval()
        method.seed = seed
        method.fit_features(rows[0], torch.from_numpy(labels), rows[1])
        shares.append(method.logits(rows[1]).softmax(1))
    assert torch.equal(shares[0], shares[1])
    assert not torch.equal(shares[0], shares[2])
    assert (shares[0].argmax(1).numpy() == labels).mean() > 0.5
    assert set(shares[0].argmax(1).tolist()) <= {0, 1, 2}


def votes(rounds: list[list[int]], classes: int) -> list[list[float]]:
    return [
        [labels.count(c) / len(labels) for c in range(classes)]
        for labels in map(list, zip(*rounds, strict=True))
    ]


@pytest.mark.parametrize("name", ["rwa", "adrem"])
def test_a_fit_divides_by_the_common_scale_and_counts_the_votes_of_the_loops(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(svm, "TOLERANCE", 1e-8)
    source, labels, target = overlapping()
    source, target = ((rows * [100, 1, 0.01, 10]).round(3) for rows in (source, target))
    rows = [torch.from_numpy(each).float() for each in (source, target)]
    settings = {"steps": 8, "target_share": 0.3} if name == "rwa" else {}
    settings |= {"rounds": 3, "repetitions": 6} if name == "adrem" else {}
    method = make_method(name, **settings).eval()
    method.fit_features(rows[0], torch.from_numpy(labels), rows[1])

    pair = [each.double().numpy() for each in rows]
    scale = np.concatenate(pair).std(0, ddof=1)
    source, target = pair[0] / scale, pair[1] / scale
    draws = numpy_generator(method.seed, name)
    strength = svm.best_strength(source, labels, 4, draws)
    problem = naive.Problem(source, labels.tolist(), target, 4)
    if name == "rwa":
        first = naive.machine(source, labels.tolist(), 4, strength)
        guessed = np.array(naive.labels_of(target, first))
        strengths = (strength, svm.best_strength(target, guessed, 4, draws))
        rounds = naive.random_walk(problem, 8, strengths, draws, 0.3)
    else:
        rounds = [naive.randomised_em(problem, 3, strength, draws) for _ in range(6)]
    found = method.logits(rows[1]).softmax(1)
    assert found.numpy() == pytest.approx(np.array(votes(rounds, 4)), abs=1e-5)


def test_a_target_of_one_class_keeps_its_label() -> None:
    source, labels, _ = overlapping()
    target = source[labels == 1][:5]
    problem = Problem(source, labels, target, 3)
    for method, config in (
        (rwa.Method, rwa.Method.Config(steps=3, target_share=0.5)),
        (adrem.Method, adrem.Method.Config(rounds=3, repetitions=2)),
    ):
        weights = method.fit(problem, config, np.random.default_rng(0))["weight_RCD"]
        assert np.isfinite(weights).all()
        assert (svm.classify(target, weights[-1]) == 1).mean() >= 0.8
