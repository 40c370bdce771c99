import re
import sys

import pytest

from certvol.benchmark.table_formats import Cell, Row, Table
from certvol.cli._benchmark_tables import show_tables


@pytest.mark.parametrize(("width", "used"), [(30, 133), (80, 133), (200, 140)])
def test_numbers_and_words_are_never_broken(
    width: int, used: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = [Cell(0.824, 0.0125)] * 5
    cells = [Cell(text="inception_v3.tv_in1k"), *numbers, Cell(text="+82.4 ± 1.2 points")]
    rows = [Row("cvp@method.samples_weight=0", cells), Row("SE", cells, published=True)]
    columns = ["backbone", *"ABCDE", "which is"]
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    show_tables([Table("a title of several words", columns, rows, 1, ["A note of words."])])
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    whole = next(line for line in lines if "cvp@" in line)
    assert whole.count("82.4 ± 1.2") == 6
    assert "cvp@method.samples_weight=0" in whole
    assert "inception_v3.tv_in1k" in whole
    table = [line for line in lines if line[:1] in ("┏", "┃", "┡", "│", "├", "└")]
    assert {len(line) for line in table} == {used}, "as wide as needed, and no wider"
