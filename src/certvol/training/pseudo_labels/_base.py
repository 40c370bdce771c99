"""The protocol of pseudo-label rules.

A rule that looks at each image alone labels chunks: it returns probabilities in `probabilities` and
labels in `labels`. The trainer then labels only as many images as a cycle draws. A rule that
compares images sets `labels_whole_target`: before every cycle, `label_target` gets the features and
probabilities of all target images, and with `uses_source` those of the source too.

With several processes, each labels its share of the chunks. `label_target` runs in every process on
the same input, and the labels of the first one count.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from certvol.methods._base import AdaptationMethod, Survey
from certvol.settings import TrainingConfig


@dataclass(frozen=True)
class Chunk:
    """Some target images as the model sees them, on the training device."""

    method: AdaptationMethod
    features_ND: Tensor
    seed: int
    """The seed of random numbers; differs between chunks, cycles and processes."""


class PseudoLabelRule:
    """Labels target images with the present model only.

    A rule may keep only what follows from the run's inputs, because a resumed run makes a new one.
    """

    summary: ClassVar[str]
    labels_whole_target: ClassVar[bool] = False
    """True if `label_target` labels all target images at once."""
    uses_source: ClassVar[bool] = False
    """True if `label_target` also needs the features and labels of the source images."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """The rule's settings, given as `pseudo_labels.<field>`."""

    def __init__(self, config: Any, training: TrainingConfig) -> None:
        self.config, self.training = config, training

    def probabilities(self, chunk: Chunk) -> Tensor:
        """Return the probabilities of a chunk's images, N x C; by default the classifier's."""
        return chunk.method.decide(chunk.features_ND).float().softmax(dim=1)

    def labels(self, probabilities_NC: Tensor) -> Tensor:
        """Return a label per image of a chunk; -1 leaves an image out of the cycle."""
        return probabilities_NC.argmax(dim=1)

    def label_target(self, survey: Survey) -> Tensor:
        """Return a label for every target image; -1 leaves an image out of the cycle."""
        raise NotImplementedError
