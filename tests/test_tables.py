import csv
import io
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from certvol.inference import Outputs
from certvol.tables import predictions_csv, quoted, unquoted, write_text

PATHS = ["=cmd.png", "+1.png", "-2.png", "@x.png", "\tt.png", "a,b.png", 'q".png', "new\nline.png", "plain.png"]


def test_no_cell_is_a_formula_and_paths_still_lead_to_their_files() -> None:
    outputs = Outputs(np.tile(np.float32([[0.2, 0.8]]), (len(PATHS), 1)), np.float32(range(len(PATHS))))
    text = predictions_csv(PATHS, ["a", "=SUM(1)"], outputs)
    rows = list(csv.DictReader(io.StringIO(text)))
    for row in rows:
        assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r")) for cell in row.values())
        assert row["label"] == "'=SUM(1)"
    assert sorted(row["path"].removeprefix("./") for row in rows) == sorted(PATHS)
    assert {row["path"] for row in rows if row["path"].startswith("./")} == {f"./{p}" for p in PATHS[:5]}


def test_figures_come_back_as_the_floats_they_were() -> None:
    sigma = np.random.default_rng(0).random(50).astype(np.float32)
    text = predictions_csv([str(i) for i in range(50)], ["a"], Outputs(np.ones((50, 1), np.float32), sigma))
    read = {row["path"]: np.float32(row["sigma"]) for row in csv.DictReader(io.StringIO(text))}
    assert all(read[str(i)] == sigma[i] for i in range(50))


def test_a_method_without_sigma_leaves_the_column_empty() -> None:
    text = predictions_csv(["x"], ["a"], Outputs(np.ones((1, 1), np.float32), None))
    assert text.splitlines() == ["path,label,probability,sigma", "x,a,1,"]


NAMES = {
    b"plain.png": "plain.png",
    "日本 é😀.png".encode(): "日本 é😀.png",
    b"it's $5\\a.png": "it's $5\\a.png",
    b"caf\xe9.png": r"$'caf\xe9.png'",
    b"\xe9\xff'a\\b\n.png": "$'" + r"\xe9\xff\'a\\b" + "\n.png'",
    b"=\xff.png": r"$'=\xff.png'",
    "é\x80".encode("latin-1"): r"$'\xe9\x80'",
    rb"$'caf\xe9.png'": r"$'$\'caf\\xe9.png\''",
    b"$'": r"$'$\''",
}


@pytest.mark.parametrize(("name", "cell"), NAMES.items())
def test_a_name_of_any_bytes_is_text_in_a_table_and_comes_back(name: bytes, cell: str) -> None:
    assert quoted(os.fsdecode(name)) == cell
    assert os.fsencode(unquoted(cell)) == name
    if cell.startswith("$'"):  # what a shell makes of it
        shell = ["env", "LC_ALL=C", "bash", "-c", f"printf %s {cell}"]
        assert subprocess.run(shell, capture_output=True, check=True).stdout == name


def test_a_surrogate_that_stands_for_no_byte_is_text_too() -> None:
    assert quoted("a\ud800b") == r"$'a\ud800b'"
    assert unquoted(r"$'a\ud800b'") == "a\ud800b"


def test_a_table_of_any_names_is_utf_8_and_no_two_names_are_alike(tmp_path: Path) -> None:
    names = [os.fsdecode(name) for name in NAMES]
    probabilities = np.eye(len(names), dtype=np.float32)[::-1]
    write_text(tmp_path / "p.csv", predictions_csv(names, names, Outputs(probabilities, None)))
    with (tmp_path / "p.csv").open(encoding="utf-8", errors="strict", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {unquoted(row["path"]) for row in rows} == {unquoted(row["label"]) for row in rows} == set(names)
    assert {row["path"]: unquoted(row["label"]) for row in rows} == {
        quoted(name): other for name, other in zip(names, names[::-1], strict=True)
    }
