"""Label in another tool: write tasks for Label Studio or a plain table, and read the answers.

A task holds the path and the kind of its image, so that the answers come back with both. In plain
CSV, a row without a label has no answer yet. Without a column `kind`, an answer that replaces an
earlier one keeps its kind, and all others count as chosen.
"""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import quoteattr

from certvol.data.folders import printable
from certvol.errors import UserError
from certvol.review.sampling import Item
from certvol.review.target import ReviewTarget
from certvol.runs.outputs import check_output, write_output
from certvol.runs.review_labels import (
    COLUMNS,
    Answer,
    Review,
    class_of_cell,
    clean_path,
    has_column,
    parse_review,
    read_answers_text,
)
from certvol.runs.tables import csv_text, label_cell

NONE_WORDS, UNSURE_WORDS = "None of these classes", "Not sure"
MARK = " *"  # behind these words if a class has their name


def export(target: ReviewTarget, items: Sequence[Item], out: str | Path) -> list[Path]:
    """Write the images to label as `.json` (with a labelling interface as `.xml`) or `.csv`."""
    place = Path(out)
    if place.suffix.lower() not in (".json", ".csv"):
        raise UserError(f"--export writes .json or .csv, found {printable(out)}")
    check_output(place, "--export")
    _check_unanswered(place)
    if place.suffix.lower() == ".csv":
        rows = [(target.paths[item.row], "", "", item.kind) for item in items]
        write_output(place, csv_text(COLUMNS, rows))
        return [place]
    interface = place.with_suffix(".xml")
    check_output(interface, "--export")
    tasks = [_task(target, item) for item in items]
    write_output(place, json.dumps(tasks, indent=1) + "\n")
    write_output(interface, _interface(target.classes))
    return [place, interface]


def _check_unanswered(place: Path) -> None:
    """Refuse to replace a file that may hold somebody's labels.

    A spreadsheet may have saved them with semicolons or in another encoding, so a file that cannot
    be read as a list of images is not replaced either.
    """
    shown = printable(place)
    try:
        answered = place.is_file() and _is_answered(place)
    except (OSError, ValueError, AttributeError, TypeError, RecursionError, csv.Error):
        raise UserError(
            f"{shown} exists and may hold labels, because it is not a list of images that "
            "--export wrote; export to a new file"
        ) from None
    if answered:
        raise UserError(f"{shown} holds labels; read them with --import, or export to a new file")


def _is_answered(place: Path) -> bool:
    """Return whether a list of images to label has labels; ValueError if it is no such list."""
    text = place.read_text("utf-8-sig")
    if not text.strip():
        return False
    if place.suffix.lower() == ".csv":
        rows = csv.DictReader(io.StringIO(text, newline=""))
        if not {"path", "label"} <= set(rows.fieldnames or ()):
            raise ValueError("a table with other columns")
        return any(row["label"] or row.get("answer") for row in rows)
    return any(task.get("annotations") or task.get("label") for task in json.loads(text))


def _task(target: ReviewTarget, item: Item) -> dict[str, Any]:
    path = target.paths[item.row]
    guess = target.classes[int(target.predicted_N[item.row])]
    choice = {
        "from_name": "label",
        "to_name": "image",
        "type": "choices",
        "value": {"choices": [guess]},
    }
    address = f"/data/local-files/?d={quote(path.removeprefix('./'))}"
    return {
        "data": {"image": address, "path": path, "kind": item.kind},
        "predictions": [{"model_version": "certvol", "result": [choice]}],
    }


def _words(classes: Sequence[str]) -> tuple[str, str]:
    """Return the choices for none of the classes and for not sure; neither is a class."""
    none, unsure = NONE_WORDS, UNSURE_WORDS
    while none in classes:
        none += MARK
    while unsure in classes:
        unsure += MARK
    return none, unsure


def _interface(classes: Sequence[str]) -> str:
    choices = [*classes, *_words(classes)]
    lines = "".join(f"    <Choice value={quoteattr(name)}/>\n" for name in choices)
    return (
        '<View>\n  <Image name="image" value="$image"/>\n'
        '  <Filter name="filter" toName="label" hotkey="shift+f"/>\n'
        '  <Choices name="label" toName="image" choice="single" showInline="true">\n'
        f"{lines}  </Choices>\n</View>\n"
    )


@dataclass(frozen=True)
class Answers:
    """What another tool wrote."""

    reviews: list[Review]
    has_kinds: bool
    """Whether the answers say which images are random."""
    skipped: int
    """How many tasks were skipped in Label Studio."""


def read_answers(path: str | Path, target: ReviewTarget) -> Answers:
    """Read what another tool wrote; every path has to be a target image of the run."""
    shown = printable(path)
    text, skipped = read_answers_text(path), 0
    if text.lstrip()[:1] in ("[", "{"):
        reviews, has_kinds, skipped = _from_tasks(text, shown)
    else:
        reviews, has_kinds = parse_review(text, shown, may_be_open=True), has_column(text, "kind")
    if not reviews:
        raise UserError(f"{shown} has no answers; label its images first")
    cells = {label_cell(name): name for name in target.classes}
    found = [_checked(each, shown, target, cells) for each in reviews]
    return Answers(list({each.path: each for each in found}.values()), has_kinds, skipped)


def _from_tasks(text: str, shown: str) -> tuple[list[Review], bool, int]:
    try:
        tasks = json.loads(text)
        if not isinstance(tasks, list):
            raise ValueError("expected a list of tasks")
        found = list(_answers(tasks))
        has_kinds = any("kind" in task.get("data", task) for task in tasks)
        return found, has_kinds, sum(map(_is_skipped, tasks))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        reason = printable(" ".join(str(error).split())[:120])
        raise UserError(
            f"{shown} is not an export of Label Studio (JSON or JSON-MIN): {reason}"
        ) from None


def _answers(tasks: Iterable[dict[str, Any]]) -> Iterable[Review]:
    """Yield the answer of each task that has one; of several annotations the last one counts.

    A task that the person skipped (Label Studio calls it cancelled) counts as not sure. Without it,
    the images that are difficult to tell would be missing in the random sample.
    """
    for task in tasks:
        about = task.get("data", task)  # JSON-MIN holds everything at one level
        label = about.get("label")
        for annotation in task.get("annotations", ()):
            if not annotation.get("was_cancelled"):
                results = [each["value"].get("choices") for each in annotation["result"]]
                label = next((choices for choices in results if choices), label)
        is_skipped = label is None and _is_skipped(task)
        if isinstance(label, dict):
            label = label["choices"]
        if isinstance(label, list):
            label = label[0] if label else None
        if label is not None or is_skipped:
            kind, path = about.get("kind", "chosen"), clean_path(str(about["path"]))
            if kind not in ("random", "chosen"):
                raise ValueError(f"the kind `{kind}` is neither random nor chosen")
            if is_skipped:
                yield Review(path, None, kind, "unsure")
            else:
                yield Review(path, str(label), kind)


def _is_skipped(task: dict[str, Any]) -> bool:
    """Return whether the person skipped the task and nobody answered it."""
    annotations = task.get("annotations", ())
    return bool(annotations) and all(each.get("was_cancelled") for each in annotations)


def _checked(review: Review, shown: str, target: ReviewTarget, cells: dict[str, str]) -> Review:
    """Return the review with a class of the run, or with the tool's answer that it is none.

    `cells` maps the cell of each class to its name.
    """
    if review.path not in target.row_of:
        raise UserError(
            f"{shown} names {printable(review.path)}, which is not a target image of the run"
        )
    if review.label is None:
        return review
    none, unsure = _words(target.classes)
    others: dict[str, Answer] = {none: "none", unsure: "unsure"}
    if review.label in others:
        return replace(review, label=None, answer=others[review.label])
    where = f"{shown}, {printable(review.path)}"
    return replace(review, label=class_of_cell(review.label, where, cells))
