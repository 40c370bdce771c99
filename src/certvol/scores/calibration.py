"""Calibrate probabilities by a temperature. N images, C classes.

A temperature T turns probabilities p into softmax(log p / T). Above 1 it makes the model less sure;
no prediction changes.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, minimize_scalar
from scipy.special import log_softmax, softmax

Probabilities = NDArray[np.floating]
Labels = NDArray[np.int64]

COLDEST, HOTTEST = 0.05, 100.0


def at_temperature(probabilities_NC: Probabilities, temperature: float) -> NDArray[np.float64]:
    return np.asarray(softmax(logits_of(probabilities_NC) / temperature, axis=1))


def fitted_temperature(probabilities_NC: Probabilities, labels_N: Labels) -> float:
    """Return the temperature that maximises the likelihood of these labels (Guo et al. 2017)."""
    logits_NC, rows = logits_of(probabilities_NC), np.arange(len(labels_N))

    def loss(log_temperature: float) -> float:
        scaled_NC = logits_NC / np.exp(log_temperature)
        return -float(log_softmax(scaled_NC, axis=1)[rows, labels_N].mean())

    bounds = (np.log(COLDEST), np.log(HOTTEST))
    return float(np.exp(minimize_scalar(loss, bounds=bounds, method="bounded").x))


def matching_temperature(probabilities_NC: Probabilities, accuracy: float) -> float:
    """Return the temperature at which the mean of the largest probabilities is `accuracy`.

    The mean falls as the temperature rises. If no allowed temperature reaches the accuracy, return
    the lowest or the highest.
    """
    logits_NC = logits_of(probabilities_NC)

    def excess(log_temperature: float) -> float:
        scaled_NC = logits_NC / np.exp(log_temperature)
        return float(softmax(scaled_NC, axis=1).max(axis=1).mean()) - accuracy

    low, high = float(np.log(COLDEST)), float(np.log(HOTTEST))
    if excess(low) <= 0:
        return COLDEST
    if excess(high) >= 0:
        return HOTTEST
    return float(np.exp(brentq(excess, low, high, xtol=1e-6)))


def logits_of(probabilities_NC: Probabilities) -> NDArray[np.float64]:
    """Return logits of these probabilities; a 0 is replaced by the smallest normal float32."""
    p = np.asarray(probabilities_NC, dtype=np.float64)
    return np.asarray(np.log(np.maximum(p, np.finfo(np.float32).tiny)))
