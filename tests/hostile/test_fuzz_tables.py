"""Any file and class names make a valid predictions.csv."""

import csv
import io
import os
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from certvol.data.cells import FORMULA_SIGNS
from certvol.predict.forward import Outputs
from certvol.predict.outcome import predictions_csv
from certvol.runs.tables import label_cell, path_cell, read_column, write_text
from support.fuzz import fuzz

# Any bytes but NUL and the slash, as a file system returns them.
file_names = st.one_of(
    st.binary(min_size=1, max_size=12).map(
        lambda raw: raw.replace(b"\0", b"_").replace(b"/", b"|")
    ),
    st.text(
        st.characters(exclude_characters="\0/", exclude_categories=["Cs"]), min_size=1, max_size=8
    ).map(str.encode),
    st.lists(
        st.sampled_from([bytes([c]) for c in b"=+-@\t\r\n\"',; a\xff\\"] + [b"./", b"$'"]),
        min_size=1,
        max_size=6,
    ).map(b"".join),
).map(os.fsdecode)


def table_of(paths: list[str], classes: list[str]) -> str:
    rng = np.random.default_rng(len(paths))
    probabilities = rng.random((len(paths), len(classes))).astype(np.float32)
    return predictions_csv(
        paths, classes, Outputs(probabilities, rng.normal(size=len(paths)).astype(np.float32))
    )


@fuzz(300)
@given(
    paths=st.lists(file_names, min_size=1, max_size=6, unique=True),
    classes=st.lists(file_names, min_size=1, max_size=4, unique=True),
)
def test_any_names_make_a_valid_predictions_csv(paths: list[str], classes: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "predictions.csv"
        write_text(file, table_of(paths, classes))
        with file.open(encoding="utf-8", newline="") as opened:
            rows = list(csv.reader(opened, strict=True))
        assert rows[0] == ["path", "label", "probability", "sigma"]
        assert [len(row) for row in rows] == [4] * (len(paths) + 1)
        assert sorted(row[0] for row in rows[1:]) == sorted(map(path_cell, paths))
        assert {row[1] for row in rows[1:]} <= set(map(label_cell, classes))
        assert read_column(file, "path") == [row[0] for row in rows[1:]]


@fuzz(300)
@given(
    paths=st.lists(file_names, min_size=1, max_size=6, unique=True),
    classes=st.lists(file_names, min_size=1, max_size=4, unique=True),
)
def test_no_cell_of_predictions_csv_is_a_formula(paths: list[str], classes: list[str]) -> None:
    """A spreadsheet may read CR as the end of a line. Negative numbers are not formulas."""
    for text in (table_of(paths, classes), table_of(paths, classes).replace("\r", "\n")):
        for row in csv.reader(io.StringIO(text, newline="")):
            assert not [cell for cell in row[:2] if cell.startswith(FORMULA_SIGNS)], row
