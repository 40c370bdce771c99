import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from certvol.cli._main import run
from certvol.data.check import CheckReport, check
from certvol.errors import UserError
from certvol.settings import DataConfig
from support.images import write_domain, write_noise

CONFIG = DataConfig(workers=2, cache_dir="/nonexistent/never-written")
RNG = np.random.default_rng(0)
ROWS = {
    "source": RNG.normal(size=(12, 4)).astype(np.float32),
    "target": RNG.normal(size=(9, 4)).astype(np.float32),
}
LABELS = np.array(["ant", "bee", "cat"] * 4)


@pytest.fixture
def domains(tmp_path: Path) -> tuple[Path, Path]:
    for i in range(8):
        write_noise(tmp_path / "source" / ("cat" if i < 5 else "dog") / f"{i}.png", i)
        write_noise(tmp_path / "target" / f"{i}.png", 100 + i)
    return tmp_path / "source", tmp_path / "target"


def texts(report: CheckReport, level: str) -> list[str]:
    return [finding.text for finding in report.findings if finding.level == level]


def found(report: CheckReport, level: str, *words: str) -> bool:
    return any(all(word in text for word in words) for text in texts(report, level))


def test_clean_folders_have_no_findings(domains: tuple[Path, Path]) -> None:
    report = check(*domains, CONFIG)
    assert report.source_counts == {"cat": 5, "dog": 3}
    assert report.target_count == 8
    assert report.findings == []
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
    assert [finding.level for finding in report.findings] == ["note"]
    assert found(report, "note", "named like a source class")


def test_a_folder_named_images_is_looked_into(domains: tuple[Path, Path], tmp_path: Path) -> None:
    source, target = domains
    for folder, name in ((source, "s"), (target, "t")):
        (tmp_path / name).mkdir()
        folder.rename(tmp_path / name / "images")
    report = check(tmp_path / "s", tmp_path / "t", CONFIG)
    assert report.source_counts == {"cat": 5, "dog": 3}
    assert report.findings == []


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
        check(source, tmp_path, CONFIG),
        "warning",
        "one of the two folders lies inside the other",
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
    events: list[object] = []

    class Recorder:
        def start(self, what: str, total: int, done: int = 0) -> None:
            events.append((what, total))

        def advance(self, n: int = 1) -> None:
            events.append(n)

        def finish(self) -> None:
            events.append("finish")

    check(*domains, CONFIG, Recorder())
    assert events == [("reading source", 8), 8, "finish", ("reading target", 8), 8, "finish"]


# --- files of features


def written(folder: Path, which: str, **changed: Any) -> Path:
    arrays: dict[str, Any] = {
        "features": ROWS[which],
        "paths": np.array([f"{which}{i}" for i in range(len(ROWS[which]))]),
    }
    if which == "source":
        arrays["labels"] = LABELS
    arrays |= changed
    np.savez(
        folder / f"{which}.npz",
        **{name: array for name, array in arrays.items() if array is not None},
    )
    return folder / f"{which}.npz"


def test_clean_files_have_no_findings(tmp_path: Path) -> None:
    report = check(written(tmp_path, "source"), written(tmp_path, "target"), CONFIG)
    assert report.source_counts == {"ant": 4, "bee": 4, "cat": 4}
    assert report.target_count == 9
    assert report.findings == []
    assert report.can_adapt


@pytest.mark.parametrize(
    ("which", "changed", "said"),
    [
        ("source", {"labels": None}, "source: .* has no labels"),
        ("source", {"labels": np.array(["ant"] * 12)}, "source: .* has only one class"),
        ("source", {"features": np.full((12, 4), np.nan)}, "source: .* not finite"),
        ("source", {"features": None}, "source: .* has no array `features`"),
        ("target", {"features": np.zeros((0, 4))}, "target: .* should be numbers of shape"),
        ("target", {"features": np.ones((9, 5)), "paths": None}, "4 dimensions and the target's 5"),
        ("target", {"labels": np.ones((9, 2))}, "target: `labels`"),
    ],
)
def test_a_file_that_adapt_would_refuse_is_an_error_and_the_other_is_still_read(
    which: str, changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    places = {
        name: written(tmp_path, name, **(changed if name == which else {}))
        for name in ("source", "target")
    }
    report = check(places["source"], places["target"], CONFIG)
    assert not report.can_adapt
    (error,) = texts(report, "error")
    assert re.search(said, error)
    assert (
        report.target_count == 9 if which == "source" else sum(report.source_counts.values()) == 12
    )


def test_features_of_other_backbones_damaged_and_missing_files_are_reported(tmp_path: Path) -> None:
    source = written(tmp_path, "source", about=np.array("a"))
    target = written(tmp_path, "target", about=np.array("b"))
    assert "made by a and the target's by b" in texts(check(source, target, CONFIG), "error")[0]
    target.write_bytes(target.read_bytes()[:100])
    assert "damaged" in texts(check(source, target, CONFIG), "error")[0]
    target.unlink()
    with pytest.raises(UserError, match="there is no file"):
        check(source, target, CONFIG)


def test_repeated_rows_and_rows_in_both_are_reported(tmp_path: Path) -> None:
    both = np.concatenate([ROWS["target"][:5], ROWS["target"][:2], ROWS["source"][3:5]])
    report = check(written(tmp_path, "source"), written(tmp_path, "target", features=both), CONFIG)
    assert report.target_duplicates == [["target0", "target5"], ["target1", "target6"]]
    assert report.in_both == [("source3", "target7"), ("source4", "target8")]
    assert [text.split(" (")[0] for text in texts(report, "warning")] == [
        "target: repeated content: 2",
        "content in both source and target: 2",
    ]
    assert report.can_adapt


def test_imbalance_names_and_target_labels_of_features_are_reported(tmp_path: Path) -> None:
    labels = np.array(["Ant"] + ["ant"] * 11)
    target = written(tmp_path, "target", labels=np.array(["ant"] * 9))
    report = check(written(tmp_path, "source", labels=labels), target, CONFIG)
    assert "with only one image" in texts(report, "warning")[0]
    assert "imbalanced" in texts(report, "warning")[1]
    assert "differ only in" in texts(report, "warning")[2]
    assert "every row has the label" in texts(report, "note")[0]


def test_a_file_of_features_beside_a_folder_is_an_error(tmp_path: Path) -> None:
    report = check(written(tmp_path, "source"), write_domain(tmp_path / "images"), CONFIG)
    assert texts(report, "error") == [
        f"{tmp_path}/source.npz holds features, but the other domain is not a .npz file; use features for both"
    ]
    assert sum(report.source_counts.values()) == 12


def test_the_command_takes_files_of_features(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = written(tmp_path, "source"), written(tmp_path, "target")
    assert run(["check", "--source", str(source), "--target", str(target)]) == 0
    said = capsys.readouterr().out
    assert "all 3 classes" in said
    assert "rows" in said
    assert "adaptation can start" in said
    written(tmp_path, "source", labels=None)
    assert run(["check", "--source", str(source), "--target", str(target)]) == 2
    assert "adaptation cannot start" in capsys.readouterr().out
    assert run(["check", "--source", str(tmp_path / "none.npz"), "--target", str(target)]) == 2
    assert "there is no file" in capsys.readouterr().err
