"""Pseudo-label rules: one file per rule, whose name is the value of `training.pseudo_labels`."""

from certvol.files import modules_of
from certvol.settings import Config
from certvol.training.pseudo_labels._base import PseudoLabelRule


def discover() -> dict[str, type[PseudoLabelRule]]:
    """Return the class `Rule` of every module in this folder whose name has no underscore."""
    return {name: module.Rule for name, module in modules_of(__name__, __path__).items()}


def config_classes() -> dict[str, type]:
    return {name: rule.Config for name, rule in discover().items()}


def chosen_rule(config: Config) -> PseudoLabelRule:
    """Build the rule that the settings name."""
    rule = discover()[config.training.pseudo_labels]
    given = config.pseudo_labels
    return rule(given if isinstance(given, rule.Config) else rule.Config(), config.training)
