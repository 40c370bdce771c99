"""Print a benchmark's tables."""

import re
import sys
from collections.abc import Sequence

from rich.console import Console, JustifyMethod
from rich.table import Table as RichTable
from rich.text import Text

from certvol.benchmark.table_formats import Table

WIDTH_OF_FILES = 160  # if stdout is not a terminal
STYLES = ("", "bold", "underline")  # by rank


def show_tables(tables: Sequence[Table]) -> None:
    room = Console().width if sys.stdout.isatty() else WIDTH_OF_FILES
    for table in tables:
        shown = RichTable(title=Text(table.title), title_justify="left", title_style="bold")
        widths = column_widths(table, room)
        for number, (column, width) in enumerate(zip(["", *table.columns], widths, strict=True)):
            side: JustifyMethod = "left" if number <= table.text_columns else "right"
            shown.add_column(Text(column), justify=side, width=width, overflow="fold")
        for number, row in enumerate(table.rows):
            if row.published and (number == 0 or not table.rows[number - 1].published):
                shown.add_section()
            cells = [Text(cell.shown(), STYLES[cell.rank]) for cell in row.cells]
            shown.add_row(Text(row.name, "italic" if row.published else ""), *cells)
        # On a terminal that is too narrow, lines wrap; numbers do not.
        console = Console(highlight=False, width=max(room, sum(widths) + _borders(widths)))
        console.print(shown, soft_wrap=True)
        for note in table.notes:
            console.print(Text(note, "dim"), width=room)


def column_widths(table: Table, room: int) -> list[int]:
    """Return the widths of the names and of the columns, to fit into `room` if possible.

    Text is broken between words, but a number and its deviation stay on one line.
    """
    columns = [["", *(row.name for row in table.rows)]]
    for number, column in enumerate(table.columns):
        columns.append([column, *(row.cells[number].shown() for row in table.rows)])
    natural = [max(map(len, texts)) for texts in columns]
    breaks = re.compile(r"(?<!±)\s+(?!±)")
    widths = [max(len(part) for text in texts for part in breaks.split(text)) for texts in columns]
    while sum(widths) + _borders(widths) < room and widths != natural:
        tightest = max(range(len(widths)), key=lambda i: natural[i] - widths[i])
        widths[tightest] += 1
    return widths


def _borders(widths: Sequence[int]) -> int:
    return 3 * len(widths) + 1
