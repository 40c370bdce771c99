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

from certvol.methods._alignment import Problem, coral, logistic_regression
from certvol.methods._closed_form import Fitted, LinearMethod
from certvol.settings import setting


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
