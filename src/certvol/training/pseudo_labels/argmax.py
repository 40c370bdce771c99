"""The most probable class, as in the paper."""

from certvol.training.pseudo_labels._base import PseudoLabelRule


class Rule(PseudoLabelRule):
    summary = "most probable class of the classifier"
