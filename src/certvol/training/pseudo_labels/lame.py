"""The classifier's probabilities, smoothed over nearest neighbours (LAME, CVPR 2022).

It assumes nothing about how often classes occur, so it is safe for partial and uneven targets.
"""

from dataclasses import dataclass

from torch import Tensor

from certvol.methods._base import Survey
from certvol.settings import setting
from certvol.training.pseudo_labels._comparing import ComparingRule
from certvol.training.pseudo_labels._graph import smooth


class Rule(ComparingRule):
    summary = "classifier's probabilities smoothed over nearest neighbours (LAME)"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        neighbours: int = setting(5, above=0, at_most=1000, help="Most neighbours that must agree.")

    def label_target(self, survey: Survey) -> Tensor:
        neighbours = self.compared(survey).neighbours
        smoothed_NC = smooth(survey.probabilities_NC, neighbours)
        return smoothed_NC.argmax(dim=1)
