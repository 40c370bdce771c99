"""The images that a reviewer sees are those that the run predicted."""

import shutil
from pathlib import Path

import pytest

import certvol
from certvol.progress import Silent
from certvol.review.commands import ReviewOptions, _warn_of_other_images
from certvol.review.target import are_of_the_run, changed_since, find_images, newer_images
from certvol.review.target import open_target as opened
from support.images import tiny
from support.reporter import RecordingReporter


@pytest.fixture(scope="module")
def run(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certvol.adapt(*folders, out=tmp_path_factory.mktemp("run") / "run", **tiny()).path


def test_other_images_of_the_same_names_and_dates_are_noticed(
    run: Path, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    target = opened(run)
    assert are_of_the_run(target, find_images(target, None), Silent()) is True
    moved = Path(shutil.copytree(folders[1], tmp_path / "moved"))
    files = find_images(target, moved)
    assert are_of_the_run(target, files, Silent()) is True
    assert are_of_the_run(target, [None, *files[1:]], Silent()) is None
    shutil.copy2(folders[0] / "sky" / "0.png", moved / "sky" / "0.png")
    assert newer_images(target, files) == []
    assert changed_since(target, files)
    assert are_of_the_run(target, files, Silent()) is False


def test_a_reviewer_is_warned_of_other_images(
    run: Path, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    target, warned = opened(run), []
    other = Path(shutil.copytree(folders[0], tmp_path / "other"))  # the source has the same names
    for place in (folders[1], other):
        reporter, files = RecordingReporter(), find_images(target, place)
        options = ReviewOptions(str(run), 10, 0.1, str(place), "cpu")
        are_others = _warn_of_other_images(target, files, files, options, reporter)
        assert are_others == (place == other)
        warned.append(reporter.warned)
    assert warned[0] == []
    assert len(warned[1]) == 1
    assert "are not those of the run, although they have the same names" in warned[1][0]
