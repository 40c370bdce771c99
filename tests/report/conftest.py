"""A browser. Screenshots go to $CERTVOL_SCREENSHOTS, or into the folder of the test."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.browser import Browser, find_browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
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
    place = os.environ.get("CERTVOL_SCREENSHOTS")
    return Path(place) if place else tmp_path / "screenshots"
