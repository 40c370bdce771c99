from pathlib import Path

import pytest

from certvol.benchmark.pool import LocalPool
from certvol.data.digits import write_digit_domains
from support.played import Played


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with two domains of digits, drawn once."""
    root = tmp_path_factory.mktemp("digits")
    write_digit_domains(root, ["thin", "bold"])
    return root


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Played:
    played = Played()
    monkeypatch.setattr(LocalPool, "run", lambda pool, *arguments: played.play(*arguments))
    return played
