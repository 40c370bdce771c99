"""Pseudo-label rules: one file per rule, whose name is the value of `training.pseudo_labels`."""

import importlib
import pkgutil

from certvol.settings import Config
from certvol.training.pseudo_labels._base import PseudoLabelRule


def discover() -> dict[str, type[PseudoLabelRule]]:
    """Return the class `Rule` of every module in this folder whose name has no underscore."""
    names = sorted(
        module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")
    )
    return {name: importlib.import_module(f"{__name__}.{name}").Rule for name in names}


def config_classes() -> dict[str, type]:
    return {name: rule.Config for name, rule in discover().items()}


def chosen_rule(config: Config) -> PseudoLabelRule:
    """Build the rule that the settings name."""
    rule = discover()[config.training.pseudo_labels]
    given = config.pseudo_labels
    return rule(given if isinstance(given, rule.Config) else rule.Config(), config.training)
