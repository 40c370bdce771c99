"""The base class of rules that compare target images with their nearest neighbours."""

from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor

from certvol.methods._base import Survey
from certvol.methods._clusters import class_sums
from certvol.training.pseudo_labels._base import PseudoLabelRule
from certvol.training.pseudo_labels._graph import Neighbours, nearest_neighbours, neighbours_for
from certvol.training.pseudo_labels._space import comparable_rows


@dataclass(frozen=True, eq=False)
class Compared:
    """The target images in the space where images are compared."""

    units_ND: Tensor
    neighbours: Neighbours
    source_centres_CD: Tensor
    """The mean direction of each class of the source; 0 for a class without images."""


class ComparingRule(PseudoLabelRule):
    """A rule with the setting `neighbours`, the most neighbours that an image has."""

    labels_whole_target = True
    uses_source = True
    _kept: Compared | None = None

    def compared(self, survey: Survey) -> Compared:
        """Return comparable target rows, their neighbours and the source's classes.

        They depend on the features alone. If these are fixed, all are computed once per run.
        """
        most: int = self.config.neighbours
        found = self._kept
        if found is None:
            found = _compare(survey, most)
            if survey.fixed_features:
                self._kept = found
        count = neighbours_for(survey.probabilities_NC, most)
        return replace(found, neighbours=found.neighbours.nearest(count))


def _compare(survey: Survey, neighbours: int) -> Compared:
    source_SD, units_ND = comparable_rows(survey)
    if survey.source_labels_S is None:
        raise AssertionError("rules that compare images need the labels of the source")
    num_classes = survey.probabilities_NC.shape[1]
    sums_CD = class_sums(source_SD, survey.source_labels_S, num_classes)
    return Compared(units_ND, nearest_neighbours(units_ND, neighbours), F.normalize(sums_CD, dim=1))
