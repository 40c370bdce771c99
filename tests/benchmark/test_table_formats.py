import csv

import pytest

from certvol.benchmark.table_formats import (
    Cell,
    Row,
    Table,
    escape_latex,
    latex,
    long_csv,
    markdown,
    mean_and_deviation,
)

ROWS = [
    Row("basic", [Cell(text="a_b"), Cell(0.82, 0.02, 3, rank=2)]),
    Row("cvp", [Cell(text="a_b"), Cell(0.86, 0.01, 3, rank=1)]),
    Row("DANN", [Cell(text="oracle"), Cell(0.5)], published=True),
    Row("MDD", [Cell(text="oracle"), Cell()], published=True),
]
TABLE = Table("accuracy, %", ["backbone", "A-W"], ROWS, 1, ["A note."])


def test_a_cell_shows_percent_or_text() -> None:
    assert Cell().shown() == ""
    assert Cell(0.5).shown() == "50.0"
    assert Cell(0.5, 0.01).shown() == "50.0 ± 1.0"
    assert Cell(0.5, text="words").shown() == "words"
    assert mean_and_deviation([0.2, 0.4]).deviation == pytest.approx(0.1414, abs=1e-3)
    assert mean_and_deviation([0.2]).deviation is None
    assert mean_and_deviation([]) == Cell()


def test_markdown_marks_best_second_and_published() -> None:
    assert markdown([TABLE]) == (
        "## accuracy, %\n\n"
        "| | backbone | A-W |\n|---|---|---|\n"
        "| basic | a_b | <u>82.0 ± 2.0</u> |\n"
        "| cvp | a_b | **86.0 ± 1.0** |\n"
        "| *DANN* | oracle | 50.0 |\n"
        "| *MDD* | oracle |  |\n\n"
        "- A note.\n"
    )


def test_latex_escapes_marks_and_separates_published_rows() -> None:
    lines = latex([TABLE]).splitlines()
    assert r"\begin{tabular}{llr}" in lines
    assert r"basic & a\_b & \underline{82.0 $\pm$ 2.0} \\" in lines
    assert r"cvp & a\_b & \textbf{86.0 $\pm$ 1.0} \\" in lines
    assert lines.count(r"\midrule") == 2, "below the head, and above the published rows"
    assert lines[lines.index(r"\textit{DANN} & oracle & 50.0 \\") - 1] == r"\midrule"
    assert "% accuracy, %" in lines, "comments are not escaped"
    assert escape_latex("< 0.001 | a_b ± 1") == r"$<$ 0.001 $|$ a\_b $\pm$ 1"


def test_the_csv_has_a_line_per_cell() -> None:
    lines = list(csv.DictReader(long_csv([TABLE]).splitlines()))
    assert len(lines) == 8
    mine = next(line for line in lines if line["row"] == "cvp" and line["column"] == "A-W")
    numbers = (mine["mean"], mine["deviation"], mine["count"], mine["published"])
    assert numbers == ("0.860000", "0.010000", "3", "false")


def test_the_csv_keeps_numbers_and_marks_formulas_as_text() -> None:
    words = ["+0.64", "-0.36", "+1", "+3.0 ± 0.1 points", "-x", "=1+1", "@a", "0.5", ""]
    table = Table("t", words, [Row("r", [Cell(text=word) for word in words])])
    lines = csv.DictReader(long_csv([table]).splitlines())
    expected = ["0.64", "-0.36", "1", "'+3.0 ± 0.1 points", "'-x", "'=1+1", "'@a", "0.5", ""]
    assert [line["text"] for line in lines] == expected
