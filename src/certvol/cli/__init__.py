"""The command line: one file per command.

A command's module has `HELP`, `add_options(parser)` and `run(options, reporter)`, which returns the
exit code. It imports what needs torch inside `run`, so that `certvol --help` stays quick. Modules
with a leading underscore hold what several commands share.
"""

from types import ModuleType

from certvol.files import modules_of


def discover() -> dict[str, ModuleType]:
    """Return every command's module by name; `list_.py` is the command `list`."""
    return {name.rstrip("_"): module for name, module in modules_of(__name__, __path__).items()}
