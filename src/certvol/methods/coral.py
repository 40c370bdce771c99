"""CORAL: correlation alignment (Sun, Feng and Saenko, "Return of Frustratingly Easy Domain
Adaptation", AAAI 2016).

Implemented: on fixed features (of the pretrained weights or, without these, of the run's own
pretraining), standardised in each domain, the source is whitened and recoloured with the target's
covariance (both with the identity added), and a multinomial logistic regression is fitted on it.
Deliberate differences: a logistic regression instead of the paper's linear SVM, since predictions
need probabilities.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from certvol.methods._closed_form import (
    SMALLEST_SCALE,
    Array,
    Fitted,
    LinearMethod,
    Problem,
    logistic_regression,
)
from certvol.settings import setting


def symmetric_power(matrix_DD: Array, power: float) -> Array:
    """Raise a positive definite matrix to a power."""
    values_D, vectors_DD = np.linalg.eigh(matrix_DD)
    return np.asarray((vectors_DD * np.maximum(values_D, SMALLEST_SCALE) ** power) @ vectors_DD.T)


def covariance(features_ND: Array, ridge: float) -> Array:
    """Return the covariance with n - 1, plus `ridge` times the identity."""
    centred_ND = features_ND - features_ND.mean(axis=0)
    covariance_DD = centred_ND.T @ centred_ND / max(1, len(features_ND) - 1)
    return np.asarray(covariance_DD + ridge * np.eye(features_ND.shape[1]))


def coral(source_SD: Array, target_TD: Array, ridge: float = 1.0) -> Array:
    """Whiten the source and recolour it with the target's covariance: Xs Cs^-1/2 Ct^1/2.

    C is the covariance + ridge I.
    """
    whiten_DD = symmetric_power(covariance(source_SD, ridge), -0.5)
    recolour_DD = symmetric_power(covariance(target_TD, ridge), 0.5)
    return np.asarray(source_SD @ (whiten_DD @ recolour_DD))


class Method(LinearMethod):
    summary = "CORAL on fixed features: match the target's covariance, then logistic regression"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        ridge: float = setting(
            1.0, at_least=1e-12, help="Multiple of the identity added to covariances."
        )
        strength: float = setting(1.0, above=0, help="Inverse regularisation of the regression.")

    @staticmethod
    def fit(problem: Problem, config: Any, draws: np.random.Generator) -> Fitted:
        source_SD, labels_S, target_TD, classes = problem
        if len(target_TD):
            source_SD = coral(source_SD, target_TD, config.ridge)
        weight_CD, bias_C = logistic_regression(source_SD, labels_S, classes, config.strength)
        return {"weight_CD": weight_CD, "bias_C": bias_C}
