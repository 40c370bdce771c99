"""The base class of rules that compare target images with their nearest neighbours."""

from torch import Tensor

from certvol.methods._base import Survey
from certvol.training.pseudo_labels._base import PseudoLabelRule
from certvol.training.pseudo_labels._graph import Neighbours, nearest_neighbours, neighbours_for
from certvol.training.pseudo_labels._space import comparable_rows


class ComparingRule(PseudoLabelRule):
    """A rule with the setting `neighbours`, the most neighbours that an image has."""

    labels_whole_target = True
    uses_source = True
    _kept: tuple[Tensor, Neighbours] | None = None

    def compared(self, survey: Survey) -> tuple[Tensor, Neighbours]:
        """Return comparable target rows and their neighbours.

        They depend on the features alone. If these are fixed, both are computed once per run.
        """
        most: int = self.config.neighbours
        found = self._kept
        if found is None:
            _, units_ND = comparable_rows(survey)
            found = units_ND, nearest_neighbours(units_ND, most)
            if survey.fixed_features:
                self._kept = found
        units_ND, neighbours = found
        return units_ND, neighbours.nearest(neighbours_for(survey.probabilities_NC, most))
