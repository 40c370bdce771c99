"""Write names as cells of a table.

Bytes of a name that are not UTF-8 are written as by Python's error handler `backslashreplace`:
`caf\\xe9.jpg`.
"""

import unicodedata
from collections.abc import Iterable, Sequence

from certvol.data.folders import printable
from certvol.errors import UserError

FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")


def path_cell(path: str) -> str:
    """Return a cell that no spreadsheet runs as a formula; with `./` the path stays valid."""
    return _cell(path, "./")


def label_cell(label: str) -> str:
    """Return a cell that no spreadsheet runs as a formula."""
    return _cell(label, "'")


def _cell(name: str, mark: str) -> str:
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return mark + text if text.startswith(FORMULA_SIGNS) else text


def classes_alike(classes: Sequence[str]) -> str | None:
    """Describe two classes that tables write alike, so that their labels could not be told apart.

    None if all cells differ.
    """
    name_of: dict[str, str] = {}
    for name in classes:
        other = name_of.setdefault(label_cell(name), name)
        if other != name:
            return (
                f"the classes `{printable(other)}` and `{printable(name)}` are both written "
                f"`{printable(label_cell(name))}` in tables; rename one of them"
            )
    return None


def nearly_alike(classes: Iterable[str]) -> list[str]:
    """Describe the classes whose names differ only in how they are written, a sentence a group."""
    groups: dict[str, list[str]] = {}
    for name in classes:
        plain = " ".join(unicodedata.normalize("NFC", name).casefold().split())
        groups.setdefault(plain, []).append(name)
    shown = [", ".join(repr(printable(name)) for name in names) for names in groups.values()]
    return [
        f"the names of the classes {names} differ only in case, in spaces or in how an accent is "
        "written; merge the folders if they mean the same"
        for names, group in zip(shown, groups.values(), strict=True)
        if len(group) > 1
    ]


def check_classes(classes: Sequence[str]) -> None:
    if (alike := classes_alike(classes)) is not None:
        raise UserError(alike)
