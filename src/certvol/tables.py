"""Predictions and figures as files."""

import csv
import io
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from certvol.errors import UserError
from certvol.metrics import accuracy, mean_class_accuracy, per_class_accuracy
from certvol.training.checkpoint import write_atomically

FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")
_QUOTE = "$'"
_NO_TEXT = re.compile("[\ud800-\udfff]")


def quoted(name: str) -> str:
    """A name whose bytes are no UTF-8 as bash quotes it, $'caf\\xe9.png': so a table is always UTF-8, and the name can be told
    from it. Every other name is as it is, but for one that begins like such a quote itself."""
    if not (_NO_TEXT.search(name) or name.startswith(_QUOTE)):
        return name
    return _QUOTE + re.sub(r"[\\']|[\ud800-\udfff]", lambda found: _escape(found[0]), name) + "'"


def _escape(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is no UTF-8, as Python keeps it in a name
        return f"\\x{code - 0xDC00:02x}"
    return f"\\{character}" if code < 0x80 else f"\\u{code:04x}"


def unquoted(cell: str) -> str:
    """The name that `quoted` was given."""
    if not (cell.startswith(_QUOTE) and cell.endswith("'")):
        return cell
    return re.sub(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|(.))", _unescape, cell[len(_QUOTE) : -1], flags=re.DOTALL)


def _unescape(found: re.Match[str]) -> str:
    byte, code, character = found.groups()
    if byte is not None:
        return chr(0xDC00 + int(byte, 16))
    return chr(int(code, 16)) if code is not None else str(character)


def name_cell(name: str, mark: str) -> str:
    """A name from outside: text in any case, and with `mark` before it where a spreadsheet would run it."""
    cell = quoted(name)
    return mark + cell if cell.startswith(FORMULA_SIGNS) else cell


def csv_text(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Names that come from outside have passed `name_cell`."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    # Python before 3.13 leaves a CR unquoted where lines end with LF alone, and readers take it for the end of a line.
    quoting = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerow(header)
    for row in rows:
        (quoting if any("\r" in cell for cell in row) else writer).writerow(row)
    return text.getvalue()


class Predicted(Protocol):
    """Of N images."""

    @property
    def labels_N(self) -> NDArray[np.int64]: ...
    @property
    def confidence_N(self) -> NDArray[np.float32]: ...
    @property
    def sigma_N(self) -> NDArray[np.float32] | None: ...


def predictions_csv(
    paths: list[str],
    classes: list[str],
    outputs: Predicted,
    accepted: NDArray[np.bool_] | None = None,
    measure: tuple[str, NDArray[np.float32]] | None = None,
) -> str:
    """path,label,probability,sigma, in the order of the paths; sigma is empty for a method without one. `measure`: a column more.

    Nine digits, so that a threshold read back is the float it was.
    """
    header = ["path", "label", "probability", "sigma"]
    header += [measure[0]] if measure is not None else []
    header += ["accepted"] if accepted is not None else []
    labels, confidence, sigma_N = outputs.labels_N, outputs.confidence_N, outputs.sigma_N

    def cells(i: int) -> list[str]:
        sigma = "" if sigma_N is None else f"{sigma_N[i]:.9g}"
        # With ./ before it a path still leads to the file.
        row = [name_cell(paths[i], "./"), name_cell(classes[labels[i]], "'"), f"{confidence[i]:.9g}", sigma]
        row += [f"{measure[1][i]:.9g}"] if measure is not None else []
        return row + ([str(bool(accepted[i])).lower()] if accepted is not None else [])

    return csv_text(header, map(cells, sorted(range(len(paths)), key=paths.__getitem__)))


def write_text(path: Path, text: str) -> None:
    """Settings may hold paths that are not valid Unicode: they keep their bytes."""
    write_atomically(path, text.encode("utf-8", "surrogateescape"))


def write_text_anywhere(path: Path, text: str) -> None:
    """Where the user wants it; folders on the way are made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def figures(predicted_N: NDArray[np.int64], true_N: NDArray[np.int64], classes: list[str]) -> dict[str, Any]:
    per_class = per_class_accuracy(predicted_N, true_N, len(classes))
    return {
        "accuracy": accuracy(predicted_N, true_N),
        "mean_class_accuracy": mean_class_accuracy(predicted_N, true_N, len(classes)),
        "per_class": {name: None if np.isnan(a) else float(a) for name, a in zip(classes, per_class, strict=True)},
        "images": len(true_N),
    }


def read_metrics(path: Path) -> dict[str, Any]:
    """ValueError, KeyError, TypeError or RecursionError where they are not those of a run."""
    found = json.loads(path.read_text(encoding="utf-8"))
    for key in ("source_only", "adapted"):
        float(found[key]["accuracy"]), float(found[key]["mean_class_accuracy"])
    if not isinstance(found["delivered"], dict):
        raise TypeError("`delivered` is no section")
    return dict(found)


def read_column(path: Path, name: str) -> list[str]:
    with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        return [row[name] for row in csv.DictReader(file)]
