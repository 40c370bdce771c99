"""Estimate a run's target accuracy from its evidence, with every published estimator that applies.

Some estimators judge the pretrained model and some the delivered one. Both kinds are kept, because
training on its own labels makes the delivered model overconfident, so that estimates from the
pretrained model are often closer.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import entr

from certvol.predict.evidence import Evidence
from certvol.scores.calibration import (
    at_temperature,
    fitted_temperature,
    matching_temperature,
)
from certvol.scores.estimators import (
    average_confidence,
    difference_of_confidences,
    information_share,
    thresholded_confidence,
)
from certvol.scores.validators import MIN_HELD_OUT, agreement

Values = NDArray[np.floating[Any]]
EstimatesByName = dict[str, float | None]
SHOWN = ("doc before", "second opinion", "agreement", "nearest means")


class Calibrated:
    """One model's outputs, calibrated on the held-out source images if there are enough.

    The temperature is 1 or more. A model is rarely underconfident on a target. If all of a few
    source images are right, the likelihood would push the temperature towards 0.
    """

    def __init__(self, source_SC: Values, labels_S: NDArray[np.int64], target_NC: Values) -> None:
        self.judged = len(source_SC) >= MIN_HELD_OUT
        fitted = fitted_temperature(source_SC, labels_S) if self.judged else None
        self.temperature = None if fitted is None else max(1.0, fitted)
        scale = self.temperature or 1.0
        self.target_NC = at_temperature(target_NC, scale)
        self.source_SC = at_temperature(source_SC, scale) if self.judged else source_SC
        if self.judged:
            self.right_S = self.source_SC.argmax(axis=1) == labels_S

    def confidence(self) -> float:
        return average_confidence(self.target_NC.max(axis=1))

    def difference(self) -> float | None:
        if not self.judged:
            return None
        confidence_S, confidence_N = self.source_SC.max(axis=1), self.target_NC.max(axis=1)
        return difference_of_confidences(confidence_S, self.right_S, confidence_N)

    def threshold(self) -> float | None:
        if not self.judged:
            return None
        certainty_S, certainty_N = (-entr(p).sum(axis=1) for p in (self.source_SC, self.target_NC))
        return thresholded_confidence(certainty_S, self.right_S, certainty_N)

    def information(self) -> float | None:
        share = information_share(self.target_NC)
        return None if np.isnan(share) else share


def estimates(evidence: Evidence) -> EstimatesByName:
    """Return every estimate by name; None for one that needs held-out images the run lacks."""
    before = Calibrated(evidence.before_SC, evidence.labels_S, evidence.before_NC)
    after = Calibrated(evidence.after_SC, evidence.labels_S, evidence.after_NC)
    predicted_N = evidence.after_NC.argmax(axis=1)
    found: EstimatesByName = {}
    for name, model in (("before", before), ("after", after)):
        found[f"confidence {name}"] = model.confidence()
        found[f"doc {name}"] = model.difference()
        found[f"atc {name}"] = model.threshold()
        found[f"information {name}"] = model.information()
    found["agreement"] = agreement(evidence.before_NC, evidence.after_NC)
    rows = np.arange(len(predicted_N))
    found["second opinion"] = float(before.target_NC[rows, predicted_N].mean())
    found["dropout"] = _dropout(evidence, after)
    found["nearest means"] = (
        float((evidence.nearest_N == predicted_N).mean()) if len(evidence.nearest_N) else None
    )
    return found


def _dropout(evidence: Evidence, after: Calibrated) -> float | None:
    if not after.judged or len(evidence.dropout_S) == 0:
        return float(evidence.dropout_N.mean()) if len(evidence.dropout_N) else None
    return difference_of_confidences(evidence.dropout_S, after.right_S, evidence.dropout_N)


def target_accuracy(found: Mapping[str, float | None]) -> float:
    """Return the estimate to show: the mean of those that were closest in our measurements."""
    chosen = [value for name in SHOWN if (value := found[name]) is not None]
    return float(np.mean(chosen))


def with_labels(estimate: float, usual_error: float, right: int, labels: int) -> float:
    """Join an estimate without labels with the share that is right among random labels.

    The estimate weighs as much as n labels, where n random labels would have the same typical
    error.
    """
    spread = usual_error * np.sqrt(np.pi / 2)  # of normal errors with this mean
    worth = max(1.0, estimate * (1 - estimate) / spread**2)
    return float((right + worth * estimate) / (labels + worth))


def temperatures(evidence: Evidence, accuracy: float) -> tuple[float, float]:
    """Return the temperatures of the pretrained and of the delivered model.

    The pretrained one is calibrated on held-out source images. The delivered one gets the
    temperature at which its mean confidence on the target equals the estimated accuracy.
    """
    before = Calibrated(evidence.before_SC, evidence.labels_S, evidence.before_NC).temperature
    return before or 1.0, matching_temperature(evidence.after_NC, accuracy)
