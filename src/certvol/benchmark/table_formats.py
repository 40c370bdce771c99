"""Write a table of results as Markdown, LaTeX and CSV."""

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from certvol.progress import percent
from certvol.runs.tables import csv_text


@dataclass(frozen=True)
class Cell:
    """A mean with its deviation, or text."""

    mean: float | None = None
    """A fraction; shown in percent."""
    deviation: float | None = None
    count: int = 0
    text: str = ""
    """Shown instead of the mean."""
    rank: int = 0
    """1: best of its column; 2: second best."""

    def shown(self) -> str:
        if self.text or self.mean is None:
            return self.text
        spread = "" if self.deviation is None else f" ± {percent(self.deviation)}"
        return f"{percent(self.mean)}{spread}"


@dataclass(frozen=True)
class Row:
    name: str
    cells: list[Cell]
    published: bool = False


@dataclass(frozen=True)
class Table:
    title: str
    columns: list[str]
    rows: list[Row]
    text_columns: int = 0
    """Number of columns after the row's name that hold text."""
    notes: list[str] = field(default_factory=list)


def mean_and_deviation(values: Sequence[float]) -> Cell:
    """Return mean and sample deviation (n - 1); a single value has no deviation."""
    if not values:
        return Cell()
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Cell(statistics.fmean(values), deviation, len(values))


def markdown(tables: Sequence[Table]) -> str:
    return "\n".join(_markdown(table) for table in tables)


def _markdown(table: Table) -> str:
    marks = ("{}", "**{}**", "<u>{}</u>")
    head = f"| | {' | '.join(table.columns)} |"
    lines = [f"## {table.title}", "", head, "|---" * (1 + len(table.columns)) + "|"]
    for row in table.rows:
        name = f"*{row.name}*" if row.published else row.name
        cells = [marks[cell.rank].format(cell.shown()).replace("|", "\\|") for cell in row.cells]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"- {note}" for note in table.notes), ""])


_LATEX = {
    "\\": r"\textbackslash{}",
    "±": r"$\pm$",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    **{sign: f"${sign}$" for sign in "<>|"},  # LaTeX's text fonts show other signs for these
}


def escape_latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def latex(tables: Sequence[Table]) -> str:
    head = "% needs \\usepackage{booktabs}\n"
    return head + "\n".join(_latex(table) for table in tables)


def _latex(table: Table) -> str:
    marks = ("%s", r"\textbf{%s}", r"\underline{%s}")
    alignment = "l" * (1 + table.text_columns) + "r" * (len(table.columns) - table.text_columns)
    lines = [f"% {table.title}", f"\\begin{{tabular}}{{{alignment}}}", "\\toprule"]
    lines += [" & ".join(["", *map(escape_latex, table.columns)]) + r" \\", "\\midrule"]
    for number, row in enumerate(table.rows):
        if row.published and (number == 0 or not table.rows[number - 1].published):
            lines.append("\\midrule")
        name = (r"\textit{%s}" if row.published else "%s") % escape_latex(row.name)
        cells = [marks[cell.rank] % escape_latex(cell.shown()) for cell in row.cells]
        lines.append(" & ".join([name, *cells]) + r" \\")
    lines += ["\\bottomrule", "\\end{tabular}", *(f"% {note}" for note in table.notes)]
    return "\n".join(lines) + "\n"


def long_csv(tables: Sequence[Table]) -> str:
    """Write one line per cell, with means as fractions."""
    rows = []
    for table in tables:
        for row in table.rows:
            about = [table.title, row.name, str(row.published).lower()]
            for column, cell in zip(table.columns, row.cells, strict=True):
                numbers = ["" if v is None else f"{v:.6f}" for v in (cell.mean, cell.deviation)]
                shown = _spreadsheet_text(cell.text)
                rows.append([*about, column, *numbers, str(cell.count or ""), shown])
    return csv_text("table row published column mean deviation count text".split(), rows)


def _spreadsheet_text(text: str) -> str:
    """Mark text with an apostrophe if a spreadsheet would run it as a formula; keep numbers."""
    if re.fullmatch(r"[+-]?\d+(\.\d+)?", text):
        return text.removeprefix("+")
    return f"'{text}" if text.startswith(("+", "-", "=", "@")) else text
