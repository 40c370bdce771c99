"""Read RUN/review.csv: a person's answers about target images.

A line per answer: `path,label,answer,kind`. Path and label are written as in predictions.csv.

    answer   class    the image shows `label`
             none     it shows none of the classes; `label` is empty
             unsure   the person cannot tell; `label` is empty
             undone   takes back the earlier answer about this path
    kind     random   drawn at random, so it counts when a model is judged
             chosen   chosen because its label helps training; it does not count

The last answer about a path counts. The columns `answer` and `kind` may be left out: a plain table
`path,label` holds classes of chosen images.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from certvol.data.folders import printable, reason_of
from certvol.errors import UserError
from certvol.files import check_regular
from certvol.runs.tables import label_cell, path_cell
from certvol.settings import nearest

Answer = Literal["class", "none", "unsure"]
Kind = Literal["random", "chosen"]
ANSWERS: dict[str, Answer] = {word: word for word in get_args(Answer)}
KINDS: dict[str, Kind] = {word: word for word in get_args(Kind)}
UNDONE = "undone"
MOST_BYTES = 1 << 30
COLUMNS = ("path", "label", "answer", "kind")


@dataclass(frozen=True)
class Review:
    """An answer about one image."""

    path: str
    """As in predictions.csv; compare it with `path_cell(path)` of an image."""
    label: str | None
    """The class; None if the answer is `none` or `unsure`."""
    kind: Kind = "chosen"
    answer: Answer = "class"


def read_review(
    path: str | Path, classes: Sequence[str] | None = None, may_be_torn: bool = False
) -> list[Review]:
    """Read the answers that count, in the order in which they were given.

    With `classes`, an unknown label is a UserError. With `may_be_torn`, a faulty last line without
    its end does not count: a killed process may have left it in RUN/review.csv.
    """
    text = read_answers_text(path)
    return parse_review(text, printable(path), classes, may_be_torn=may_be_torn)


def read_answers_text(path: str | Path) -> str:
    """Return the text of a file of answers; UserError if it is missing, too large or not UTF-8."""
    shown = printable(path)
    try:
        check_regular(Path(path))
        with Path(path).open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise UserError(f"{shown} is larger than 1 GiB; give it in parts")
        return data.decode("utf-8-sig")
    except FileNotFoundError:
        raise UserError(
            f"there is no file {shown} of labels; `certvol review RUN` writes RUN/review.csv"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {shown}: {reason_of(error)}") from None
    except UnicodeDecodeError:
        raise UserError(f"{shown} is not UTF-8; save it as UTF-8") from None


def parse_review(
    text: str,
    shown: str,
    classes: Sequence[str] | None = None,
    may_be_open: bool = False,
    may_be_torn: bool = False,
) -> list[Review]:
    """Parse the content of a review file; `shown` names it in errors.

    With `may_be_open`, rows that are not filled in yet are left out. With `may_be_torn`, so is a
    faulty last line without its end.
    """
    names = None if classes is None else {label_cell(name): name for name in classes}
    try:
        header, *rows = filter(None, csv.reader(io.StringIO(text, newline="")))
    except (csv.Error, ValueError) as error:
        found = "it is empty" if isinstance(error, ValueError) else str(error)
        raise UserError(f"{shown} is not a table of reviewed images: {found}") from None
    if not {"path", "label"} <= set(header) or len(set(header)) < len(header):
        raise UserError(f"{shown} should have the columns path,label, found {','.join(header)}")
    torn = may_be_torn and not text.endswith(("\n", "\r"))
    found_by_path: dict[str, Review] = {}
    for number, row in enumerate(rows, start=2):
        where = f"row {number} of {shown}"
        try:
            if len(row) != len(header) or (torn and row is rows[-1] and not row[-1]):
                raise UserError(f"{where} has {len(row)} cells instead of {len(header)}")
            cells = dict(zip(header, row, strict=True))
            if may_be_open and not cells["label"] and not cells.get("answer"):
                continue
            review = _review(cells, where, names)
        except UserError:
            if torn and row is rows[-1]:
                break
            raise
        place = clean_path(row[header.index("path")])
        found_by_path.pop(place, None)
        if review is not None:
            found_by_path[place] = review
    return list(found_by_path.values())


def has_column(text: str, name: str) -> bool:
    """Return whether a table that `parse_review` has read has this column."""
    return name in next(filter(None, csv.reader(io.StringIO(text, newline=""))))


def clean_path(cell: str) -> str:
    """Write a path as predictions.csv does, which has `./` only before a formula sign."""
    return path_cell(cell.removeprefix("./"))


def row_of_path(paths: Sequence[str]) -> dict[str, int]:
    """Return the row of each target image by its path; UserError if two have the same path."""
    rows: dict[str, int] = {}
    for row, path in enumerate(map(clean_path, paths)):
        if rows.setdefault(path, row) != row:
            raise UserError(
                f"two target images have the path {printable(path)}, and labels are given by path; "
                "make a file of features whose `paths` differ"
            )
    return rows


def review_cells(review: Review) -> tuple[str, str, str, str]:
    """Return the cells of an answer's row, in the order of `COLUMNS`."""
    return review.path, label_cell(review.label or ""), review.answer, review.kind


def _review(cells: dict[str, str], where: str, names: dict[str, str] | None) -> Review | None:
    """Return the review in a row; None if the row takes an earlier review back."""
    path, label = clean_path(cells["path"]), cells["label"]
    answer, kind = cells.get("answer") or "class", cells.get("kind") or "chosen"
    if not path:
        raise UserError(f"{where} has no path")
    if kind not in KINDS:
        raise UserError(f"{where} has the kind `{printable(kind)}`; expected random or chosen")
    if answer == UNDONE:
        return None
    if answer not in ANSWERS:
        known = ", ".join((*ANSWERS, UNDONE))
        raise UserError(f"{where} has the answer `{printable(answer)}`; expected one of {known}")
    if answer != "class":
        return Review(path, None, KINDS[kind], ANSWERS[answer])
    if names is not None:
        label = class_of_cell(label, where, names)
    if not label:
        raise UserError(f"{where} has no label; give a class, or the answer none or unsure")
    return Review(path, label, KINDS[kind])


def class_of_cell(label: str, where: str, names: dict[str, str]) -> str:
    """Return the class that a cell names, with or without the mark before a formula sign.

    `names` maps the cell of each class to its name.
    """
    found = names.get(label, names.get(label_cell(label)))
    if found is None:
        hint = nearest(label, list(names.values()))
        raise UserError(f"{where}: `{printable(label)}` is not a class of the run{hint}")
    return found
