"""Collect the outputs of both models of a finished run, from which it is judged without labels.

The verdict and the temperature use nothing but an `Evidence`. S held-out source images, N target
images (at most `outcome.FEATURE_IMAGES` of them, so that labelled and unlabelled runs agree).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from certvol.predict.forward import Outputs, Values
from certvol.scores.estimators import nearest_means

Indices = NDArray[np.int64]
NO_ROWS = np.empty(0, np.float32)


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

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[np.generic]]) -> "Evidence":
        return cls(**{each.name: arrays[each.name] for each in fields(cls)})  # type: ignore[arg-type]


def gather(
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
