"""What the library asks of its caller: show progress, print messages, say when to stop.

Also measures processor time, and formats durations and percentages the same way everywhere.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from certvol.errors import UserError


class Progress(Protocol):
    """A progress bar for a long piece of work."""

    def start(self, what: str, total: int, done: int = 0) -> None:
        """Start the bar; `done` steps were finished earlier and do not count towards the speed."""

    def advance(self, n: int = 1) -> None: ...
    def finish(self) -> None: ...


class Reporter(Progress, Protocol):
    """A progress bar that also prints messages; `note` puts a text beside the bar."""

    def say(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...
    def note(self, text: str) -> None: ...


class Silent:
    """A reporter that shows nothing."""

    def say(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...
    def note(self, text: str) -> None: ...
    def start(self, what: str, total: int, done: int = 0) -> None: ...
    def advance(self, n: int = 1) -> None: ...
    def finish(self) -> None: ...


class StopSignal:
    """A call returns the signal that asks the work to stop, or None; this one never stops."""

    def __call__(self) -> int | None:
        return None

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Only remember signals inside the block, so that its code can save before it stops."""
        yield


def cpu_seconds() -> float:
    """Return the processor time of this process, its threads and its ended children so far."""
    return sum(os.times()[:4])


def place_in_team() -> tuple[int, int]:
    """Return this process's number, and how many torchrun started; (0, 1) without torchrun."""
    size = os.environ.get("WORLD_SIZE", "1")
    if size == "1":
        return 0, 1
    names = ("RANK", "MASTER_ADDR", "MASTER_PORT")
    if (missing := next((name for name in names if not os.environ.get(name)), None)) is not None:
        raise UserError(
            f"WORLD_SIZE is {size[:20]}, but {missing} is not set; start several processes with "
            "torchrun, or unset WORLD_SIZE"
        )
    rank = os.environ["RANK"]
    if not (size.isdecimal() and rank.isdecimal() and int(rank) < int(size)):
        raise UserError(
            f"RANK {rank[:20]} is not valid with WORLD_SIZE {size[:20]}; start several processes "
            "with torchrun, or unset both"
        )
    return int(rank), int(size)


def duration(seconds: float) -> str:
    """Format a duration, such as `95 s`, `16 min` or `5.3 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def percent(share: float | None, decimals: int = 1) -> str:
    """Format a share as percent, without the sign: 0.875 is `87.5`, None is empty."""
    return "" if share is None else f"{100 * share:.{decimals}f}"
