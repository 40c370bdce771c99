"""What a run that continues from another one must not change, or warns of."""

import shutil
from pathlib import Path

import pytest

import certvol
from certvol.errors import UserError
from support.images import tiny, write_noise
from support.reporter import RecordingReporter

Domains = tuple[Path, Path]


@pytest.fixture
def first(folders: Domains, tmp_path: Path) -> Path:
    return certvol.adapt(*folders, out=tmp_path / "first", **tiny()).path


def test_another_share_of_held_out_images_is_refused(first: Path, tmp_path: Path) -> None:
    """Images that trained the model would judge it."""
    with pytest.raises(UserError, match=r"keeps `data\.holdout` 0\.1; leave"):
        certvol.adapt(from_run=first, out=tmp_path / "run", data={"holdout": 0.3})
    assert not (tmp_path / "run").exists()


def test_another_source_gives_a_warning(folders: Domains, first: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(folders[0], source)
    same = RecordingReporter()
    certvol.adapt(source, from_run=first, out=tmp_path / "same", reporter=same)
    assert not any("is not the one that trained" in text for text in same.warned)
    write_noise(source / "apple" / "more.png", seed=5)
    other = RecordingReporter()
    certvol.adapt(source, from_run=first, out=tmp_path / "other", reporter=other)
    assert any("is not the one that trained" in text for text in other.warned)
