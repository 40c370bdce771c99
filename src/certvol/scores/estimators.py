"""Estimate the accuracy on a target without its labels, from outputs of models.

S held-out source images, whose labels are known, N target images, C classes. Accuracies are shares.
Each estimate rests on an assumption that a strong shift breaks. `docs/results/verdict.md` compares
them with known accuracies.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.special import entr

Values = NDArray[np.floating]
Flags = NDArray[np.bool_]
Labels = NDArray[np.int64]


def average_confidence(confidence_N: Values) -> float:
    """Return the mean of the largest probabilities; right if these are calibrated on the target."""
    return float(np.mean(confidence_N, dtype=np.float64))


def difference_of_confidences(confidence_S: Values, right_S: Flags, confidence_N: Values) -> float:
    """DoC (Guillory et al. 2021): source accuracy minus the drop in confidence on the target."""
    fall = np.mean(confidence_S, dtype=np.float64) - np.mean(confidence_N, dtype=np.float64)
    return float(np.clip(np.mean(right_S) - fall, 0, 1))


def thresholded_confidence(certainty_S: Values, right_S: Flags, certainty_N: Values) -> float:
    """ATC (Garg et al. 2022): the share of target images at or above a threshold on certainty.

    As many source images lie below the threshold as are wrong. Certainty is any measure where
    higher is more certain; the paper prefers the negative entropy.
    """
    wrong = int(np.sum(~right_S))
    if wrong == len(right_S):
        return 0.0
    threshold = np.sort(certainty_S)[wrong]
    # Without a wrong source image, the threshold is the lowest certainty of these images.
    return float(np.mean(certainty_N >= threshold))


def information_share(probabilities_NC: Values) -> float:
    """Return the mutual information of image and class as a share of its maximum.

    This is 1 - mean of H(p) / H(mean of p). It is near 1 if predictions are confident, given the
    classes in use, and NaN if all images have the same class with certainty.
    """
    p = np.asarray(probabilities_NC, dtype=np.float64)
    whole = float(entr(p.mean(axis=0)).sum())
    return float("nan") if whole == 0 else 1 - float(entr(p).sum(axis=1).mean()) / whole


def nearest_means(features_SD: Values, labels_S: Labels, features_ND: Values) -> Labels:
    """Classify each target image by the nearest mean of the held-out source images' features.

    Features are centred per domain, which takes out a shift of the mean, and then scaled to length
    1. The classifier has seen none of the images that the model was trained on.
    """
    source_SD, target_ND = _unit(features_SD), _unit(features_ND)
    classes = np.unique(labels_S)
    means_KD = np.stack([source_SD[labels_S == label].mean(axis=0) for label in classes])
    squared_K = (means_KD**2).sum(axis=1)
    nearest_N = (squared_K - 2 * target_ND @ means_KD.T).argmin(axis=1)
    return np.asarray(classes[nearest_N], dtype=np.int64)


def _unit(features_ND: Values) -> NDArray[np.float64]:
    features = np.asarray(features_ND, dtype=np.float64)
    centred = features - features.mean(axis=0)
    length_N1 = np.linalg.norm(centred, axis=1, keepdims=True)
    return np.asarray(centred / np.maximum(length_N1, np.finfo(np.float64).tiny))
