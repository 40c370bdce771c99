"""Collect the evidence by which a finished run is judged without labels; estimate its accuracy.

The verdict and the temperature use nothing but an `Evidence`. S held-out source images, N target
images (at most `outcome.FEATURE_IMAGES` of them, so that labelled and unlabelled runs agree).

`estimates` computes every published estimator that applies. Some judge the pretrained model and
some the delivered one. Both kinds are kept, because training on its own labels makes the delivered
model overconfident, so that estimates from the pretrained model are often closer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from scipy.special import entr

from certvol.data import Indices
from certvol.predict.forward import Outputs, Values
from certvol.scores.calibration import at_temperature, fitted_temperature, matching_temperature
from certvol.scores.estimators import (
    average_confidence,
    difference_of_confidences,
    information_share,
    nearest_means,
    thresholded_confidence,
)
from certvol.scores.validators import MIN_HELD_OUT, agreement

EstimatesByName = dict[str, float | None]
NO_ROWS = np.empty(0, np.float32)
SHOWN = ("doc before", "second opinion", "agreement", "nearest means")


@dataclass(frozen=True, eq=False)
class HeldOut:
    """The held-out source images and their classes; there may be none."""

    images_S: Indices
    labels_S: Indices


@dataclass(frozen=True, eq=False)
class Evidence:
    """The outputs of the pretrained model (before) and of the delivered one (after)."""

    labels_S: Indices
    before_SC: Values
    """Probabilities; no rows without held-out images."""
    after_SC: Values
    """No rows for a method fitted in closed form: its accuracy on the source says nothing."""
    before_NC: Values
    after_NC: Values
    dropout_S: Values = field(default_factory=lambda: NO_ROWS)
    """The delivered model's mean probability over MC-dropout, for the source images."""
    dropout_N: Values = field(default_factory=lambda: NO_ROWS)
    nearest_N: Indices = field(default_factory=lambda: np.empty(0, np.int64))
    """Predictions by nearest class means; none without held-out images."""

    @property
    def num_classes(self) -> int:
        return int(self.after_NC.shape[1])


def collect_evidence(
    labels_S: Indices, before_S: Outputs, before_N: Outputs, after_S: Outputs, after_N: Outputs
) -> Evidence:
    """Collect what is needed from both models' outputs for both domains."""
    nearest_N = np.empty(0, np.int64)
    if len(before_S.features_KD) and len(before_S.features_KD) == len(labels_S):
        nearest_N = nearest_means(before_S.features_KD, labels_S, before_N.features_KD)
    return Evidence(
        labels_S=labels_S,
        before_SC=before_S.probabilities_NC,
        after_SC=after_S.probabilities_NC,
        before_NC=before_N.probabilities_NC,
        after_NC=after_N.probabilities_NC,
        dropout_S=after_S.extra.get("mcd_mu", NO_ROWS),
        dropout_N=after_N.extra.get("mcd_mu", NO_ROWS),
        nearest_N=nearest_N,
    )


class Calibrated:
    """One model's outputs, calibrated on the held-out source images if there are enough.

    The temperature is 1 or more. A model is rarely underconfident on a target. If all of a few
    source images are right, the likelihood would push the temperature towards 0.
    """

    def __init__(self, source_SC: Values, labels_S: Indices, target_NC: Values) -> None:
        self.judged = len(source_SC) >= MIN_HELD_OUT
        self.temperature = max(1.0, fitted_temperature(source_SC, labels_S)) if self.judged else 1.0
        self.target_NC = at_temperature(target_NC, self.temperature)
        if self.judged:
            self.source_SC = at_temperature(source_SC, self.temperature)
            self.right_S = self.source_SC.argmax(axis=1) == labels_S

    def estimates(self) -> EstimatesByName:
        confidence_N, share = self.target_NC.max(axis=1), information_share(self.target_NC)
        doc = atc = None
        if self.judged:
            doc = difference_of_confidences(self.source_SC.max(axis=1), self.right_S, confidence_N)
            both = (self.source_SC, self.target_NC)
            certainty_S, certainty_N = (-entr(p).sum(axis=1) for p in both)
            atc = thresholded_confidence(certainty_S, self.right_S, certainty_N)
        return {
            "confidence": average_confidence(confidence_N),
            "doc": doc,
            "atc": atc,
            "information": None if np.isnan(share) else share,
        }


def estimates(evidence: Evidence) -> EstimatesByName:
    """Return every estimate by name; None for one that needs held-out images the run lacks."""
    before = Calibrated(evidence.before_SC, evidence.labels_S, evidence.before_NC)
    after = Calibrated(evidence.after_SC, evidence.labels_S, evidence.after_NC)
    predicted_N, nearest_N = evidence.after_NC.argmax(axis=1), evidence.nearest_N
    rows = np.arange(len(predicted_N))
    return {
        **{f"{name} before": value for name, value in before.estimates().items()},
        **{f"{name} after": value for name, value in after.estimates().items()},
        "agreement": agreement(evidence.before_NC, evidence.after_NC),
        "second opinion": float(before.target_NC[rows, predicted_N].mean()),
        "dropout": _dropout(evidence, after),
        "nearest means": float((nearest_N == predicted_N).mean()) if len(nearest_N) else None,
    }


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
    before = Calibrated(evidence.before_SC, evidence.labels_S, evidence.before_NC)
    return before.temperature, matching_temperature(evidence.after_NC, accuracy)
