"""Intervals against closed forms, SciPy and simulated draws."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binomtest

from certvol.scores import intervals

STRATA = 5
SIZE_H = np.full(STRATA, 400)


@pytest.mark.parametrize(("right", "labels"), [(0, 5), (3, 5), (5, 5), (47, 50), (180, 400)])
def test_simple_intervals_equal_scipys(right: int, labels: int) -> None:
    expected = binomtest(right, labels).proportion_ci(0.95, method="exact")
    found = intervals.clopper_pearson(right, labels)
    assert found.estimate == right / labels
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=1e-10)


def test_bounds_without_errors_have_a_closed_form() -> None:
    assert intervals.upper_bound(0, 59) == pytest.approx(1 - 0.05 ** (1 / 59))
    assert intervals.lower_bound(59, 59) == pytest.approx(0.05 ** (1 / 59))
    assert intervals.upper_bound(59, 59) == 1
    assert intervals.labels_to_reach(0, 0.05) == 59  # the smallest n with 0.95^n <= 0.05
    assert intervals.labels_to_reach(0.05, 0.05) is None


def test_without_labels_nothing_is_known() -> None:
    nothing = np.zeros(STRATA, np.int64)
    for found in (intervals.clopper_pearson(0, 0), intervals.stratified(nothing, nothing, SIZE_H)):
        assert math.isnan(found.estimate)
        assert (found.low, found.high) == (0, 1)
    assert intervals.labels_to_halve(nothing, nothing, SIZE_H) == 0


def test_equal_strata_give_the_exact_interval_of_a_simple_sample() -> None:
    size_H = np.full(STRATA, 10**9)
    found = intervals.stratified(np.full(STRATA, 7), np.full(STRATA, 10), size_H)
    exact = intervals.clopper_pearson(35, 50)
    assert found.estimate == pytest.approx(0.7)
    # The pull towards the overall rate counts two labels more per stratum than there are.
    assert found.width == pytest.approx(exact.width, rel=0.01)


def test_strata_that_differ_narrow_the_interval() -> None:
    drawn_H = np.full(STRATA, 20)
    apart = intervals.stratified(np.array([2, 10, 18, 20, 20]), drawn_H, SIZE_H)
    alike = intervals.stratified(np.full(STRATA, 14), drawn_H, SIZE_H)
    assert apart.estimate == pytest.approx(alike.estimate)
    assert apart.width < 0.8 * alike.width


def test_strata_weigh_by_their_size_and_empty_ones_join_their_neighbour() -> None:
    found = intervals.stratified(np.array([1, 9]), np.array([10, 10]), np.array([100, 300]))
    assert found.estimate == pytest.approx(0.25 * 0.1 + 0.75 * 0.9)
    joined = intervals.stratified(
        np.array([0, 1, 9, 0]), np.array([0, 10, 10, 0]), np.array([40, 60, 250, 50])
    )
    assert joined == found


def test_a_target_with_every_image_labelled_is_known() -> None:
    found = intervals.stratified(np.array([3, 5]), np.array([10, 6]), np.array([10, 6]))
    assert found == (0.5, 0.5, 0.5)


ACCURACIES = [
    (0.3, 0.5, 0.7, 0.9, 0.99),
    (0.5, 0.5, 0.5, 0.5, 0.5),
    (0.9, 1.0, 1.0, 1.0, 1.0),
    (0.99, 0.99, 0.99, 0.99, 0.99),
    (0.0, 0.02, 0.05, 0.1, 0.3),
]


@pytest.mark.parametrize("accuracy_H", ACCURACIES)
@pytest.mark.parametrize("labels", [5, 25, 100, 400])
def test_the_interval_covers_the_truth(accuracy_H: tuple[float, ...], labels: int) -> None:
    right_H = np.round(np.array(accuracy_H) * SIZE_H).astype(np.int64)
    truth, each = right_H.sum() / SIZE_H.sum(), labels // STRATA
    rng = np.random.default_rng(labels)
    draws = rng.hypergeometric(right_H, SIZE_H - right_H, each, size=(1000, STRATA))
    drawn_H = np.full(STRATA, each)
    found = [intervals.stratified(draw_H, drawn_H, SIZE_H) for draw_H in draws]
    assert np.mean([each.low <= truth <= each.high for each in found]) >= 0.94


@pytest.mark.parametrize("labels", [300, 400, 500])
def test_the_interval_covers_the_truth_if_most_images_have_labels(labels: int) -> None:
    """The interval is then hardly wider than the steps between two estimates."""
    size_H = np.full(STRATA, 120)
    right_H = np.array([41, 60, 72, 88, 102])
    rng = np.random.default_rng(0)
    draws = rng.hypergeometric(right_H, size_H - right_H, labels // STRATA, size=(4000, STRATA))
    drawn_H = np.full(STRATA, labels // STRATA)
    found = [intervals.stratified(draw_H, drawn_H, size_H) for draw_H in draws]
    truth = right_H.sum() / size_H.sum()
    assert np.mean([each.low <= truth <= each.high for each in found]) >= 0.948


def test_half_the_width_takes_about_four_times_the_labels() -> None:
    drawn_H, size_H = np.full(STRATA, 20), np.full(STRATA, 10**6)
    right_H = np.array([10, 12, 14, 16, 18])
    more = intervals.labels_to_halve(right_H, drawn_H, size_H)
    assert 250 < more < 330
    times = math.ceil((100 + more) / 100)
    now = intervals.stratified(right_H, drawn_H, size_H)
    then = intervals.stratified(right_H * times, drawn_H * times, size_H)
    assert then.width <= 0.5 * now.width


def test_a_small_target_needs_no_more_labels_than_it_has_images() -> None:
    more = intervals.labels_to_halve(np.array([6, 7]), np.array([8, 8]), np.array([12, 12]))
    assert 0 < more <= 8


def population(images: int, seed: int) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    rng = np.random.default_rng(seed)
    certainty_N = rng.random(images)
    return certainty_N, rng.random(images) < 0.6 * (1 - certainty_N) ** 2


@pytest.mark.parametrize(("labels", "risk"), [(100, 0.1), (200, 0.05), (200, 0.2)])
def test_the_threshold_seldom_exceeds_its_risk(labels: int, risk: float) -> None:
    all_N, wrong_N = population(4000, 0)
    rng = np.random.default_rng(1)
    exceeded = given = 0
    for _ in range(400):
        drawn = rng.choice(len(all_N), labels, replace=False)
        found = intervals.risk_threshold(all_N, all_N[drawn], wrong_N[drawn], risk)
        if found.threshold is not None:
            given += 1
            exceeded += wrong_N[all_N >= found.threshold].mean() > risk
            assert found.bound <= risk
            assert found.coverage == pytest.approx((all_N >= found.threshold).mean())
    assert exceeded <= 0.05 * 400
    assert given > 0


def test_without_errors_everything_is_accepted_once_the_labels_suffice() -> None:
    all_N = np.linspace(0, 1, 1000)
    for labels, expected in ((58, None), (59, 0.0)):
        drawn = np.linspace(0, 999, labels).astype(int)
        right = np.zeros(labels, np.bool_)
        found = intervals.risk_threshold(all_N, all_N[drawn], right, 0.05)
        assert found.threshold == expected
        assert found.coverage == (0 if expected is None else 1)
        assert found.needed is not None


@pytest.mark.parametrize("labels", [1, 5, 20])
def test_a_few_right_labels_promise_no_less_than_a_proof_takes(labels: int) -> None:
    all_N, right = np.linspace(0, 1, 1000), np.zeros(labels, np.bool_)
    found = intervals.risk_threshold(all_N, all_N[-labels:], right, 0.05)
    assert found.threshold is None
    assert found.needed is not None
    assert 59 <= found.needed <= 400


def test_labels_that_are_mostly_wrong_promise_nothing() -> None:
    all_N = np.linspace(0, 1, 100)
    found = intervals.risk_threshold(all_N, all_N, np.ones(100, np.bool_), 0.1)
    assert (found.threshold, found.needed) == (None, None)
    none = intervals.risk_threshold(all_N, np.empty(0), np.empty(0, np.bool_), 0.1)
    assert (none.threshold, none.labels, none.bound, none.needed) == (None, 0, 1, 29)


def test_bounds_of_a_small_target_are_shares_that_it_can_have() -> None:
    found = intervals.stratified(np.array([2, 3]), np.array([3, 3]), np.array([4, 4]))
    assert found.low * 8 == pytest.approx(round(found.low * 8))
    assert found.high * 8 == pytest.approx(round(found.high * 8))
    assert found.low <= 5 / 8 <= 7 / 8 <= found.high
    new = intervals.stratified(np.array([2, 3]), np.array([3, 3]), np.array([4, 4]), False)
    assert new.low < found.low
    assert new.high >= found.high


@pytest.mark.parametrize("images", [8, 13, 21, 34])
@pytest.mark.parametrize("share", [0.3, 0.7, 0.9, 0.97])
def test_the_interval_covers_the_truth_of_a_small_target(images: int, share: float) -> None:
    size_H = np.full(STRATA, images // STRATA) + (np.arange(STRATA) < images % STRATA)
    rng = np.random.default_rng(images)
    right = rng.permutation(images) < round(share * images)
    stratum = np.repeat(np.arange(STRATA), size_H)
    right_H = np.bincount(stratum[right], minlength=STRATA)
    for each in range(1, size_H.min() + 1):
        draws = rng.hypergeometric(right_H, size_H - right_H, each, size=(1000, STRATA))
        found = [intervals.stratified(draw, np.full(STRATA, each), size_H) for draw in draws]
        truth = right.mean()
        assert np.mean([i.low - 1e-9 <= truth <= i.high + 1e-9 for i in found]) >= 0.94
