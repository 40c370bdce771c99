"""Random images represent the target in any first part of the queue; chosen ones differ."""

import numpy as np
import pytest

from certvol.predict.random_sample import STRATA, random_order, strata
from certvol.report.records import Features
from certvol.review.sampling import useful_order

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("count", [1, 4, 17, 500])
def test_strata_are_equal_shares_in_order_of_certainty(count: int) -> None:
    certainty_N = RNG.random(count).round(1)  # with ties
    stratum_N = strata(certainty_N)
    sizes = np.bincount(stratum_N, minlength=STRATA)
    assert sizes.max() - sizes.min() <= 1
    for lower in range(STRATA - 1):
        below, above = certainty_N[stratum_N <= lower], certainty_N[stratum_N > lower]
        assert len(below) == 0 or len(above) == 0 or below.max() <= above.min()


def test_every_first_part_of_the_order_holds_each_stratum_equally() -> None:
    stratum_N = strata(RNG.random(203))
    order = random_order(stratum_N, seed=3)
    assert sorted(order) == list(range(203))
    for end in range(1, 200):
        drawn = np.bincount(stratum_N[order[:end]], minlength=STRATA)
        assert drawn.max() - drawn.min() <= 1


def test_the_order_depends_on_the_seed_alone() -> None:
    stratum_N = strata(RNG.random(50))
    assert random_order(stratum_N, 1).tolist() == random_order(stratum_N, 1).tolist()
    assert random_order(stratum_N, 1).tolist() != random_order(stratum_N, 2).tolist()


def test_every_image_is_drawn_equally_often() -> None:
    stratum_N = strata(np.arange(20.0))
    first = np.concatenate([random_order(stratum_N, seed)[:7] for seed in range(3000)])
    shares = np.bincount(first, minlength=20) / 3000
    assert shares == pytest.approx(np.full(20, 7 / 20), abs=0.04)  # 4.6 standard errors


@pytest.mark.parametrize("with_features", [True, False])
def test_chosen_images_are_free_uncertain_and_different(with_features: bool) -> None:
    count = 300
    uncertainty_N, predicted_N = RNG.random(count), RNG.integers(0, 3, count)
    features_nD = np.eye(3, 8, dtype=np.float32)[predicted_N] * 9
    features_nD += RNG.normal(size=(count, 8)).astype(np.float32)
    features = Features(np.arange(count), features_nD, features_nD) if with_features else None
    taken = list(range(0, count, 3))
    found = useful_order(30, uncertainty_N, predicted_N, features, taken, seed=0)
    assert len(set(found.tolist())) == 30
    assert not set(found.tolist()) & set(taken)
    assert uncertainty_N[found].mean() > uncertainty_N.mean() + 0.1
    assert np.bincount(predicted_N[found], minlength=3).min() >= 5
    again = useful_order(30, uncertainty_N, predicted_N, features, taken, seed=0)
    assert again.tolist() == found.tolist()


def test_a_small_target_is_labelled_as_a_whole() -> None:
    uncertainty_N, predicted_N = RNG.random(9), np.zeros(9, np.int64)
    features = Features(np.arange(9), np.ones((9, 4), np.float32), np.ones((9, 4), np.float32))
    found = useful_order(20, uncertainty_N, predicted_N, features, [0, 1], seed=0)
    assert sorted(found.tolist()) == [2, 3, 4, 5, 6, 7, 8]
    assert len(useful_order(20, uncertainty_N, predicted_N, None, range(9), seed=0)) == 0
