"""Estimators of target accuracy agree with closed forms and with slow, obvious versions."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from certvol.scores.estimators import (
    average_confidence,
    difference_of_confidences,
    information_share,
    nearest_means,
    thresholded_confidence,
)


def made(seed: int, rows: int, classes: int = 4) -> NDArray[np.float64]:
    return np.random.default_rng(seed).dirichlet(np.full(classes, 0.4), rows)


def test_average_confidence_by_hand() -> None:
    assert average_confidence(np.array([0.5, 0.75, 1.0], np.float32)) == pytest.approx(0.75)


def test_difference_of_confidences_by_hand() -> None:
    right_S = np.array([True, True, True, False])
    source_S, target_N = np.array([0.9, 0.9, 0.8, 0.6]), np.array([0.7, 0.5])
    # 0.75 right on the source; the mean confidence falls from 0.8 to 0.6.
    found = difference_of_confidences(source_S, right_S, target_N)
    assert found == pytest.approx(0.55)


@pytest.mark.parametrize(("shift", "bound"), [(-1.0, 0.0), (1.0, 1.0)])
def test_a_difference_beyond_the_bounds_is_cut(shift: float, bound: float) -> None:
    source_S, right_S = np.full(4, 0.5), np.array([True, False, True, False])
    assert difference_of_confidences(source_S, right_S, source_S + shift) == bound


def naive_threshold(certainty_S: list[float], wrong: int, certainty_N: list[float]) -> float:
    """Try every source certainty as the threshold; take the one with `wrong` images below."""
    for threshold in certainty_S:
        if sum(value < threshold for value in certainty_S) == wrong:
            return sum(value >= threshold for value in certainty_N) / len(certainty_N)
    raise AssertionError("no source image has that many below it")


@pytest.mark.parametrize("seed", range(8))
def test_the_threshold_leaves_as_many_source_images_below_as_are_wrong(seed: int) -> None:
    rng = np.random.default_rng(seed)
    source_S, target_N = rng.permutation(40) / 40, rng.random(60)
    right_S = rng.random(40) < 0.3 + 0.6 * source_S
    wrong = int((~right_S).sum())
    assert thresholded_confidence(source_S, right_S, target_N) == pytest.approx(
        naive_threshold(list(source_S), wrong, list(target_N))
    )


def test_the_threshold_on_the_source_itself_gives_its_accuracy() -> None:
    values_S, right_S = np.arange(10.0), np.arange(10) % 3 > 0
    assert thresholded_confidence(values_S, right_S, values_S) == pytest.approx(right_S.mean())


def test_a_model_that_is_always_wrong_is_estimated_to_be_so() -> None:
    values = np.arange(5.0)
    assert thresholded_confidence(values, np.zeros(5, bool), values) == 0


def test_information_share_is_mutual_information_over_entropy() -> None:
    p_NC = made(0, 30)
    mean_C = [sum(row[c] for row in p_NC) / 30 for c in range(4)]
    whole = -sum(p * math.log(p) for p in mean_C)
    own = [-sum(p * math.log(p) for p in row) for row in p_NC]
    assert information_share(p_NC) == pytest.approx((whole - sum(own) / 30) / whole)


def test_information_share_at_its_ends() -> None:
    assert information_share(np.eye(3)) == pytest.approx(1)
    assert information_share(np.full((5, 3), 1 / 3)) == pytest.approx(0)
    assert math.isnan(information_share(np.array([[1.0, 0.0], [1.0, 0.0]])))


def test_nearest_means_agree_with_a_loop() -> None:
    rng = np.random.default_rng(1)
    source_SD, target_ND = rng.normal(size=(25, 6)), 3 + 2 * rng.normal(size=(15, 6))
    labels_S = rng.choice([0, 2, 5], 25)

    def unit(rows: NDArray[np.float64]) -> NDArray[np.float64]:
        centred = [row - rows.mean(axis=0) for row in rows]
        return np.array([row / math.sqrt(sum(row**2)) for row in centred])

    source, target = unit(source_SD), unit(target_ND)
    means = {
        c: sum(r for r, own in zip(source, labels_S, strict=True) if own == c) for c in (0, 2, 5)
    }
    counts = {c: int((labels_S == c).sum()) for c in means}
    expected = [
        min(means, key=lambda c: float(((row - means[c] / counts[c]) ** 2).sum())) for row in target
    ]
    assert nearest_means(source_SD, labels_S, target_ND).tolist() == expected


def test_nearest_means_ignore_shift_and_scale() -> None:
    rng = np.random.default_rng(2)
    source_SD, labels_S = rng.normal(size=(20, 4)), np.arange(20) % 3
    target_ND = rng.normal(size=(10, 4))
    moved = nearest_means(source_SD, labels_S, 7 * target_ND - 100)
    assert moved.tolist() == nearest_means(source_SD, labels_S, target_ND).tolist()
