"""CORAL: correlation alignment (Sun, Feng and Saenko, "Return of Frustratingly Easy Domain Adaptation", AAAI 2016).

Implemented: on fixed features (of pretrained weights, or else those that pretraining has made), standardised in each domain,
the source is whitened and recoloured with the target's covariance (both with the identity added), and a multinomial logistic
regression is fitted on it.
Differences: a logistic regression where the paper has a linear SVM, as predictions need probabilities.
"""

from dataclasses import dataclass

from torch import Tensor

from certvol.alignment import coral, logistic_regression
from certvol.bounds import bounded
from certvol.closed_form import ClosedFormMethod


class Method(ClosedFormMethod):
    summary = "CORAL on fixed features: the source gets the target's covariance; logistic regression"
    arrays = ("weight_CD", "bias_C")
    weight_CD: Tensor
    bias_C: Tensor

    @dataclass(frozen=True, kw_only=True)
    class Config:
        ridge: float = bounded(1.0, above=0)  # times the identity, added to both covariances
        strength: float = bounded(1.0, above=0)  # of the data against the penalty of the logistic regression

    def fit_features(self, source_SD: Tensor, labels_S: Tensor, target_TD: Tensor) -> None:
        source, target = self.keep_standardised(source_SD, target_TD)
        aligned_SD = coral(source, target, self.config.ridge)
        weight_CD, bias_C = logistic_regression(
            aligned_SD, labels_S.numpy(), self.network.num_classes, self.config.strength
        )
        self.keep(weight_CD=weight_CD, bias_C=bias_C)

    def fitted_logits(self, rows_ND: Tensor) -> Tensor:
        return rows_ND @ self.weight_CD.T + self.bias_C
