"""Two small runs that the tests of prediction share."""

from pathlib import Path

import pytest

import certvol
from support.images import tiny, write_domain


@pytest.fixture(scope="package")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both domains and two runs: `run` (cvp) has target labels, `basic` has none."""
    root = tmp_path_factory.mktemp("predict")
    write_domain(root / "source")
    write_domain(root / "target", shift=60, seed=1)
    write_domain(root / "flat", shift=60, seed=1, flat=True)
    for number in range(4):  # so that some predictions are wrong
        swapped = [(root / "target" / name / f"{number}.png") for name in ("apple", "leaf")]
        contents = [path.read_bytes() for path in swapped]
        for path, content in zip(swapped, reversed(contents), strict=True):
            path.write_bytes(content)
    certvol.adapt(root / "source", root / "target", out=root / "run", **tiny())
    basic = tiny(method__name="basic")
    certvol.adapt(root / "source", root / "flat", out=root / "basic", **basic)
    return root


@pytest.fixture
def labelled(root: Path) -> certvol.Run:
    return certvol.adapt(resume=root / "run")


@pytest.fixture
def unlabelled(root: Path) -> certvol.Run:
    """A run without target labels, by a method without sigma."""
    return certvol.adapt(resume=root / "basic")
