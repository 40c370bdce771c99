"""Fixtures for all tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.images import write_domain


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CERTVOL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A labelled source and a shifted target of three classes; no test may change them."""
    root = tmp_path_factory.mktemp("domains")
    return write_domain(root / "source"), write_domain(root / "target", shift=20, seed=1)
