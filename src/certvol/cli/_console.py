"""Progress bars, messages and tables on a terminal; plain lines elsewhere."""

import sys
import time
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from certvol.cli._process import QuietStderr
from certvol.data.folders import printable as printable
from certvol.progress import duration, percent

PLAIN_SECONDS = 5.0  # between two plain progress lines
FEWEST_TIMED = 10  # steps: the first take longer than the rest
PIPE_WIDTH = 120  # of a table that is not printed on a terminal
ACCURACY_COLUMNS = ["", "all images", "mean of classes"]


class ConsoleReporter:
    """Reports on stderr, so that the output of a command can be piped."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(
            file=cast(TextIO, QuietStderr()), highlight=False, soft_wrap=True
        )
        self.bar: Progress | None = None
        self.task = TaskID(0)
        self.what, self.text = "", ""
        self.total = self.before = self.done = 0
        self.started = self.printed = 0.0
        self.last_printed = -1  # `done` in the last plain line

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def warn(self, text: str) -> None:
        self.console.print(f"warning: {text}", markup=False, style="yellow")

    def start(self, what: str, total: int, done: int = 0) -> None:
        self.finish()
        self.what, self.total, self.text = what, total, ""
        self.before = self.done = done
        self.last_printed = -1
        self.started = self.printed = time.monotonic()
        if self.console.is_terminal:
            self.bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=12),
                MofNCompleteColumn(),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.fields[note]}", markup=False),
                console=self.console,
                # A redirected stderr would write to our console, which writes to stderr.
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self.bar.start()
            self.task = self.bar.add_task(what, total=total, completed=done, note="")

    def advance(self, n: int = 1) -> None:
        self.done += n
        if self.bar is not None:
            self.bar.advance(self.task, n)
        elif time.monotonic() - self.printed > PLAIN_SECONDS:
            self._print_line()

    def note(self, text: str) -> None:
        self.text = text
        if self.bar is not None:
            self.bar.update(self.task, note=text)

    def _print_line(self) -> None:
        self.printed, self.last_printed = time.monotonic(), self.done
        elapsed, done_here = self.printed - self.started, self.done - self.before
        ending = ""
        if self.done >= self.total:
            ending = f", {duration(elapsed)}"
        elif done_here >= FEWEST_TIMED:
            ending = f", {duration(elapsed / done_here * (self.total - self.done))} left"
        note = f"  {self.text}" if self.text else ""
        self.say(f"{self.what}: {self.done}/{self.total}{ending}{note}")

    def finish(self) -> None:
        complete_line = self.last_printed == self.done == self.total
        if self.bar is None and self.what and self.total > 0 and not complete_line:
            self._print_line()
        self.close()

    def close(self) -> None:
        """Remove the bar, which hides the terminal's cursor."""
        if self.bar is not None:
            self.bar.stop()
        self.bar, self.what, self.total = None, "", 0


def print_table(
    title: str, columns: list[str], rows: list[list[str]], text_columns: int = 1
) -> None:
    """Print a table on stdout; columns after the first `text_columns` are aligned right."""
    table = Table()
    for number, column in enumerate(columns):
        justify = "left" if number < text_columns else "right"
        table.add_column(Text(printable(column)), justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)
    # Not as the table's title, which rich would wrap to the width of the table.
    console.print(Text(printable(title), style="bold"))
    console.print(table)


def accuracy_rows(metrics: dict[str, Any]) -> list[list[str]]:
    """Return rows for `ACCURACY_COLUMNS`: the pretrained model, and the adapted if delivered."""
    names = {"source_only": "before adaptation", "adapted": "after adaptation"}
    if metrics.get("delivered", {}).get("model") == "pretrained":
        del names["adapted"]
    return [
        [name, percent(metrics[key]["accuracy"]), percent(metrics[key]["mean_class_accuracy"])]
        for key, name in names.items()
    ]
