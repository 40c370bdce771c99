"""Figures that need labels, from arrays. N images, C classes."""

import numpy as np
from numpy.typing import NDArray


def accuracy(predicted_N: NDArray[np.int64], true_N: NDArray[np.int64]) -> float:
    """Share of images that are right."""
    return float((predicted_N == true_N).mean())


def per_class_accuracy(
    predicted_N: NDArray[np.int64], true_N: NDArray[np.int64], num_classes: int
) -> NDArray[np.float64]:
    """Accuracy over the images of each true class; NaN for a class without images."""
    count_C = np.bincount(true_N, minlength=num_classes)
    right_C = np.bincount(true_N[predicted_N == true_N], minlength=num_classes)
    return np.where(count_C > 0, right_C / np.maximum(count_C, 1), np.nan)


def mean_class_accuracy(predicted_N: NDArray[np.int64], true_N: NDArray[np.int64], num_classes: int) -> float:
    """Mean over the classes that have images."""
    return float(np.nanmean(per_class_accuracy(predicted_N, true_N, num_classes)))
