"""Fixtures for all tests."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.images import write_domain

if TYPE_CHECKING:
    from support.browser import Browser


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setattr("os.fsync", lambda file: None)  # no test cuts the power
        yield


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CERTVOL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A labelled source and a shifted target of three classes; no test may change them."""
    root = tmp_path_factory.mktemp("domains")
    return write_domain(root / "source"), write_domain(root / "target", shift=20, seed=1)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Browser"]:
    from support.browser import Browser, find_browser  # imports torch

    program = find_browser()
    if program is None:
        if os.environ.get("CERTVOL_NEEDS_BROWSER"):
            pytest.fail("CERTVOL_NEEDS_BROWSER is set, but chromium is not installed")
        pytest.skip("chromium is not installed; run `apt-get install chromium`")
    started = Browser(program, tmp_path_factory.mktemp("profile"))
    try:
        started.call("Browser.getVersion", timeout=600)
        yield started
    finally:
        started.close()


@pytest.fixture
def screenshots(tmp_path: Path) -> Path:
    """$CERTVOL_SCREENSHOTS, or a folder of the test."""
    place = os.environ.get("CERTVOL_SCREENSHOTS")
    return Path(place) if place else tmp_path / "screenshots"
