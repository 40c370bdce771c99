"""Read a measure of every target image of a run, and check that its tables belong together."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from certvol.errors import UserError
from certvol.runs.folder import RunFolder
from certvol.runs.tables import damaged, read_column

IN_PREDICTIONS = ("probability", "sigma")  # the measures that predictions.csv holds


def target_values(
    run: str | Path, measure: str, option: str
) -> tuple[list[str], NDArray[np.float32]]:
    """Read path and measure of every target image of a run, in the order of predictions.csv.

    Tables whose rows do not agree are refused. `option` names what needs them, in errors.
    """
    folder = RunFolder(run)
    # predictions.csv rounds the probability.
    table = folder.predictions if measure == "sigma" else folder.measures
    if not table.exists():
        raise UserError(f"{option} by {measure} needs {table}, which is missing")
    paths = read_column(table, "path")
    try:
        values_N = np.array([float(cell) for cell in read_column(table, measure)], dtype=np.float32)
        if len(values_N) == 0 or not np.isfinite(values_N).all():
            raise ValueError(f"no numbers under `{measure}`")
    except ValueError as error:
        raise damaged(table, error) from None
    for other in (folder.predictions, folder.measures):
        if other != table and other.exists():
            check_same_rows(table, paths, read_column(other, "path"))
    return paths, values_N


def check_same_rows(table: Path, paths: Sequence[str], others: Sequence[str]) -> None:
    """Refuse a table that was sorted or cut: predictions and measures are joined by row."""
    if list(paths) != list(others):
        raise damaged(table, "predictions.csv and measures.csv have other rows or another order")
