"""Labels from other tools."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from certvol.cli._main import run
from certvol.errors import UserError
from certvol.review.exchange import NONE_WORDS, UNSURE_WORDS, export, read_answers
from certvol.review.target import ReviewTarget, open_target
from certvol.runs.review_labels import Review, read_review
from support.commands import refused
from support.made_runs import MadeRun
from support.reviews import made_for_review

CLASSES = ["apple", '<b> & "quotes"', "=sky"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    names = [f"{i}.png" for i in range(30)] + ["=a.png", "sp ace/ü?.png"]
    root = tmp_path_factory.mktemp("made")
    return made_for_review(root, 32, classes=CLASSES, names=names)


@pytest.fixture
def target(made: MadeRun) -> ReviewTarget:
    return open_target(made.path)


def annotated(tasks: list[dict[str, Any]], words: list[str | None]) -> list[dict[str, Any]]:
    """Answer tasks as Label Studio's export does."""
    for number, (task, word) in enumerate(zip(tasks, words, strict=True)):
        result = [] if word is None else [{"value": {"choices": [word]}, "type": "choices"}]
        task |= {"id": number, "annotations": [{"result": result, "was_cancelled": word is None}]}
    return tasks


def test_a_run_with_two_images_of_one_path_is_refused(tmp_path: Path) -> None:
    made = made_for_review(tmp_path, 4, names=["a.png", "b.png", "a.png", "c.png"])
    with pytest.raises(UserError, match=r"two target images have the path a\.png"):
        open_target(made.path)


def test_tasks_come_back_with_their_kinds(target: ReviewTarget, tmp_path: Path) -> None:
    items = target.queue(16)
    places = export(target, items, tmp_path / "tasks.json")
    tasks = json.loads(places[0].read_text())
    assert [task["data"]["path"] for task in tasks] == [target.paths[i.row] for i in items]
    guess = tasks[0]["predictions"][0]["result"][0]["value"]["choices"]
    assert guess == [CLASSES[target.predicted_N[items[0].row]]]
    words = [CLASSES[0], CLASSES[1], CLASSES[2], NONE_WORDS, UNSURE_WORDS, None]
    words += ["apple"] * (len(items) - 6)
    answered = tmp_path / "answered.json"
    answered.write_text(json.dumps(annotated(tasks, words)))
    answers = read_answers(answered, target)
    found = answers.reviews
    assert (answers.has_kinds, answers.skipped) == (True, 1)
    words_of_answers = ["class", "class", "class", "none", "unsure", "unsure"]
    assert [each.answer for each in found[:6]] == words_of_answers
    assert [each.label for each in found[:3]] == CLASSES
    assert [each.kind for each in found] == [item.kind for item in items]


def test_the_labelling_interface_names_every_class(target: ReviewTarget, tmp_path: Path) -> None:
    place = export(target, target.queue(4), tmp_path / "tasks.json")[1]
    view = ElementTree.parse(place).getroot()
    names = [choice.get("value") for choice in view.iter("Choice")]
    assert names == [*CLASSES, NONE_WORDS, UNSURE_WORDS]


def test_addresses_are_quoted(target: ReviewTarget, tmp_path: Path) -> None:
    tasks = json.loads(export(target, target.queue(32), tmp_path / "t.json")[0].read_text())
    images = {task["data"]["path"]: task["data"]["image"] for task in tasks}
    assert images["sp ace/ü?.png"] == "/data/local-files/?d=sp%20ace/%C3%BC%3F.png"
    assert images["./=a.png"] == "/data/local-files/?d=%3Da.png"


def test_the_short_json_and_tables_are_read(target: ReviewTarget, tmp_path: Path) -> None:
    place = tmp_path / "answers"
    place.write_text(
        json.dumps(
            [
                {"path": "1.png", "kind": "random", "label": "apple"},
                {"path": "2.png", "kind": "chosen", "label": {"choices": ["=sky"]}},
                {"path": "3.png", "kind": "chosen"},
            ]
        )
    )
    expected = [Review("1.png", "apple", "random"), Review("2.png", "=sky", "chosen")]
    assert read_answers(place, target).reviews == expected
    rows = ["1,1.png,apple,random", "2,./2.png,'=sky,", f"3,3.png,{NONE_WORDS},random", "4,4.png,,"]
    place.write_text("\n".join(["id,path,label,kind", *rows]))
    assert read_answers(place, target).reviews == [
        *expected,
        Review("3.png", None, "random", "none"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,label\n1.png,aple\n", "1.png: `aple` is not a class of the run; did you mean"),
        ("path,label\nother.png,apple\n", "other.png, which is not a target image"),
        ("path,label\n1.png,\n", "has no answers"),
        ("{}", "not an export of Label Studio"),
        ("[1]", "not an export of Label Studio"),
        ('[{"data": {"path": "1.png", "kind": "x", "label": "apple"}}]', "neither random nor"),
        ("[" * 100000, "not an export of Label Studio"),
    ],
)
def test_mistakes_are_named(text: str, message: str, target: ReviewTarget, tmp_path: Path) -> None:
    (tmp_path / "answers").write_text(text)
    with pytest.raises(UserError, match=message):
        read_answers(tmp_path / "answers", target)


def test_the_command_exports_and_imports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = made_for_review(tmp_path, 40)
    words = ["review", str(made.path), "--labels", "10"]
    table = tmp_path / "tasks.csv"
    assert run([*words, "--export", str(table)]) == 0
    header, *rows = table.read_text().splitlines()
    truth = dict(zip(made.names, made.true_N, strict=True))
    filled = [row.replace(",,", f",{made.classes[truth[row.split(',')[0]]]},", 1) for row in rows]
    table.write_text("\n".join([header, *filled]))
    assert run([*words, "--import", str(table)]) == 0
    said = capsys.readouterr().out
    assert "20 new labels (10 random, 10 chosen)" in said
    assert "accuracy: " in said
    assert len(read_review(made.path / "review.csv", made.classes)) == 20
    assert "holds labels" in refused(capsys, *words, "--export", str(table))
    assert run([*words, "--import", str(table)]) == 0
    assert "0 new labels" in capsys.readouterr().out


def test_a_table_without_kinds_keeps_the_kinds_of_earlier_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = made_for_review(tmp_path, 40)
    (made.path / "review.csv").write_text(
        f"path,label,answer,kind\n{made.names[0]},{made.classes[1]},class,random\n"
    )
    words = ["review", str(made.path), "--import", str(tmp_path / "plain.csv")]
    for rows, message in (
        ([0, 1], "(1 random, 1 chosen), of which 1 replace"),
        ([2], "is of a random image"),
    ):
        lines = [f"{made.names[row]},{made.classes[0]}" for row in rows]
        (tmp_path / "plain.csv").write_text("\n".join(["path,label", *lines]))
        assert run(words) == 0
        assert message in capsys.readouterr().out
    kinds = [each.kind for each in read_review(made.path / "review.csv", made.classes)]
    assert kinds == ["random", "chosen", "chosen"]


def test_skipped_tasks_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = made_for_review(tmp_path, 40)
    target = open_target(made.path)
    tasks = json.loads(export(target, target.queue(2), tmp_path / "t.json")[0].read_text())
    place = tmp_path / "answered.json"
    place.write_text(json.dumps(annotated(tasks, [None, made.classes[0], None, made.classes[0]])))
    assert run(["review", str(made.path), "--import", str(place)]) == 0
    assert "2 skipped tasks count as not sure" in capsys.readouterr().out
    answers = [each.answer for each in read_review(made.path / "review.csv")]
    assert answers.count("unsure") == 2


def test_classes_named_like_the_other_answers_are_told_apart_from_them(tmp_path: Path) -> None:
    classes = ["apple", NONE_WORDS, UNSURE_WORDS, f"{UNSURE_WORDS} *"]
    made = made_for_review(tmp_path, 40, classes=classes)
    target = open_target(made.path)
    tasks_file, interface = export(target, target.queue(4), tmp_path / "tasks.json")
    choices = [each.get("value") for each in ElementTree.parse(interface).getroot().iter("Choice")]
    assert choices == [*classes, f"{NONE_WORDS} *", f"{UNSURE_WORDS} * *"]
    tasks = annotated(json.loads(tasks_file.read_text())[:7], [*choices, None])
    (tmp_path / "answered.json").write_text(json.dumps(tasks))
    found = read_answers(tmp_path / "answered.json", target).reviews
    assert [each.label for each in found] == [*classes, None, None, None]
    assert [each.answer for each in found] == ["class"] * 4 + ["none", "unsure", "unsure"]


def test_mistakes_on_the_command_line_are_named(
    made: MadeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["review", str(made.path)]
    assert ".json or .csv" in refused(capsys, *words, "--export", str(tmp_path / "tasks.txt"))
    assert "there is no file" in refused(capsys, *words, "--import", str(tmp_path / "none.csv"))
    assert "--labels must be" in refused(capsys, *words, "--labels", "0")
    assert "--max-error must lie" in refused(capsys, *words, "--max-error", "1")
    assert "two steps" in refused(capsys, *words, "--import", "a", "--export", "b.json")
    assert "holds no run" in refused(capsys, "review", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "separator", "encoding"),
    [
        ("semicolons.csv", ";", "utf-8"),
        ("tabs.csv", "\t", "utf-8"),
        ("utf16.csv", ",", "utf-16"),
        ("torn.json", ",", "utf-8"),
    ],
)
def test_labels_that_cannot_be_read_are_not_replaced(
    target: ReviewTarget, tmp_path: Path, name: str, separator: str, encoding: str
) -> None:
    """A spreadsheet may save labels with other separators or in another encoding."""
    place, items = tmp_path / name, target.queue(2)
    lines = ["path,label,answer,kind", "0.png,apple,,random", ""]
    place.write_text("\n".join(lines).replace(",", separator), encoding)
    before = place.read_bytes()
    with pytest.raises(UserError, match="may hold labels"):
        export(target, items, place)
    assert place.read_bytes() == before
    place.write_text("")
    assert export(target, items, place)[0] == place


def test_only_tasks_without_answers_are_replaced(target: ReviewTarget, tmp_path: Path) -> None:
    place, items = tmp_path / "tasks.json", target.queue(2)
    export(target, items, place)
    tasks = json.loads(export(target, items, place)[0].read_text())
    place.write_text(json.dumps(annotated(tasks, ["apple", None, None, None])))
    with pytest.raises(UserError, match="holds labels; read them with --import"):
        export(target, items, place)
