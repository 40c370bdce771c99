"""Label propagation: the classifier's probabilities, spread over a graph of nearest neighbours.

This is label spreading (Zhou et al., NIPS 2003) with the classifier's probabilities in the place of
known labels.
"""

from dataclasses import dataclass

from torch import Tensor

from certvol.methods._base import Survey
from certvol.settings import setting
from certvol.training.pseudo_labels import _graph
from certvol.training.pseudo_labels._comparing import ComparingRule


class Rule(ComparingRule):
    summary = "classifier's probabilities spread over a graph of nearest neighbours"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        neighbours: int = setting(5, above=0, at_most=1000, help="Neighbours of each image.")
        alpha: float = setting(
            0.8, at_least=0, below=1, help="Share of an image's label that its neighbours decide."
        )

    def label_target(self, survey: Survey) -> Tensor:
        graph = self.compared(survey).neighbours
        spread_NC = _graph.propagate(survey.probabilities_NC, graph, self.config.alpha)
        return spread_NC.argmax(dim=1)
