"""The command line: one file per command.

A command's module has `HELP`, `add_options(parser)` and `run(options, reporter)`, which returns the
exit code. It imports what needs torch inside `run`, so that `certvol --help` stays quick. Modules
with a leading underscore hold what several commands share.
"""

import importlib
import pkgutil
from types import ModuleType


def discover() -> dict[str, ModuleType]:
    """Return every command's module by name; `list_.py` is the command `list`."""
    names = sorted(
        module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")
    )
    return {name.rstrip("_"): importlib.import_module(f"{__name__}.{name}") for name in names}
