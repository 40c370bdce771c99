"""Read published results from `published.json`, as rows with the columns of our tables."""

import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from statistics import fmean
from typing import Any

from certvol.benchmark.suite import Suite
from certvol.benchmark.table_formats import Cell, Row


@cache
def published() -> dict[str, Any]:
    file = resources.files("certvol.benchmark") / "published.json"
    return dict(json.loads(file.read_text(encoding="utf-8")))


def published_tables(suite: Suite) -> list[dict[str, Any]]:
    """Return the tables of a suite, each over tasks, or over the classes of its `task`."""
    return list(published()["suites"].get(suite.name, []))


def published_rows(
    suite: Suite, columns: Sequence[str], task: str | None = None
) -> tuple[list[Row], list[str]]:
    """Return rows (backbone, checkpoint, a cell per column, mean) and a note for them.

    Columns are tasks, or the classes of `task`. A table without any of them is left out.
    """
    rows, notes = [], []
    for table in published_tables(suite):
        if table.get("task") != task or not set(table["columns"]).intersection(columns):
            continue
        for row in table["rows"]:
            *cells, mean = _cells(table["columns"], row, columns)
            if mean.mean is None and (value := row["values"][-1]) is not None:
                mean = Cell(text=f"{value:.1f} (of all {len(table['columns'])})")
            about = [Cell(text=row["backbone"]), Cell(text=row["selection"])]
            by_validator_and_oracle = [Cell(), Cell()]
            rows.append(Row(row["name"], [*about, *cells, mean, *by_validator_and_oracle], True))
        notes.append(
            f"Published rows: {table['source']}; compare them only with ours on the same backbone."
        )
    return rows, notes


def published_losses(suite: Suite, tasks: Sequence[str]) -> tuple[list[Row], list[str]]:
    """Return the paper's losses: method, backbone, a cell per task, average, oscillation."""
    table = published()["losses"]
    if suite.name != table["suite"]:
        return [], []
    names, rows = table["columns"], []
    for row in table["rows"]:
        cells = [Cell(), Cell(text=table["backbone"]), *_cells(names, row, tasks)[:-1]]
        for values in (row["values"], row.get("oscillation")):
            mean = _mean_of(names, values, tasks) if values else None
            printed = f"{values[-1]:.1f} (of {', '.join(names)})" if values else ""
            cells.append(Cell(text=printed if mean is None else f"{mean:.1f}"))
        rows.append(Row(row["name"], cells, True))
    return rows, [f"Published rows: {table['source']}."]


def _cells(names: list[str], row: dict[str, Any], columns: Sequence[str]) -> list[Cell]:
    """Return a cell per column and their mean, as printed if all columns are shown."""
    values = dict(zip(names, row["values"], strict=False))
    deviations = dict(zip(names, row.get("std", []), strict=False))
    cells = [_cell(values.get(name), deviations.get(name)) for name in columns]
    deviation = None
    if set(columns) == set(names) and len(row.get("std", [])) > len(names):
        deviation = row["std"][-1]
    return [*cells, _cell(_mean_of(names, row["values"], columns), deviation)]


def _mean_of(names: list[str], values: list[float | None], columns: Sequence[str]) -> float | None:
    """Return the mean of the columns: as printed (the last value) if they are all there are."""
    if set(columns) == set(names):
        return values[-1]
    known = [value for name, value in zip(names, values, strict=False) if name in columns]
    found = [value for value in known if value is not None]
    return fmean(found) if found and len(found) == len(columns) else None


def _cell(percent: float | None, deviation: float | None) -> Cell:
    spread = None if deviation is None else deviation / 100
    return Cell(None if percent is None else percent / 100, spread)
