import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from certvol.config import DataConfig
from certvol.data.check import CheckReport, check
from certvol.errors import UserError

CONFIG = DataConfig(workers=2, cache_dir="/nonexistent/never-written")


def write(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)).save(path)


@pytest.fixture
def domains(tmp_path: Path) -> tuple[Path, Path]:
    for i in range(8):
        write(tmp_path / "source" / ("cat" if i < 5 else "dog") / f"{i}.png", i)
        write(tmp_path / "target" / f"{i}.png", 100 + i)
    return tmp_path / "source", tmp_path / "target"


def texts(report: CheckReport, level: str) -> list[str]:
    return [finding.text for finding in report.findings if finding.level == level]


def told(report: CheckReport, level: str, *words: str) -> bool:
    return any(all(word in text for word in words) for text in texts(report, level))


def test_clean_folders_have_no_findings(domains: tuple[Path, Path]) -> None:
    report = check(*domains, CONFIG)
    assert report.source_counts == {"cat": 5, "dog": 3}
    assert report.target_count == 8
    assert report.findings == []
    assert report.can_adapt


def test_unreadable_and_empty_files(domains: tuple[Path, Path]) -> None:
    source, target = domains
    (source / "cat/text.jpg").write_bytes(b"text")
    (source / "cat/gone.jpg").symlink_to("nowhere")
    (source / "dog/zero.png").write_bytes(b"")
    (target / "zero.png").write_bytes(b"")
    (target / "half.png").write_bytes((target / "0.png").read_bytes()[:60])
    (target / "notes.txt").write_bytes(b"")
    report = check(source, target, CONFIG)
    assert [path for path, _ in report.source_unreadable] == ["cat/gone.jpg", "cat/text.jpg"]
    assert "broken link" in report.source_unreadable[0][1]
    assert "not an image" in report.source_unreadable[1][1]
    assert report.source_empty == ["dog/zero.png"]
    assert report.target_empty == ["zero.png"]
    assert [path for path, _ in report.target_unreadable] == ["half.png"]
    assert report.source_counts == {"cat": 5, "dog": 3}
    assert told(report, "warning", "source: 2 files or folders cannot be read", "cat/gone.jpg")
    assert told(report, "warning", "target: 1 files are empty")
    assert told(report, "note", "target: 1 files have no image suffix")
    assert report.can_adapt


def test_duplicates_and_the_same_image_in_two_classes(domains: tuple[Path, Path]) -> None:
    source, target = domains
    shutil.copy(source / "cat/0.png", source / "cat/again.png")
    shutil.copy(source / "cat/0.png", source / "dog/wrong.png")
    shutil.copy(target / "3.png", target / "copy.png")
    report = check(source, target, CONFIG)
    assert report.source_duplicates == [["cat/0.png", "cat/again.png", "dog/wrong.png"]]
    assert report.target_duplicates == [["3.png", "copy.png"]]
    assert told(report, "warning", "source: 2 files repeat")
    assert told(report, "warning", "more than one class (such as cat/0.png and dog/wrong.png)")
    assert report.can_adapt


def test_duplicates_within_a_class_are_no_conflict(domains: tuple[Path, Path]) -> None:
    shutil.copy(domains[0] / "cat/0.png", domains[0] / "cat/again.png")
    assert not told(check(*domains, CONFIG), "warning", "more than one class")


def test_files_in_both_domains(domains: tuple[Path, Path]) -> None:
    source, target = domains
    shutil.copy(source / "dog/6.png", target / "leak.png")
    report = check(source, target, CONFIG)
    assert report.in_both == [("dog/6.png", "leak.png")]
    assert told(report, "warning", "1 images are in both", "leak.png")


def test_imbalance_and_single_images(domains: tuple[Path, Path]) -> None:
    source, target = domains
    write(source / "ant/0.png", 50)
    assert not told(check(source, target, CONFIG), "warning", "out of balance")
    for i in range(10):
        write(source / "cat" / f"more{i}.png", 60 + i)
    report = check(source, target, CONFIG)
    assert told(report, "warning", "out of balance", "cat has 15", "ant has 1")
    assert told(report, "warning", "1 classes have one image only (ant)")
    assert report.can_adapt


def test_names_that_differ_in_case_or_accent_only(domains: tuple[Path, Path]) -> None:
    source, target = domains
    for i, name in enumerate(("Cat", "\u00e9t\u00e9", "e\u0301te\u0301")):
        write(source / name / "0.png", 50 + i)
        write(source / name / "1.png", 70 + i)
    report = check(source, target, CONFIG)
    assert told(report, "warning", "'Cat', 'cat' are different classes")
    assert sum("are different classes" in text for text in texts(report, "warning")) == 2


def test_empty_class_folders_and_stray_images(domains: tuple[Path, Path]) -> None:
    source, target = domains
    (source / "cow").mkdir()
    write(source / "stray.png", 77)
    report = check(source, target, CONFIG)
    assert told(report, "warning", "1 folders hold no images and are no classes (cow)")
    assert told(report, "warning", "1 images lie in no class folder", "stray.png")
    assert report.source_counts == {"cat": 5, "dog": 3}


def test_a_source_that_cannot_be_used_is_an_error_and_the_rest_is_still_told(domains: tuple[Path, Path]) -> None:
    source, target = domains
    (target / "zero.png").write_bytes(b"")
    report = check(target, source, CONFIG)
    assert not report.can_adapt
    assert told(report, "error", "source:", "no class folders")
    assert report.findings[0].level == "error"
    assert report.source_counts == {}
    assert report.source_empty == ["zero.png"]
    assert report.target_count == 8


@pytest.mark.parametrize("which", ["source", "target"])
def test_empty_folders_are_errors(domains: tuple[Path, Path], tmp_path: Path, which: str) -> None:
    (tmp_path / "empty").mkdir()
    folders = {"source": domains[0], "target": domains[1], which: tmp_path / "empty"}
    report = check(folders["source"], folders["target"], CONFIG)
    assert not report.can_adapt
    assert told(report, "error", f"{which}: ", "holds no images")
    assert len(texts(report, "error")) == 1


@pytest.mark.parametrize("which", ["source", "target"])
def test_a_file_in_place_of_a_folder_is_one_error(domains: tuple[Path, Path], tmp_path: Path, which: str) -> None:
    (tmp_path / "file").write_text("")
    folders = {"source": domains[0], "target": domains[1], which: tmp_path / "file"}
    report = check(folders["source"], folders["target"], CONFIG)
    assert texts(report, "error") == [f"{which}: {tmp_path / 'file'} is a file; expected a folder of images"]


@pytest.mark.parametrize("which", ["source", "target"])
def test_a_missing_folder_is_raised(domains: tuple[Path, Path], tmp_path: Path, which: str) -> None:
    folders = {"source": domains[0], "target": domains[1], which: tmp_path / "missing"}
    with pytest.raises(UserError, match="there is no folder"):
        check(folders["source"], folders["target"], CONFIG)


def test_classes_without_readable_images(domains: tuple[Path, Path]) -> None:
    source, target = domains
    (source / "cow").mkdir()
    (source / "cow/bad.png").write_bytes(b"bad")
    report = check(source, target, CONFIG)
    assert report.can_adapt
    assert report.source_counts == {"cat": 5, "cow": 0, "dog": 3}
    assert told(report, "warning", "no readable image", "cow")
    for path in (source / "dog").iterdir():
        path.write_bytes(b"bad")
    assert told(check(source, target, CONFIG), "error", "1 of 3 classes have a readable image")


def test_nothing_readable_in_the_target(domains: tuple[Path, Path]) -> None:
    for path in domains[1].iterdir():
        path.write_bytes(b"bad")
    report = check(*domains, CONFIG)
    assert told(report, "error", "target: none of its 8 image files can be read")


def test_wrong_level_of_the_source(domains: tuple[Path, Path], tmp_path: Path) -> None:
    source, target = domains
    (tmp_path / "up").mkdir()
    source.rename(tmp_path / "up/amazon")
    report = check(tmp_path / "up", target, CONFIG)
    assert told(report, "error", "look like domains", f"did you mean {tmp_path}/up/amazon?")


def test_wrong_level_of_the_target(domains: tuple[Path, Path], tmp_path: Path) -> None:
    for i in range(4):
        write(tmp_path / "up" / ("webcam" if i % 2 else "dslr") / ("cat" if i < 2 else "dog") / f"{i}.png", 200 + i)
    report = check(domains[0], tmp_path / "up", CONFIG)
    assert told(report, "warning", "one level further down, in dslr, webcam", f"did you mean {tmp_path}/up/dslr?")
    assert report.can_adapt


def test_a_target_in_class_folders_is_noted(domains: tuple[Path, Path], tmp_path: Path) -> None:
    for i in range(4):
        write(tmp_path / "labelled" / ("cat" if i < 2 else "dog") / f"{i}.png", 200 + i)
    report = check(domains[0], tmp_path / "labelled", CONFIG)
    assert [finding.level for finding in report.findings] == ["note"]
    assert told(report, "note", "named like a source class")


def test_images_level_in_both(domains: tuple[Path, Path], tmp_path: Path) -> None:
    source, target = domains
    for folder, name in ((source, "s"), (target, "t")):
        (tmp_path / name).mkdir()
        folder.rename(tmp_path / name / "images")
    report = check(tmp_path / "s", tmp_path / "t", CONFIG)
    assert report.source_counts == {"cat": 5, "dog": 3}
    assert report.findings == []


def test_folders_that_overlap(domains: tuple[Path, Path], tmp_path: Path) -> None:
    source, target = domains
    assert told(check(source, source, CONFIG), "warning", "the same folder")
    (tmp_path / "link").symlink_to(source)
    assert told(check(source, tmp_path / "link", CONFIG), "warning", "the same folder")
    assert told(check(source, source / "cat", CONFIG), "warning", "the target folder lies inside the source folder")
    assert told(check(source, tmp_path, CONFIG), "warning", "the source folder lies inside the target folder")
    assert not told(check(source, target, CONFIG), "warning", "folder")


def test_nothing_is_written(domains: tuple[Path, Path], tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    check(*domains, CONFIG)
    assert sorted(tmp_path.rglob("*")) == before
    assert not os.path.lexists("/nonexistent")


def test_odd_names_give_printable_findings(domains: tuple[Path, Path]) -> None:
    source, target = domains
    Path(os.fsdecode(os.fsencode(source) + b"/cat/b\xe9d\n.png")).write_bytes(b"bad")
    report = check(source, target, CONFIG)
    assert told(report, "warning", "cat/b\\xe9d\\n.png")
    "".join(texts(report, "warning")).encode("utf-8")


def test_progress_is_told_for_both(domains: tuple[Path, Path]) -> None:
    events: list[object] = []

    class Recorder:
        def start(self, what: str, total: int, done: int = 0) -> None:
            events.append((what, total))

        def advance(self, n: int) -> None:
            events.append(n)

        def finish(self) -> None:
            events.append("finish")

    check(*domains, CONFIG, Recorder())
    assert events == [("reading source", 8), 8, "finish", ("reading target", 8), 8, "finish"]
