"""A finished run for the tests of commands."""

from pathlib import Path

import pytest

from certvol.cli._main import run
from support.commands import adapt_words


@pytest.fixture(scope="session")
def finished(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; no test may change it."""
    out = tmp_path_factory.mktemp("finished") / "run"
    assert run(adapt_words(*folders, out)) == 0
    return out
