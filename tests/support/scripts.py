"""Run the scripts of `benchmarks/` in this process."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def script(name: str) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        return importlib.import_module(name)


def run_script(name: str, *words: object) -> int:
    """Return the exit code of `python benchmarks/NAME.py WORDS`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        patch.setattr("sys.argv", [f"{name}.py", *map(str, words)])
        return int(importlib.import_module(name).main() or 0)
