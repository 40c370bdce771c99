"""Metrics against SciPy, scikit-learn, plain loops and worked examples."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.calibration import calibration_curve
from sklearn.metrics import accuracy_score, balanced_accuracy_score, roc_curve

import score_references as references
from certvol.scores import metrics

RNG = np.random.default_rng(0)
CONTINUOUS = RNG.normal(size=300)
TIED = RNG.integers(0, 6, 300).astype(np.float64)
FLAGS = RNG.random(300) < 0.3


def values(kind: str, seed: int = 1) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=200)
    y = x + rng.normal(size=200)
    return (x, y) if kind == "continuous" else (np.round(x), np.round(y))


@pytest.mark.parametrize("kind", ["continuous", "tied"])
def test_correlations_equal_the_plain_loop(kind: str) -> None:
    x, y = values(kind)
    assert metrics.pearson(x, y) == pytest.approx(
        references.pearson(x.tolist(), y.tolist()), abs=1e-12
    )
    ranks = references.ranks(x.tolist()), references.ranks(y.tolist())
    assert metrics.spearman(x, y) == pytest.approx(references.pearson(*ranks), abs=1e-12)


def test_correlations_by_hand() -> None:
    x = np.array([1.0, 2, 3, 4])
    assert metrics.pearson(x, 5 - 2 * x) == pytest.approx(-1)
    assert metrics.spearman(x, np.exp(x)) == pytest.approx(1)
    assert metrics.pearson(x, np.exp(x)) < 0.95
    assert metrics.spearman(np.array([1.0, 1, 2]), np.array([1.0, 2, 3])) == pytest.approx(
        math.sqrt(3) / 2
    )


def test_correlations_of_extreme_values() -> None:
    x = np.array([1.0, 2, 4])
    for scale in (1e300, 1e-300):
        assert metrics.pearson(x * scale, x) == pytest.approx(1)
    shifted = np.float32(1e4) + np.arange(100, dtype=np.float32)
    assert metrics.pearson(shifted, shifted) == pytest.approx(1)


@pytest.mark.parametrize("x", [np.full(5, 0.1), np.array([3.0]), np.array([])])
def test_correlation_with_a_constant_is_nan(x: NDArray[np.float64]) -> None:
    y = np.arange(float(len(x)))
    assert math.isnan(metrics.pearson(x, y))
    assert math.isnan(metrics.spearman(x, y))


@pytest.mark.parametrize(
    "scores", [CONTINUOUS, TIED, np.zeros(300)], ids=["continuous", "tied", "constant"]
)
def test_auroc_equals_the_plain_loop_over_pairs(scores: NDArray[np.float64]) -> None:
    assert metrics.auroc(scores, FLAGS) == pytest.approx(
        references.auroc(scores.tolist(), FLAGS.tolist()), abs=1e-12
    )
    assert metrics.auroc(-scores, FLAGS) == pytest.approx(1 - metrics.auroc(scores, FLAGS))


@pytest.mark.parametrize("tpr", [0.5, 0.95, 1.0])
@pytest.mark.parametrize(
    "scores", [CONTINUOUS, TIED, np.zeros(300)], ids=["continuous", "tied", "constant"]
)
def test_fpr_equals_scikit_learns_curve(scores: NDArray[np.float64], tpr: float) -> None:
    false_rate, true_rate, _ = roc_curve(FLAGS, scores, drop_intermediate=False)
    expected = false_rate[true_rate >= tpr - 1e-12].min()
    assert metrics.fpr_at_tpr(scores, FLAGS, tpr) == pytest.approx(expected, abs=1e-12)


def test_fpr_by_hand() -> None:
    known, unknown = np.arange(20.0), np.array([0.5, 1.0, 3.5, -2.0])
    scores, positive = np.concatenate([known, unknown]), np.arange(24) < 20
    # 19 of 20 are 95 %: the threshold is 1, which two of the four unknown ones meet.
    assert metrics.fpr_at_tpr(scores, positive) == 0.5


@pytest.mark.parametrize("positive", [np.ones(4, bool), np.zeros(4, bool), np.zeros(0, bool)])
def test_auroc_and_fpr_of_one_kind_alone_are_nan(positive: NDArray[np.bool_]) -> None:
    scores = np.arange(float(len(positive)))
    assert math.isnan(metrics.auroc(scores, positive))
    assert math.isnan(metrics.fpr_at_tpr(scores, positive))


def test_risk_coverage_by_hand() -> None:
    certainty, wrong = np.array([0.9, 0.2, 0.5, 0.7]), np.array([False, True, True, False])
    coverage, risk = metrics.risk_coverage(certainty, wrong)
    assert coverage.tolist() == [0.25, 0.5, 0.75, 1]
    assert risk.tolist() == pytest.approx([0, 0, 1 / 3, 1 / 2])
    assert metrics.aurc(certainty, wrong) == pytest.approx(5 / 24)
    for share, accuracy in ((0.5, 1), (0.51, 2 / 3), (0.8, 0.5), (1.0, 0.5), (0.01, 1)):
        assert metrics.accuracy_at_coverage(certainty, wrong, share) == pytest.approx(accuracy), (
            share
        )


@pytest.mark.parametrize("seed", range(5))
def test_risk_of_ties_is_the_mean_over_all_their_orders(seed: int) -> None:
    rng = np.random.default_rng(seed)
    certainty, wrong = rng.integers(0, 3, 6).astype(float), rng.random(6) < 0.5
    expected = references.risk_coverage_over_all_orders(certainty.tolist(), wrong.tolist())
    assert metrics.risk_coverage(certainty, wrong)[1].tolist() == pytest.approx(expected)


def test_risk_does_not_depend_on_the_order_of_the_images() -> None:
    order = np.random.default_rng(2).permutation(300)
    assert metrics.aurc(TIED, FLAGS) == pytest.approx(metrics.aurc(TIED[order], FLAGS[order]))


def test_all_right_all_wrong_and_chance() -> None:
    none, every = np.zeros(300, bool), np.ones(300, bool)
    assert metrics.aurc(CONTINUOUS, none) == 0
    assert metrics.aurc(CONTINUOUS, every) == 1
    assert metrics.accuracy_at_coverage(CONTINUOUS, none, 0.9) == 1
    assert metrics.accuracy_at_coverage(CONTINUOUS, every, 0.9) == 0
    assert metrics.aurc(np.zeros(300), FLAGS) == pytest.approx(FLAGS.mean())
    assert math.isnan(metrics.aurc(np.empty(0), np.empty(0, bool)))
    assert math.isnan(metrics.accuracy_at_coverage(np.empty(0), np.empty(0, bool), 0.9))


def test_reliability_equals_scikit_learn_and_the_plain_loop() -> None:
    rng = np.random.default_rng(3)
    confidence = rng.random(500)
    confidence[:6] = [0, 1, 0.1, 0.2, 0.5, 0.7]  # on the edges
    right = rng.random(500) < confidence**2
    bins = metrics.reliability(confidence, right, 10)
    accuracy, mean = calibration_curve(right, confidence, n_bins=10)
    assert [each.accuracy for each in bins if each.images] == pytest.approx(accuracy.tolist())
    assert [each.confidence for each in bins if each.images] == pytest.approx(mean.tolist())
    assert sum(each.images for each in bins) == 500
    expected = references.calibration_error(confidence.tolist(), right.tolist(), 10)
    assert metrics.calibration_error(bins) == pytest.approx(expected)


def test_calibration_by_hand() -> None:
    bins = metrics.reliability(
        np.array([0.9, 0.9, 0.55, 0.55]), np.array([True, True, True, False]), 2
    )
    assert [(each.lower, each.upper, each.images) for each in bins] == [(0, 0.5, 0), (0.5, 1, 4)]
    assert math.isnan(bins[0].accuracy)
    assert metrics.calibration_error(bins) == pytest.approx(0.75 - 0.725)
    sure = np.ones(3)
    assert metrics.calibration_error(metrics.reliability(sure, np.ones(3, bool))) == 0
    assert metrics.calibration_error(metrics.reliability(sure, np.zeros(3, bool))) == 1
    assert math.isnan(
        metrics.calibration_error(metrics.reliability(np.empty(0), np.empty(0, bool)))
    )


def test_confusion_matrix_by_hand() -> None:
    assert metrics.confusion_matrix(np.array([1]), np.array([0]), 2).tolist() == [[0, 1], [0, 0]]


@pytest.mark.parametrize(
    ("coverage", "threshold"), [(0.1, 9), (0.9, 1), (0.95, 0), (1.0, 0), (0.3, 7)]
)
def test_threshold_by_hand(coverage: float, threshold: float) -> None:
    assert metrics.threshold_at(np.arange(10.0), coverage) == threshold


@pytest.mark.parametrize("certainty", [CONTINUOUS, TIED])
@pytest.mark.parametrize("coverage", [0.05, 0.8, 0.95, 1.0])
def test_a_threshold_accepts_at_least_its_coverage_and_no_higher_one_does(
    certainty: NDArray[np.float64], coverage: float
) -> None:
    threshold = metrics.threshold_at(certainty, coverage)
    assert (certainty >= threshold).mean() >= coverage - 1e-9
    assert (certainty > threshold).mean() < coverage


def test_accuracies_equal_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    true, predicted = rng.integers(0, 5, 200), rng.integers(0, 5, 200)
    assert metrics.accuracy(predicted, true) == pytest.approx(accuracy_score(true, predicted))
    assert metrics.mean_class_accuracy(predicted, true, 5) == pytest.approx(
        balanced_accuracy_score(true, predicted)
    )


def test_accuracies_by_hand() -> None:
    true, predicted = np.array([0, 0, 0, 1]), np.array([0, 0, 1, 1])
    assert metrics.accuracy(predicted, true) == 0.75
    assert metrics.per_class_accuracy(predicted, true, 2).tolist() == pytest.approx([2 / 3, 1])
    assert metrics.mean_class_accuracy(predicted, true, 2) == pytest.approx(5 / 6)


def test_a_class_without_images_does_not_count() -> None:
    true, predicted = np.array([0, 2]), np.array([0, 1])
    per_class = metrics.per_class_accuracy(predicted, true, 4)
    assert per_class[[0, 2]].tolist() == [1, 0]
    assert np.isnan(per_class[[1, 3]]).all()
    assert metrics.mean_class_accuracy(predicted, true, 4) == 0.5


def test_the_spread_of_the_auroc_is_that_of_repeated_samples() -> None:
    """Hanley and McNeil's formula is exact for exponential scores."""
    rng = np.random.default_rng(0)
    positive = np.arange(70) < 40
    found = [
        metrics.auroc(rng.exponential(np.where(positive, 3.0, 1.0)), positive) for _ in range(2000)
    ]
    assert metrics.auroc_spread(0.75, 40, 30) == pytest.approx(np.std(found), rel=0.05)
    assert metrics.auroc_spread(0.75, 40, 0) == math.inf
    assert metrics.auroc_spread(1.0, 40, 30) == 0.0
