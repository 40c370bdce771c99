import numpy as np
import pytest
from sklearn.metrics import accuracy_score, balanced_accuracy_score

from certvol import metrics


def test_against_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    true, predicted = rng.integers(0, 5, 200), rng.integers(0, 5, 200)
    assert metrics.accuracy(predicted, true) == pytest.approx(accuracy_score(true, predicted))
    assert metrics.mean_class_accuracy(predicted, true, 5) == pytest.approx(balanced_accuracy_score(true, predicted))


def test_by_hand() -> None:
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
