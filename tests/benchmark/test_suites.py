import json
from pathlib import Path

import pytest
from PIL import Image

from certvol.benchmark import suites, tables
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


def found_domains(suite: suites.Suite, root: Path | None, tasks: list[str], work: Path) -> dict[str, Path]:
    located = suites.locate(suite, root, tasks, work)
    suites.prepare(suite, located, work)
    return {letter: domain.given_as(work) for letter, domain in located.items()}


@pytest.mark.parametrize("name", suites.SUITES)
def test_every_suite_is_whole(name: str) -> None:
    suite = suites.SUITES[name]
    for task in [*suite.tasks, *suite.splits.values()]:
        assert set(task.split("-")) <= set(suite.letters)
        assert task.count("-") == 1
    assert len(suite.tasks) == {"office-caltech": 12, "office-home": 12, "visda-2017": 1, "digits": 2}.get(name, 6)
    assert not suite.class_names or len(set(suite.class_names)) == suite.classes
    assert set(suite.class_aliases.values()) <= set(suite.class_names)
    facts = tables.published().get(name, {})
    if "rows" in facts:
        columns = facts.get("tasks", suite.class_names)
        assert set(columns) == set(suite.tasks if "tasks" in facts else suite.class_names)
        assert all(len(values) == len(columns) + 1 for values in facts["rows"].values())
        for values in facts["rows"].values():  # the last is the mean of the others, as printed
            if None not in values:
                assert values[-1] == pytest.approx(sum(values[:-1]) / len(columns), abs=0.11)
    json.dumps(dict(suite.settings))


def test_the_right_folders_are_found_by_any_of_their_names(tmp_path: Path) -> None:
    suite = suites.SUITES["office-31"]
    _office(tmp_path, ("Amazon", "webcam"))
    found = found_domains(suite, tmp_path, ["A-W"], tmp_path / "work")
    assert found == {"A": tmp_path / "Amazon", "W": tmp_path / "webcam"}
    remarks = suites.count_remarks(suite, found)
    assert "Amazon holds 31 images, the published office-31 2,817" in remarks[0]
    assert len(remarks) == 2


def test_classes_below_a_folder_images_are_found(tmp_path: Path) -> None:
    for name in ("amazon", "webcam"):
        _domain(tmp_path / name / "images", list(suites.OFFICE_CLASSES))
    assert found_domains(suites.SUITES["office-31"], tmp_path, ["A-W"], tmp_path / "work")["A"].name == "amazon"


def test_what_is_missing_and_too_much_is_said(tmp_path: Path) -> None:
    suite = suites.SUITES["office-31"]
    _domain(tmp_path / "amazon", [name for name in suites.OFFICE_CLASSES if name != "mug"] + ["cup"])
    (tmp_path / "photos").mkdir()
    with pytest.raises(UserError) as caught:
        found_domains(suite, tmp_path, ["A-W"], tmp_path / "work")
    said = str(caught.value)
    for words in ("webcam is missing", "amazon lacks mug", "too many: cup", "photos", "31 class folders", "Saenko"):
        assert words in said
    assert "dslr is missing" not in said, "the task does not need it"


def test_domains_with_other_classes_or_too_few_are_refused(tmp_path: Path) -> None:
    suite = suites.SUITES["adaptiope"]
    names = [f"thing{i:03d}" for i in range(123)]
    _domain(tmp_path / "product_images", names)
    _domain(tmp_path / "real_life", [*names[:-1], "thing-x"])
    with pytest.raises(UserError, match=r"product_images lacks thing-x, .*; real_life lacks thing122"):
        found_domains(suite, tmp_path, ["P-R"], tmp_path / "work")
    _domain(tmp_path / "synthetic", names[:100])
    with pytest.raises(UserError, match="synthetic has 100 classes with images, not 123"):
        found_domains(suite, tmp_path, ["P-S"], tmp_path / "work")


def test_two_folders_of_one_class_are_refused(tmp_path: Path) -> None:
    suite = suites.SUITES["office-caltech"]
    _domain(tmp_path / "caltech", [*suites.CALTECH_CLASSES, "backpack"])
    _domain(tmp_path / "webcam", list(suites.CALTECH_CLASSES))
    with pytest.raises(UserError, match="caltech has 2 folders of the class back_pack: back_pack, backpack"):
        found_domains(suite, tmp_path, ["C-W"], tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_a_sum_that_is_known_is_compared(tmp_path: Path) -> None:
    suite = suites.SUITES["modern-office-31"]
    _office(tmp_path, ("amazon", "synthetic", "webcam"))
    found = found_domains(suite, tmp_path, ["A-W", "A-S"], tmp_path / "work")
    assert "amazon, synthetic, webcam together hold 93 images" in suites.count_remarks(suite, found)[0]
    del found["S"]
    assert suites.count_remarks(suite, found) == [], "the sum over all of them alone is known"


@pytest.mark.parametrize("name", suites.SUITES)
def test_a_suite_is_described_in_short_lines(name: str) -> None:
    suite, text = suites.SUITES[name], suites.describe(suites.SUITES[name])
    assert max(map(len, text.splitlines())) <= 80
    joined = " ".join(text.split())
    assert joined.startswith(f"{name}: {suite.summary}")
    for words in (" ".join(suite.tasks), f"{suite.classes} classes", suite.backbone, suite.where):
        assert words in joined
    for domain in suite.domains:
        assert f"{domain.letter} {domain.folders[0]}" in joined
        assert all(other in joined for other in domain.folders)
        assert domain.images is None or f"{domain.images:,} images" in joined
    assert suite.archive_sha256 is None or suite.archive_sha256 in joined


def test_other_names_of_classes_become_the_suites(tmp_path: Path) -> None:
    suite = suites.SUITES["office-caltech"]
    renamed = {"back_pack": "backpack", "laptop_computer": "laptop"}
    _domain(tmp_path / "caltech10", [renamed.get(name, name) for name in suites.CALTECH_CLASSES], images=2)
    _domain(tmp_path / "webcam", list(suites.CALTECH_CLASSES))
    for _ in range(2):  # again over what is there
        found = found_domains(suite, tmp_path, ["C-W"], tmp_path / "work")
    assert found["W"] == tmp_path / "webcam"
    paths = scan(found["C"]).paths
    assert len(paths) == 20
    assert {path.split("/")[0] for path in paths} == set(suites.CALTECH_CLASSES)


def test_data_that_is_needed_and_not_given_or_not_there(tmp_path: Path) -> None:
    suite = suites.SUITES["office-home"]
    with pytest.raises(UserError, match="--data ROOT"):
        found_domains(suite, None, ["A-C"], tmp_path)
    with pytest.raises(UserError, match="there is no folder"):
        found_domains(suite, tmp_path / "nowhere", ["A-C"], tmp_path)


def test_digits_are_made_where_they_are_asked_for(tmp_path: Path) -> None:
    found = found_domains(suites.SUITES["digits"], None, ["T-B"], tmp_path / "data")
    assert set(found) == {"T", "B"}
    assert suites.count_remarks(suites.SUITES["digits"], found) == []


@pytest.mark.parametrize(
    ("suite", "asked", "split", "expected"),
    [
        ("office-31", None, None, ["A-W", "D-W", "W-D", "A-D", "D-A", "W-A"]),
        ("office-31", ["W-A", "A-W", "W-A"], None, ["W-A", "A-W"]),
        ("visda-2017", None, "validation", ["synthetic-validation"]),
        ("visda-2017", None, None, ["synthetic-test"]),
        ("digits", ["I-R"], None, ["I-R"]),
    ],
)
def test_tasks(suite: str, asked: list[str] | None, split: str | None, expected: list[str]) -> None:
    assert suites.find_tasks(suites.SUITES[suite], asked, split) == expected


@pytest.mark.parametrize(
    ("suite", "asked", "split", "said"),
    [
        ("office-31", ["A-X"], None, "no task `A-X`"),
        ("office-31", ["A-A"], None, "two of its domains"),
        ("office-31", ["AW"], None, "SOURCE-TARGET"),
        ("office-31", None, "test", "use --tasks"),
        ("visda-2017", None, "validating", "did you mean `validation`"),
        ("visda-2017", ["synthetic-test"], "test", "not both"),
    ],
)
def test_tasks_that_are_none(suite: str, asked: list[str] | None, split: str | None, said: str) -> None:
    with pytest.raises(UserError, match=said):
        suites.find_tasks(suites.SUITES[suite], asked, split)


def test_an_unknown_suite_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean `office-31`"):
        suites.find_suite("office31")


def test_folders_in_the_place_of_embedded_images_stay_as_they_are(tmp_path: Path) -> None:
    root, digits = tmp_path / "root", suites.SUITES["digits"]
    mine = root / "bold" / "logo.svg"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    found = found_domains(digits, root, ["T-B"], tmp_path / "work")
    assert {path.parent for path in found.values()} == {tmp_path / "work"}, "nothing is written into a root"
    (root / "thin").mkdir()
    assert found_domains(digits, root, ["T-B"], tmp_path / "work") == found
    with pytest.raises(UserError, match="bold is where digits are to be written"):
        found_domains(digits, None, ["T-B"], root)
    assert mine.read_text() == "mine"
    assert sorted(path.name for path in root.iterdir()) == ["bold", "thin"]
    assert found_domains(digits, tmp_path / "work", ["T-B"], tmp_path / "other") == found, "made before"
