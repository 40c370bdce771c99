"""The most probable class of the mean over passes with dropout, as in the authors' code.

The backbone runs once, the classifier many times. Passes and rate are `training.mc_passes` and
`training.mc_dropout`, because certainty is measured with them too.
"""

from torch import Tensor

from certvol.nn.heads import mc_dropout
from certvol.training.pseudo_labels._base import Chunk, PseudoLabelRule


class Rule(PseudoLabelRule):
    summary = (
        "most probable class of the mean over passes with dropout (training.mc_passes, "
        "training.mc_dropout)"
    )

    def probabilities(self, chunk: Chunk) -> Tensor:
        passes, rate = self.training.mc_passes, self.training.mc_dropout
        return mc_dropout(chunk.method.decide, chunk.features_ND, passes, rate, chunk.seed)[0]
