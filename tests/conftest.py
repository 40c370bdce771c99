"""Every test has a cache of its own."""

import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CERTVOL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
