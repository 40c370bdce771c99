import shutil
from pathlib import Path

import pytest
from PIL import Image

from certvol.benchmark import suites
from certvol.benchmark.suite import Domain, Suite
from certvol.benchmark.suite_data import count_warnings, list_warnings, locate, prepare
from certvol.data.folders import scan
from certvol.errors import UserError


def _domain(folder: Path, classes: list[str], images: int = 1) -> None:
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(images):
            Image.new("L", (2, 2)).save(folder / name / f"{number}.png")


def _office(root: Path, names: tuple[str, ...] = ("amazon", "dslr", "webcam")) -> Path:
    for name in names:
        _domain(root / name, list(suites.OFFICE_CLASSES))
    return root


def prepared(suite: Suite, root: Path | None, tasks: list[str], work: Path) -> dict[str, Path]:
    return prepare(suite, locate(suite, root, tasks, work), work)


def test_domains_are_found_by_any_of_their_folder_names(tmp_path: Path) -> None:
    suite = suites.SUITES["office-31"]
    _office(tmp_path, ("Amazon", "webcam"))
    found = prepared(suite, tmp_path, ["A-W"], tmp_path / "work")
    assert found == {"A": tmp_path / "Amazon", "W": tmp_path / "webcam"}
    warnings = count_warnings(suite, found)
    assert "Amazon has 31 images, the published office-31 2,817" in warnings[0]
    assert len(warnings) == 2


def test_classes_may_lie_below_a_folder_images(tmp_path: Path) -> None:
    for name in ("amazon", "webcam"):
        _domain(tmp_path / name / "images", list(suites.OFFICE_CLASSES))
    assert (
        prepared(suites.SUITES["office-31"], tmp_path, ["A-W"], tmp_path / "work")["A"].name
        == "amazon"
    )


def test_the_message_lists_what_is_missing_and_extra(tmp_path: Path) -> None:
    suite = suites.SUITES["office-31"]
    _domain(
        tmp_path / "amazon", [name for name in suites.OFFICE_CLASSES if name != "mug"] + ["cup"]
    )
    (tmp_path / "photos").mkdir()
    with pytest.raises(UserError) as caught:
        prepared(suite, tmp_path, ["A-W"], tmp_path / "work")
    said = str(caught.value)
    for words in (
        "webcam is missing",
        "amazon lacks mug",
        "extra classes: cup",
        "photos",
        "31 class folders",
        "Saenko",
    ):
        assert words in said
    assert "dslr is missing" not in said, "the task does not need it"


def test_domains_with_other_classes_or_too_few_are_refused(tmp_path: Path) -> None:
    suite = suites.SUITES["adaptiope"]
    names = [f"thing{i:03d}" for i in range(123)]
    _domain(tmp_path / "product_images", names)
    _domain(tmp_path / "real_life", [*names[:-1], "thing-x"])
    with pytest.raises(
        UserError, match=r"product_images lacks thing-x, .*; real_life lacks thing122"
    ):
        prepared(suite, tmp_path, ["P-R"], tmp_path / "work")
    _domain(tmp_path / "synthetic", names[:100])
    with pytest.raises(UserError, match="synthetic has 100 classes with images, not 123"):
        prepared(suite, tmp_path, ["P-S"], tmp_path / "work")


def test_two_folders_of_one_class_are_refused(tmp_path: Path) -> None:
    suite = suites.SUITES["office-caltech"]
    _domain(tmp_path / "caltech", [*suites.CALTECH_CLASSES, "backpack"])
    _domain(tmp_path / "webcam", list(suites.CALTECH_CLASSES))
    with pytest.raises(
        UserError, match="caltech has 2 folders of the class back_pack: back_pack, backpack"
    ):
        prepared(suite, tmp_path, ["C-W"], tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_a_known_total_of_images_is_compared(tmp_path: Path) -> None:
    suite = suites.SUITES["modern-office-31"]
    _office(tmp_path, ("amazon", "synthetic", "webcam"))
    found = prepared(suite, tmp_path, ["A-W", "A-S"], tmp_path / "work")
    assert "amazon, synthetic, webcam together have 93 images" in count_warnings(suite, found)[0]
    del found["S"]
    assert count_warnings(suite, found) == [], "the sum over all of them alone is known"


def test_aliases_of_classes_become_the_suites_names(tmp_path: Path) -> None:
    suite = suites.SUITES["office-caltech"]
    renamed = {"back_pack": "backpack", "laptop_computer": "laptop"}
    _domain(
        tmp_path / "caltech10",
        [renamed.get(name, name) for name in suites.CALTECH_CLASSES],
        images=2,
    )
    _domain(tmp_path / "webcam", list(suites.CALTECH_CLASSES))
    for _ in range(2):  # again over what is there
        found = prepared(suite, tmp_path, ["C-W"], tmp_path / "work")
    assert found["W"] == tmp_path / "webcam"
    paths = scan(found["C"]).paths
    assert len(paths) == 20
    assert {path.split("/")[0] for path in paths} == set(suites.CALTECH_CLASSES)


def test_missing_data_is_asked_for(tmp_path: Path) -> None:
    suite = suites.SUITES["office-home"]
    with pytest.raises(UserError, match="--data ROOT"):
        prepared(suite, None, ["A-C"], tmp_path)
    with pytest.raises(UserError, match="not found"):
        prepared(suite, tmp_path / "nowhere", ["A-C"], tmp_path)


def test_digits_are_made_in_the_work_folder(tmp_path: Path) -> None:
    found = prepared(suites.SUITES["digits"], None, ["T-B"], tmp_path / "data")
    assert set(found) == {"T", "B"}
    assert count_warnings(suites.SUITES["digits"], found) == []


def test_folders_in_the_place_of_digits_are_not_changed(tmp_path: Path) -> None:
    root, digits = tmp_path / "root", suites.SUITES["digits"]
    mine = root / "bold" / "logo.svg"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    found = prepared(digits, root, ["T-B"], tmp_path / "work")
    assert {path.parent for path in found.values()} == {tmp_path / "work"}, (
        "nothing is written into a root"
    )
    (root / "thin").mkdir()
    assert prepared(digits, root, ["T-B"], tmp_path / "work") == found
    with pytest.raises(UserError, match="bold: it is not a folder of digits"):
        prepared(digits, None, ["T-B"], root)
    assert mine.read_text() == "mine"
    assert sorted(path.name for path in root.iterdir()) == ["bold", "thin"]
    assert prepared(digits, tmp_path / "work", ["T-B"], tmp_path / "other") == found, "made before"


def test_a_partial_target_has_links_to_its_classes_alone(tmp_path: Path) -> None:
    suite = suites.SUITES["office-31"]
    _office(tmp_path, ("amazon", "webcam"))
    for _ in range(2):  # again over what is there
        found = prepared(suite, tmp_path, ["A-W10", "A-W"], tmp_path / "work")
    assert found["A"] == tmp_path / "amazon"
    assert found["W"] == tmp_path / "webcam"
    assert found["W10"] == tmp_path / "work" / "webcam-10"
    kept = {path.partition("/")[0] for path in scan(found["W10"]).paths}
    assert kept == set(suites.CALTECH_CLASSES)
    assert len(count_warnings(suite, found)) == 2, "no count is known of partial targets"


def test_a_partial_target_must_have_its_classes(tmp_path: Path) -> None:
    suite = suites.SUITES["office-home"]
    names = [f"Thing_{i:02d}" for i in range(40)] + list(suites.HOME_FIRST)
    for domain in ("Art", "Clipart"):
        _domain(tmp_path / domain, names)
    found = prepared(suite, tmp_path, ["A-C25"], tmp_path / "work")
    assert len(scan(found["C25"]).paths) == 25
    shutil.move(tmp_path / "Clipart" / "Fork", tmp_path / "Clipart" / "Spork")
    with pytest.raises(UserError, match="Clipart lacks Fork"):
        prepared(suite, tmp_path, ["A-C25"], tmp_path / "work")


LISTED = Suite(
    name="listed",
    summary="two domains with lists of files",
    domains=(Domain("A", ("one",), None), Domain("B", ("two",), None)),
    tasks=("A-B",),
    classes=2,
    where="nowhere",
    file_lists=("{}_train.txt", "{}_test.txt"),
)


def _list(root: Path, name: str, paths: list[str]) -> None:
    (root / name).write_text("".join(f"{path} 0\n" for path in paths))


def test_published_lists_say_which_files_count(tmp_path: Path) -> None:
    for name in ("one", "two"):
        _domain(tmp_path / name, ["cat", "dog"], images=3)
    located = locate(LISTED, tmp_path, ["A-B"], tmp_path / "work")
    assert located["A"].for_runs(tmp_path / "work") == tmp_path / "one"
    assert "no DOMAIN_train.txt and DOMAIN_test.txt" in list_warnings(LISTED, located)[0]
    _list(tmp_path, "one_train.txt", ["one/cat/0.png", "one/dog/2.png"])
    with pytest.raises(UserError, match=r"one_train\.txt is there, but not one_test\.txt"):
        locate(LISTED, tmp_path, ["A-B"], tmp_path / "work")
    _list(tmp_path, "one_test.txt", ["one/cat/1.png"])
    for _ in range(2):
        found = prepared(LISTED, tmp_path, ["A-B"], tmp_path / "work")
    assert scan(found["A"]).paths == ["cat/0.png", "cat/1.png", "dog/2.png"]
    assert found["B"] == tmp_path / "two"
    assert (
        "beside two:"
        in list_warnings(LISTED, locate(LISTED, tmp_path, ["A-B"], tmp_path / "work"))[0]
    )
    _list(tmp_path, "one_test.txt", ["one/cat/7.png"])
    with pytest.raises(UserError, match=r"one lacks files of its lists: cat/7\.png"):
        locate(LISTED, tmp_path, ["A-B"], tmp_path / "work")
