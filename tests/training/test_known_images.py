"""A run knows the images of its labels by their content, and how the random ones were drawn."""

import shutil
from pathlib import Path
from typing import Any

import pytest

import certvol
from certvol.errors import UserError
from certvol.review.target import open_target
from certvol.runs.folder import RunFolder
from certvol.runs.given_labels import trained_on
from certvol.runs.review_labels import COLUMNS, Review, review_cells
from certvol.runs.tables import csv_text
from support.images import HUES, tiny

ANSWERS = [
    Review("apple/0.png", "apple"),
    Review("apple/1.png", "apple", "random"),
    Review("sky/5.png", None, "random", "none"),
]


def write_answers(path: Path, answers: list[Review]) -> Path:
    path.write_text(csv_text(COLUMNS, [review_cells(each) for each in answers]))
    return path


@pytest.fixture(scope="module")
def first(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = certvol.adapt(*folders, out=tmp_path_factory.mktemp("first") / "run", **tiny())
    write_answers(run.path / "review.csv", ANSWERS)
    return run.path


def go_on(first: Path, out: Path, labels: Path | None = None, **changed: Any) -> certvol.Run:
    return certvol.adapt(
        out=out, from_run=first, target_labels=labels or first / "review.csv", **changed
    )


def renumbered(folder: Path, out: Path) -> Path:
    """Copy a target whose images go by each other's names."""
    for name in HUES:
        for old, new in (("0", "1"), ("1", "0")):
            (out / name).mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / name / f"{old}.png", out / name / f"{new}.png")
    return out


def test_labels_of_another_target_with_the_same_names_are_refused(
    first: Path, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    other = renumbered(folders[1], tmp_path / "other")
    with pytest.raises(UserError, match=r"about other images.*add --accept-changes to match"):
        go_on(first, tmp_path / "run", target=other)
    (tmp_path / "link.csv").symlink_to(first / "review.csv")
    with pytest.raises(UserError, match="about other images"):
        go_on(first, tmp_path / "run", tmp_path / "link.csv", target=other)
    assert not (tmp_path / "run").exists()
    run = go_on(first, tmp_path / "run", target=other, accept_changes=True)
    assert "apple/0.png" in (run.path / "labels.csv").read_text()


def test_images_that_trained_are_known_by_their_content(
    first: Path, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    labels = write_answers(tmp_path / "labels.csv", ANSWERS[:1])
    second = go_on(first, tmp_path / "second", labels).path
    other = renumbered(folders[1], tmp_path / "other")
    third = certvol.adapt(target=other, out=tmp_path / "third", from_run=second).path
    assert trained_on(RunFolder(third)) == {"apple/1.png"}
    (other / "apple" / "1.png").unlink()
    fourth = certvol.adapt(target=other, out=tmp_path / "fourth", from_run=second).path
    assert trained_on(RunFolder(fourth)) == set()


def test_the_draw_of_random_labels_is_kept_in_the_run(first: Path, tmp_path: Path) -> None:
    second = go_on(first, tmp_path / "second").path
    drawn = (second / "drawn.csv").read_text().splitlines()
    assert drawn[0] == "path,stratum,images"
    assert {line.split(",")[0] for line in drawn[1:]} == {"apple/1.png", "sky/5.png"}
    target = open_target(first)
    for line in drawn[1:]:
        path, stratum, images = line.split(",")
        assert int(stratum) == target.stratum_N[target.row_of[path]]
        assert int(images) == (target.stratum_N == int(stratum)).sum()
