"""Cells of tables."""

import os

import pytest

from certvol.runs.tables import label_cell, path_cell

NAMES = {
    b"plain.png": "plain.png",
    "日本 é😀.png".encode(): "日本 é😀.png",
    b"caf\xe9.png": r"caf\xe9.png",
    b"=\xff.png": r"./=\xff.png",
}


@pytest.mark.parametrize(("name", "cell"), NAMES.items())
def test_bytes_that_are_not_utf_8_are_escaped(name: bytes, cell: str) -> None:
    assert path_cell(os.fsdecode(name)) == cell


@pytest.mark.parametrize("sign", ["=", "+", "-", "@", "\t", "\r"])
def test_no_cell_is_a_formula(sign: str) -> None:
    assert path_cell(f"{sign}1.png") == f"./{sign}1.png"
    assert label_cell(f"{sign}1") == f"'{sign}1"
