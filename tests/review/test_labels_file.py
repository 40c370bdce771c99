"""No answer is lost, and no file is written by two."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from certvol.errors import UserError
from certvol.review.labels_file import LabelsFile, opened
from certvol.runs.folder import RunFolder
from certvol.runs.review_labels import Review, read_review

CLASSES = ["Mug", "=Bike", 'a "b", c']
ANSWERS = [
    Review("a.jpg", "Mug", "random"),
    Review("./=b.jpg", "=Bike", "random"),
    Review('x "y", z.jpg', 'a "b", c', "chosen"),
    Review("c.jpg", None, "random", "none"),
    Review("d.jpg", None, "chosen", "unsure"),
]


def test_answers_are_read_back_as_they_were_given(tmp_path: Path) -> None:
    file = LabelsFile(tmp_path / "review.csv", CLASSES)
    for answer in ANSWERS:
        file.add(answer)
        assert read_review(file.path, CLASSES) == file.reviews
    assert file.reviews == ANSWERS
    assert LabelsFile(file.path, CLASSES).reviews == ANSWERS
    assert file.path.read_text().startswith("path,label,answer,kind\na.jpg,Mug,class,random\n")


def test_an_answer_is_synced_before_add_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bytes] = []
    path = tmp_path / "review.csv"
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(path.read_bytes()))
    file = LabelsFile(path, CLASSES)
    file.add(ANSWERS[0])
    assert synced[0].endswith(b"a.jpg,Mug,class,random\n")
    file.add(ANSWERS[3])
    assert synced[-1].endswith(b"c.jpg,,none,random\n")


def test_the_last_answer_counts_and_can_be_taken_back(tmp_path: Path) -> None:
    file = LabelsFile(tmp_path / "review.csv", CLASSES)
    file.add(*ANSWERS)
    file.add(Review("a.jpg", None, "random", "none"))
    assert file.reviews[-1] == Review("a.jpg", None, "random", "none")
    file.undo("a.jpg")
    assert file.reviews == ANSWERS[1:]
    assert LabelsFile(file.path, CLASSES).reviews == ANSWERS[1:]


@pytest.mark.parametrize("cut", range(1, 75, 3))
def test_a_file_torn_anywhere_goes_on(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "review.csv"
    LabelsFile(path, CLASSES).add(*ANSWERS[:3])
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    file = LabelsFile(path, CLASSES)
    kept = file.reviews
    assert kept == ANSWERS[: len(kept)]
    assert len(kept) >= data[:-cut].count(b"\n") - 1
    file.add(ANSWERS[3])
    assert LabelsFile(path, CLASSES).reviews == [*kept, ANSWERS[3]]


@pytest.mark.parametrize("text", ["", "path,la", "path,label,answer,kind"])
def test_a_file_without_a_whole_header_is_begun_again(tmp_path: Path, text: str) -> None:
    path = tmp_path / "review.csv"
    path.write_text(text)
    LabelsFile(path, CLASSES).add(ANSWERS[0])
    assert read_review(path) == ANSWERS[:1]


def test_a_table_of_a_spreadsheet_is_brought_into_form(tmp_path: Path) -> None:
    path = tmp_path / "review.csv"
    path.write_bytes("\ufefflabel,path\r\nMug,a.jpg\r\n".encode())
    file = LabelsFile(path, CLASSES)
    file.add(ANSWERS[3])
    assert path.read_text() == (
        "path,label,answer,kind\na.jpg,Mug,class,chosen\nc.jpg,,none,random\n"
    )


def test_a_second_reviewer_is_refused_in_one_sentence(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    code = (
        "import sys; from certvol.review.labels_file import opened; "
        "from certvol.runs.folder import RunFolder\n"
        f"with opened(RunFolder({str(tmp_path)!r}), {CLASSES!r}): print('open', flush=True); "
        "sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    other = subprocess.Popen([sys.executable, "-c", code], text=True, **pipes)  # type: ignore[call-overload]
    try:
        assert other.stdout.readline() == "open\n"
        with pytest.raises(UserError, match="another process is reviewing the run"):
            opened(run, CLASSES).__enter__()
    finally:
        other.kill()
        other.wait()
    with opened(run, CLASSES) as file:  # a killed one holds nothing
        file.add(ANSWERS[0])


def test_a_folder_that_is_gone_is_a_users_error(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    with pytest.raises(UserError, match=r"cannot write .*review\.csv: No such file"):
        LabelsFile(folder / "review.csv", CLASSES).add(ANSWERS[0])


@pytest.mark.parametrize("room", [0, 9])
def test_an_answer_that_does_not_fit_on_the_disk_leaves_no_part_of_it(
    tmp_path: Path, room: int
) -> None:
    file = LabelsFile(tmp_path / "review.csv", CLASSES)
    file.add(ANSWERS[0])
    before = file.path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + room, limits[1]))
    try:
        with pytest.raises(UserError, match="cannot write"):
            file.add(ANSWERS[3])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.path.read_bytes() == before
    assert file.reviews == ANSWERS[:1]
    file.add(ANSWERS[4])
    assert LabelsFile(file.path, CLASSES).reviews == [ANSWERS[0], ANSWERS[4]]


@pytest.mark.parametrize("change", [None, "path,label,answer,kind\n", "path;label\n"])
def test_a_file_that_another_program_changed_is_not_written(
    change: str | None, tmp_path: Path
) -> None:
    file = LabelsFile(tmp_path / "review.csv", CLASSES)
    file.add(*ANSWERS)
    file.path.unlink()
    if change is not None:
        file.path.write_text(change)
    for _ in range(2):
        with pytest.raises(UserError, match=r"another program changed .* for --import") as refusal:
            file.add(Review("e.jpg", "Mug"))
    assert file.path.exists() == (change is not None)
    assert change is None or file.path.read_text() == change
    assert file.reviews == ANSWERS
    (saved,) = tmp_path.glob("review-*.csv")
    assert str(saved) in str(refusal.value)
    assert read_review(saved, CLASSES) == ANSWERS
