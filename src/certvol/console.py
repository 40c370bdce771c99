"""Progress, tables and warnings on a terminal; plain lines where there is none."""

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from certvol.data.folders import printable as printable
from certvol.streams import LastingStderr

PLAIN_SECONDS = 5.0  # between two plain progress lines

_live_bars: list[Progress] = []  # one at most, but for a moment


def end_bars() -> None:
    """Whatever ended the work: a bar that is left hides the terminal's cursor for good."""
    while _live_bars:
        _live_bars.pop().stop()


class ConsoleReporter:
    """Writes to stderr, so that what a command prints can be piped."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(file=cast(TextIO, LastingStderr()), highlight=False, soft_wrap=True)
        self.fancy = self.console.is_terminal
        self.bar: Progress | None = None
        self.task: TaskID | None = None
        self.what, self.total, self.before, self.done, self.text = "", 0, 0, 0, ""
        self.started = self.printed = 0.0
        self.shown = -1  # of `done`, in the last plain line

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def warn(self, text: str) -> None:
        self.console.print(f"warning: {text}", markup=False, style="yellow")

    def start(self, what: str, total: int, done: int = 0) -> None:
        self.finish()
        self.what, self.total, self.text = what, total, ""
        self.before = self.done = done
        self.shown = -1
        self.started = self.printed = time.monotonic()
        if self.fancy:
            self.bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=12),
                MofNCompleteColumn(),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.fields[note]}", markup=False),
                console=self.console,
                # Rich would put a stream of its own in stderr's place, which writes to our console, which writes to stderr.
                redirect_stdout=False,
                redirect_stderr=False,
            )
            _live_bars.append(self.bar)
            self.bar.start()
            self.task = self.bar.add_task(what, total=total, completed=done, note="")

    def advance(self, n: int = 1) -> None:
        self.done += n
        if self.bar is not None and self.task is not None:
            self.bar.advance(self.task, n)
        elif time.monotonic() - self.printed > PLAIN_SECONDS:
            self._plain_line()

    def note(self, text: str) -> None:
        self.text = text
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, note=text)

    def _plain_line(self) -> None:
        self.printed, self.shown = time.monotonic(), self.done
        elapsed = self.printed - self.started
        here = self.done - self.before
        if self.done >= self.total:
            ending = f", {duration(elapsed)}"
        else:
            ending = f", {duration(elapsed / here * (self.total - self.done))} left" if here > 0 else ""
        self.say(f"{self.what}: {self.done}/{self.total}{ending}{'  ' + self.text if self.text else ''}")

    def finish(self) -> None:
        if self.bar is not None:
            end_bars()
            self.bar, self.task = None, None
        elif self.total > 0 and self.what and not self.shown == self.done == self.total:
            self._plain_line()
        self.what, self.total = "", 0


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def print_table(title: str, columns: list[str], rows: list[list[str]], text_columns: int = 1) -> None:
    """On stdout. The first columns are text, the others figures. Cells are shown as they are, never as markup."""
    from rich.text import Text

    table = Table(title=Text(printable(title)), title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(Text(printable(column)), justify="left" if number < text_columns else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    width = None if sys.stdout.isatty() else 120
    Console(highlight=False, width=width).print(table)


def accuracy_rows(metrics: dict[str, Any]) -> list[list[str]]:
    """Of the pretrained model, and of the adapted one where there is another."""
    adapted = metrics.get("delivered", {}).get("model") != "pretrained"
    names = [("source only", "source_only"), *([("adapted", "adapted")] if adapted else [])]
    return [
        [name, percent(metrics[key]["accuracy"]), percent(metrics[key]["mean_class_accuracy"])] for name, key in names
    ]


def certainty_tables(found: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]], str]]:
    """(title, columns, rows, a line on how to read it) of what `analysis` found."""
    measures, shares = found["measures"], list(next(iter(found["accuracy_at_coverage"].values())))

    def figure(value: float | None) -> str:
        return "" if value is None else f"{value:.3f}"

    def rows(*columns: Any) -> list[list[str]]:
        return [
            [f"{name}: {measures[name]['title']}", *(column(name) for column in columns)] for name in found["auroc"]
        ]

    def at(share: str) -> Callable[[str], str]:
        return lambda name: percent(found["accuracy_at_coverage"][name][share])

    tables = [
        (
            "certainty: which measure knows best when the model is wrong",
            ["measure", "AUROC", "AURC", *(f"{100 * float(share):g} % kept" for share in shares)],
            rows(lambda name: figure(found["auroc"][name]), lambda name: figure(found["aurc"][name]), *map(at, shares)),
            f"AUROC: of telling right from wrong, 0.5 is chance, 1 is best. AURC: the mean error while rejecting, 0 is best, "
            f"{figure(1 - found['accuracy'])} is chance.\nLast columns: accuracy, %, of the most certain images. "
            f"Calibration error (ECE) of the probability: {figure(found['ece'])}.",
        )
    ]
    if found["correlations"] is not None:
        pearson, spearman = (found["correlations"][kind] for kind in ("pearson", "spearman"))
        tables.append(
            (
                "correlation of sigma with other measures",
                ["measure", "Pearson", "Spearman"],
                [
                    [f"{name}: {measures[name]['title']}", figure(pearson[name]), figure(spearman[name])]
                    for name in pearson
                ],
                "Every measure is turned so that more is more certain: 1 means that it says the same as sigma.",
            )
        )
    if "unknown" in found:
        unknown = found["unknown"]
        tables.append(
            (
                f"known images from {unknown['images']} unknown ones",
                ["measure", "AUROC", "FPR at 95 % TPR, %"],
                rows(lambda name: figure(unknown["auroc"][name]), lambda name: percent(unknown["fpr_at_95_tpr"][name])),
                "AUROC: 0.5 is chance, 1 is best. FPR: share of the unknown images that pass where 95 % of the known ones do.",
            )
        )
    if "oscillation" in found:
        wavering = found["oscillation"]
        tables.append(
            (
                "oscillation of the decision boundary",
                ["images", "oscillation", "least possible"],
                [[str(wavering["images"]), figure(wavering["total"]), figure(wavering["floor"])]],
                f"Changes of the predicted class on the way between two images, / {wavering['points']}, summed over all pairs. "
                "Compare methods on the same images: less is smoother.",
            )
        )
    return tables
