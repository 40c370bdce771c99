"""The labels that a person gave to target images on purpose: the only ones that training sees."""

from dataclasses import dataclass

import numpy as np

from certvol.data import Indices


@dataclass(frozen=True, eq=False)
class ReviewedLabels:
    """Target images, by their numbers in training, that were labelled to train on."""

    images_R: Indices
    labels_R: Indices
    none_U: Indices
    """Images that show none of the classes: no batch of adaptation holds them."""

    def correct(self, images_N: Indices, labels_N: Indices) -> Indices:
        """Return the labels of these images with the reviewed ones corrected, -1 for no class."""
        corrected_N = labels_N.copy()
        places_N = np.searchsorted(self.images_R, images_N).clip(max=len(self.images_R) - 1)
        is_known_N = self.images_R[places_N] == images_N
        corrected_N[is_known_N] = self.labels_R[places_N[is_known_N]]
        corrected_N[np.isin(images_N, self.none_U)] = -1
        return corrected_N


def reviewed_labels(known_N: Indices, none_U: Indices) -> ReviewedLabels | None:
    """Return the reviewed labels given one per target image, -1 for images without one.

    None if no image has a label.
    """
    images_R = np.flatnonzero(known_N >= 0)
    if len(images_R) == 0:
        return None
    return ReviewedLabels(images_R, known_N[images_R], np.sort(none_U))
