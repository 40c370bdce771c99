import os
import shutil
from pathlib import Path

import pytest

from certvol.data.check import CheckReport, check
from certvol.errors import UserError
from support.findings import CONFIG, texts, unexpected
from support.images import write_noise
from support.reporter import RecordingReporter


@pytest.fixture
def domains(tmp_path: Path) -> tuple[Path, Path]:
    for i in range(8):
        write_noise(tmp_path / "source" / ("cat" if i < 5 else "dog") / f"{i}.png", i)
        write_noise(tmp_path / "target" / f"{i}.png", 100 + i)
    return tmp_path / "source", tmp_path / "target"


def found(report: CheckReport, level: str, *words: str) -> bool:
    return any(all(word in text for word in words) for text in texts(report, level))


def test_clean_folders_have_no_findings(domains: tuple[Path, Path]) -> None:
    report = check(*domains, CONFIG)
    assert report.source_counts == {"cat": 5, "dog": 3}
    assert report.target_count == 8
    assert unexpected(report) == []
    assert report.can_adapt


def test_unreadable_and_empty_files_are_reported(domains: tuple[Path, Path]) -> None:
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
    assert found(
        report,
        "warning",
        "source: unreadable files and folders are left out: 2 (such as cat/gone.jpg",
    )
    assert found(report, "warning", "target: empty files (0 bytes) are left out: 1 ")
    assert found(report, "note", "target: files without an image suffix are ignored: 1")
    assert report.can_adapt


def test_duplicates_and_images_in_two_classes_are_reported(domains: tuple[Path, Path]) -> None:
    source, target = domains
    shutil.copy(source / "cat/0.png", source / "cat/again.png")
    shutil.copy(source / "cat/0.png", source / "dog/wrong.png")
    shutil.copy(target / "3.png", target / "copy.png")
    report = check(source, target, CONFIG)
    assert report.source_duplicates == [["cat/0.png", "cat/again.png", "dog/wrong.png"]]
    assert report.target_duplicates == [["3.png", "copy.png"]]
    assert found(report, "warning", "source: repeated content: 2 ")
    assert found(
        report,
        "warning",
        "source: content in more than one class: 1 (such as cat/0.png, cat/again.png, dog/wrong",
    )
    assert report.can_adapt


def test_duplicates_within_a_class_do_not_conflict(domains: tuple[Path, Path]) -> None:
    shutil.copy(domains[0] / "cat/0.png", domains[0] / "cat/again.png")
    assert not found(check(*domains, CONFIG), "warning", "more than one class")


def test_files_in_both_domains_are_reported(domains: tuple[Path, Path]) -> None:
    source, target = domains
    shutil.copy(source / "dog/6.png", target / "leak.png")
    report = check(source, target, CONFIG)
    assert report.in_both == [("dog/6.png", "leak.png")]
    assert found(
        report, "warning", "content in both source and target: 1 (such as dog/6.png and leak.png)"
    )


def test_imbalance_and_single_images_are_reported(domains: tuple[Path, Path]) -> None:
    source, target = domains
    write_noise(source / "ant/0.png", 50)
    assert not found(check(source, target, CONFIG), "warning", "imbalanced")
    for i in range(10):
        write_noise(source / "cat" / f"more{i}.png", 60 + i)
    report = check(source, target, CONFIG)
    assert found(report, "warning", "the classes are imbalanced", "cat has 15", "ant has 1")
    assert found(report, "warning", "classes with only one image: ant")
    assert report.can_adapt


def test_class_names_that_differ_only_in_case_or_accent_are_reported(
    domains: tuple[Path, Path],
) -> None:
    source, target = domains
    for i, name in enumerate(("Cat", "\u00e9t\u00e9", "e\u0301te\u0301")):
        write_noise(source / name / "0.png", 50 + i)
        write_noise(source / name / "1.png", 70 + i)
    report = check(source, target, CONFIG)
    assert found(report, "warning", "the classes 'Cat', 'cat' differ only in case")
    assert sum("differ only in case" in text for text in texts(report, "warning")) == 2


def test_empty_class_folders_and_stray_images_are_reported(domains: tuple[Path, Path]) -> None:
    source, target = domains
    (source / "cow").mkdir()
    write_noise(source / "stray.png", 77)
    report = check(source, target, CONFIG)
    assert found(report, "warning", "folders without images are not classes: cow")
    assert found(
        report, "warning", "images outside class folders are left out: 1 (such as stray.png)"
    )
    assert report.source_counts == {"cat": 5, "dog": 3}


def test_an_unusable_source_is_an_error_and_the_rest_is_still_reported(
    domains: tuple[Path, Path],
) -> None:
    source, target = domains
    (target / "zero.png").write_bytes(b"")
    report = check(target, source, CONFIG)
    assert not report.can_adapt
    assert found(report, "error", "source:", "no class folders")
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
    assert found(report, "error", f"{which}: ", "holds no images")
    assert len(texts(report, "error")) == 1


@pytest.mark.parametrize("which", ["source", "target"])
def test_a_file_instead_of_a_folder_is_one_error(
    domains: tuple[Path, Path], tmp_path: Path, which: str
) -> None:
    (tmp_path / "file").write_text("")
    folders = {"source": domains[0], "target": domains[1], which: tmp_path / "file"}
    report = check(folders["source"], folders["target"], CONFIG)
    assert texts(report, "error") == [
        f"{which}: {tmp_path / 'file'} is a file; expected a folder of images"
    ]


@pytest.mark.parametrize("which", ["source", "target"])
def test_a_missing_folder_is_a_user_error(
    domains: tuple[Path, Path], tmp_path: Path, which: str
) -> None:
    folders = {"source": domains[0], "target": domains[1], which: tmp_path / "missing"}
    with pytest.raises(UserError, match="there is no file or folder"):
        check(folders["source"], folders["target"], CONFIG)


def test_classes_without_readable_images_are_left_out(domains: tuple[Path, Path]) -> None:
    source, target = domains
    (source / "cow").mkdir()
    (source / "cow/bad.png").write_bytes(b"bad")
    report = check(source, target, CONFIG)
    assert report.can_adapt
    assert report.source_counts == {"cat": 5, "cow": 0, "dog": 3}
    assert found(report, "warning", "classes without a readable image are left out: cow")
    for path in (source / "dog").iterdir():
        path.write_bytes(b"bad")
    assert found(check(source, target, CONFIG), "error", "classes with a readable image: 1 of 3")


def test_a_target_without_readable_images_is_an_error(domains: tuple[Path, Path]) -> None:
    for path in domains[1].iterdir():
        path.write_bytes(b"bad")
    report = check(*domains, CONFIG)
    assert found(report, "error", "target: none of its 8 image files can be read")


def test_a_source_one_level_too_high_is_an_error(
    domains: tuple[Path, Path], tmp_path: Path
) -> None:
    source, target = domains
    (tmp_path / "up").mkdir()
    source.rename(tmp_path / "up/amazon")
    report = check(tmp_path / "up", target, CONFIG)
    assert found(report, "error", "look like domains", f"did you mean {tmp_path}/up/amazon?")


def test_a_target_one_level_too_high_is_a_warning(
    domains: tuple[Path, Path], tmp_path: Path
) -> None:
    for i in range(4):
        write_noise(
            tmp_path
            / "up"
            / ("webcam" if i % 2 else "dslr")
            / ("cat" if i < 2 else "dog")
            / f"{i}.png",
            200 + i,
        )
    report = check(domains[0], tmp_path / "up", CONFIG)
    assert found(
        report,
        "warning",
        "one level further down, in dslr, webcam",
        f"did you mean {tmp_path}/up/dslr?",
    )
    assert report.can_adapt


def test_a_target_in_class_folders_is_noted(domains: tuple[Path, Path], tmp_path: Path) -> None:
    for i in range(4):
        write_noise(tmp_path / "labelled" / ("cat" if i < 2 else "dog") / f"{i}.png", 200 + i)
    report = check(domains[0], tmp_path / "labelled", CONFIG)
    assert [finding.level for finding in unexpected(report)] == ["note"]
    assert found(report, "note", "named like a source class")


def test_a_folder_named_images_is_looked_into(domains: tuple[Path, Path], tmp_path: Path) -> None:
    source, target = domains
    for folder, name in ((source, "s"), (target, "t")):
        (tmp_path / name).mkdir()
        folder.rename(tmp_path / name / "images")
    report = check(tmp_path / "s", tmp_path / "t", CONFIG)
    assert report.source_counts == {"cat": 5, "dog": 3}
    assert unexpected(report) == []


def test_overlapping_folders_are_reported(domains: tuple[Path, Path], tmp_path: Path) -> None:
    source, target = domains
    assert found(check(source, source, CONFIG), "warning", "the same folder")
    (tmp_path / "link").symlink_to(source)
    assert found(check(source, tmp_path / "link", CONFIG), "warning", "the same folder")
    assert found(
        check(source, source / "cat", CONFIG),
        "warning",
        "one of the two folders lies inside the other",
    )
    assert found(
        check(source, tmp_path, CONFIG), "warning", "one of the two folders lies inside the other"
    )
    assert not found(check(source, target, CONFIG), "warning", "folder")


def test_nothing_is_written(domains: tuple[Path, Path], tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    check(*domains, CONFIG)
    assert sorted(tmp_path.rglob("*")) == before


def test_strange_names_give_printable_findings(domains: tuple[Path, Path]) -> None:
    source, target = domains
    Path(os.fsdecode(os.fsencode(source) + b"/cat/b\xe9d\n.png")).write_bytes(b"bad")
    report = check(source, target, CONFIG)
    assert found(report, "warning", "cat/b\\xe9d\\n.png")
    "".join(texts(report, "warning")).encode("utf-8")


def test_progress_is_shown_for_both(domains: tuple[Path, Path]) -> None:
    progress = RecordingReporter()
    check(*domains, CONFIG, progress)
    bars = [("reading source", 8), ("finish", 8), ("reading target", 8), ("finish", 16)]
    assert progress.events == bars


def test_classes_that_tables_write_alike_are_an_error(domains: tuple[Path, Path]) -> None:
    source, target = domains
    (source / "cat").rename(source / "=a")
    assert check(source, target, CONFIG).can_adapt
    (source / "dog").rename(source / "'=a")
    report = check(source, target, CONFIG)
    assert found(report, "error", "are both written `'=a` in tables; rename one of them")
    assert not report.can_adapt
