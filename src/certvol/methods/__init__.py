"""One file per method: its name is the command-line name."""

from certvol.files import modules_of
from certvol.methods._base import AdaptationMethod


def discover() -> dict[str, type[AdaptationMethod]]:
    """Return the class `Method` of every module in this folder whose name has no underscore."""
    return {name: module.Method for name, module in modules_of(__name__, __path__).items()}


def config_classes() -> dict[str, type]:
    return {name: method.Config for name, method in discover().items()}
