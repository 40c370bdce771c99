"""Label in another tool: write tasks for Label Studio or a plain table, and read the answers.

A task holds the path and the kind of its image, so that the answers come back with both. In plain
CSV, a row without a label has no answer yet; without a column `kind`, all labels count as chosen.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import quoteattr

from certvol.data.folders import printable, reason_of
from certvol.errors import UserError
from certvol.files import check_regular
from certvol.review.sampling import Item
from certvol.review.target import ReviewTarget
from certvol.runs.outputs import check_output, write_output
from certvol.runs.review_labels import COLUMNS, Review, clean_path, parse_review
from certvol.runs.tables import csv_text, label_cell
from certvol.settings import nearest

NONE_WORDS, UNSURE_WORDS = "None of these classes", "Not sure"
MOST_BYTES = 1 << 30


def export(target: ReviewTarget, items: Sequence[Item], out: str | Path) -> list[Path]:
    """Write the images to label as `.json` (with a labelling interface as `.xml`) or `.csv`."""
    place = Path(out)
    if place.suffix.lower() not in (".json", ".csv"):
        raise UserError(f"--export writes .json or .csv, found {printable(str(out))}")
    check_output(place, "--export")
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


def _interface(classes: Sequence[str]) -> str:
    choices = [*classes, NONE_WORDS, UNSURE_WORDS]
    lines = "".join(f"    <Choice value={quoteattr(name)}/>\n" for name in choices)
    return (
        '<View>\n  <Image name="image" value="$image"/>\n'
        '  <Filter name="filter" toName="label" hotkey="shift+f"/>\n'
        '  <Choices name="label" toName="image" choice="single" showInline="true">\n'
        f"{lines}  </Choices>\n</View>\n"
    )


def read_answers(path: str | Path, target: ReviewTarget) -> list[Review]:
    """Read what another tool wrote; every path has to be a target image of the run."""
    shown = printable(str(path))
    try:
        check_regular(Path(path))
        with Path(path).open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise UserError(f"{shown} is larger than 1 GiB; import it in parts")
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"cannot read {shown}: {reason_of(error)}") from None
    except UnicodeDecodeError:
        raise UserError(f"{shown} is not UTF-8; save it as UTF-8") from None
    is_json = text.lstrip()[:1] in ("[", "{")
    reviews = _from_tasks(text, shown) if is_json else _from_table(text, shown)
    if not reviews:
        raise UserError(f"{shown} has no answers; label its images first")
    found = [_checked(each, shown, target) for each in reviews]
    return list({each.path: each for each in found}.values())


def _from_table(text: str, shown: str) -> list[Review]:
    return parse_review(text, shown, may_be_open=True)


def _from_tasks(text: str, shown: str) -> list[Review]:
    try:
        tasks = json.loads(text)
        if not isinstance(tasks, list):
            raise ValueError("expected a list of tasks")
        return list(_answers(tasks))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        reason = printable(" ".join(str(error).split())[:120])
        raise UserError(
            f"{shown} is not an export of Label Studio (JSON or JSON-MIN): {reason}"
        ) from None


def _answers(tasks: Iterable[dict[str, Any]]) -> Iterable[Review]:
    """Yield the answer of each task that has one; of several annotations the last one counts."""
    for task in tasks:
        about = task.get("data", task)  # JSON-MIN holds everything at one level
        label = about.get("label")
        for annotation in task.get("annotations", ()):
            if not annotation.get("was_cancelled"):
                results = [each["value"].get("choices") for each in annotation["result"]]
                label = next((choices for choices in results if choices), label)
        if isinstance(label, dict):
            label = label["choices"]
        if isinstance(label, list):
            label = label[0] if label else None
        if label is not None:
            kind = about.get("kind", "chosen")
            if kind not in ("random", "chosen"):
                raise ValueError(f"the kind `{kind}` is neither random nor chosen")
            yield Review(clean_path(str(about["path"])), str(label), kind)


def _checked(review: Review, shown: str, target: ReviewTarget) -> Review:
    """Return the review with a class of the run, or with the tool's answer that it is none."""
    if review.path not in target.row_of:
        raise UserError(
            f"{shown} names {printable(review.path)}, which is not a target image of the run"
        )
    if review.label is None:
        return review
    named = {label_cell(name): name for name in target.classes}
    label = named.get(review.label, named.get(label_cell(review.label)))
    if label is not None:
        return Review(review.path, label, review.kind)
    if review.label == NONE_WORDS:
        return Review(review.path, None, review.kind, "none")
    if review.label == UNSURE_WORDS:
        return Review(review.path, None, review.kind, "unsure")
    hint = nearest(review.label, target.classes)
    raise UserError(
        f"{shown}: `{printable(review.label)}` of {printable(review.path)} is not a class of the "
        f"run{hint}"
    )
