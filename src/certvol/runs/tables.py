"""Write and read CSV tables and text files.

Tables are always UTF-8. Bytes of a name that are not UTF-8 are written as by Python's error handler
`backslashreplace`: `caf\\xe9.jpg`.
"""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from certvol.data.cells import label_cell as label_cell
from certvol.data.cells import path_cell as path_cell
from certvol.data.folders import printable
from certvol.errors import RunFailed, UserError
from certvol.files import write_atomically


def csv_text(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    # Python before 3.13 does not quote a CR, and readers take it for the end of a line.
    quoting = csv.writer(text, lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writerow(header)
    for row in rows:
        (quoting if any("\r" in cell for cell in row) else writer).writerow(row)
    return text.getvalue()


def read_column(table: Path, name: str) -> list[str]:
    """Return the cells of a column; UserError if the table is damaged."""
    try:
        with table.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
            cells = [row[name] for row in csv.DictReader(file)]
    except (OSError, ValueError, KeyError, csv.Error) as error:
        raise damaged(table, error) from None
    if None in cells:  # a row that is cut off
        raise damaged(table, f"a row has no `{name}`")
    return cells


def damaged(table: Path, reason: object) -> UserError:
    return UserError(f"the table {printable(table)} is damaged: {reason}")


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically; paths in it that are not Unicode keep their bytes."""
    write_atomically(path, text.encode("utf-8", "surrogateescape"))


def json_text(content: Any, **layout: Any) -> str:
    """Format JSON; raise RunFailed for NaN or infinity, which JSON cannot hold."""
    try:
        return json.dumps(content, allow_nan=False, **layout) + "\n"
    except ValueError:
        raise RunFailed(
            "a figure is not a finite number, so no file is written; check the images or features"
        ) from None


def read_metrics(path: Path) -> dict[str, Any]:
    """Read metrics.json; raises ValueError, KeyError, TypeError or RecursionError if damaged."""
    found = json.loads(path.read_text(encoding="utf-8"))
    for key in ("source_only", "adapted"):
        for figure in ("accuracy", "mean_class_accuracy"):
            if not 0 <= found[key][figure] <= 1:
                raise ValueError(f"`{figure}` of `{key}` is not a share")
    if not isinstance(found["delivered"], dict):
        raise TypeError("`delivered` is not a section")
    return dict(found)
