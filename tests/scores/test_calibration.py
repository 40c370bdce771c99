"""Temperatures: closed forms, a grid search, and what no temperature may change."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from certvol.scores.calibration import (
    COLDEST,
    HOTTEST,
    at_temperature,
    fitted_temperature,
    matching_temperature,
)


def made(seed: int = 0, rows: int = 400, classes: int = 5) -> NDArray[np.float64]:
    return np.random.default_rng(seed).dirichlet(np.full(classes, 0.5), rows)


def test_temperature_by_hand() -> None:
    p = np.array([[0.8, 0.2]])
    assert at_temperature(p, 1.0).tolist() == [pytest.approx([0.8, 0.2])]
    # A temperature of 2 takes square roots, and 1/2 squares.
    hot = math.sqrt(0.8) / (math.sqrt(0.8) + math.sqrt(0.2))
    assert at_temperature(p, 2.0)[0, 0] == pytest.approx(hot)
    assert at_temperature(p, 0.5)[0, 0] == pytest.approx(0.64 / 0.68)


def test_certain_predictions_stay_finite() -> None:
    for temperature in (COLDEST, 1.0, HOTTEST):
        found = at_temperature(np.array([[1.0, 0.0, 0.0]], np.float32), temperature)
        assert np.isfinite(found).all()
        assert found.sum() == pytest.approx(1)
        assert found.argmax() == 0


@pytest.mark.parametrize("true_temperature", [0.4, 1.0, 3.0])
def test_the_fit_finds_the_temperature_that_drew_the_labels(true_temperature: float) -> None:
    p_NC = made(rows=20_000)
    rng = np.random.default_rng(1)
    drawn_N1 = rng.random((len(p_NC), 1))
    cumulative_NC = at_temperature(p_NC, true_temperature).cumsum(axis=1)
    labels_N = (drawn_N1 > cumulative_NC[:, :-1]).sum(axis=1)
    assert fitted_temperature(p_NC, labels_N) == pytest.approx(true_temperature, rel=0.05)


def test_the_fit_agrees_with_a_grid() -> None:
    p_NC, labels_N = made(2), np.random.default_rng(3).integers(0, 5, 400)

    def loss(temperature: float) -> float:
        scaled = at_temperature(p_NC, temperature)
        return -sum(math.log(scaled[i, label]) for i, label in enumerate(labels_N))

    grid = np.exp(np.linspace(math.log(COLDEST), math.log(HOTTEST), 400))
    best = min(grid, key=loss)
    assert loss(fitted_temperature(p_NC, labels_N)) <= loss(best) + 1e-6


@pytest.mark.parametrize("accuracy", [0.3, 0.6, 0.95])
def test_the_matched_mean_confidence_is_the_accuracy(accuracy: float) -> None:
    p_NC = made(4)
    temperature = matching_temperature(p_NC, accuracy)
    assert at_temperature(p_NC, temperature).max(axis=1).mean() == pytest.approx(accuracy, abs=1e-5)


def test_what_no_temperature_reaches_gets_an_end() -> None:
    p_NC = made(5)
    assert matching_temperature(p_NC, 1.0) == COLDEST
    assert matching_temperature(p_NC, 0.0) == HOTTEST
    assert matching_temperature(np.full((3, 4), 0.25), 0.9) == COLDEST
