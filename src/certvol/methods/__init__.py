"""One file per method: its name is the command-line name."""

import importlib
import pkgutil

from certvol.methods._base import AdaptationMethod


def discover() -> dict[str, type[AdaptationMethod]]:
    """Return the class `Method` of every module in this folder whose name has no underscore."""
    names = sorted(
        module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")
    )
    return {name: importlib.import_module(f"{__name__}.{name}").Method for name in names}


def config_classes() -> dict[str, type]:
    return {name: method.Config for name, method in discover().items()}
