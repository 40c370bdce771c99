"""Read the tables that commands write."""

import csv
from collections.abc import Iterable
from pathlib import Path


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, strict=True))
    assert all(None not in row not in row.values() for row in rows)
    return rows


def as_text(names: Iterable[bytes]) -> set[str]:
    """The names as tables write them."""
    return {name.decode("utf-8", "backslashreplace") for name in names}


def paths_of(path: Path, below: Path | None = None) -> list[str]:
    """The paths in a table, without the `./` before a path that looks like a formula."""
    found = [row["path"].removeprefix("./") for row in rows_of(path)]
    return found if below is None else [name.removeprefix(f"{below}/") for name in found]
