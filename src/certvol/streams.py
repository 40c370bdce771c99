"""Standard streams that fail: closed by the caller, a pipe nobody reads, a log on a full disk, a terminal that is gone."""

import contextlib
import io
import os
import sys
from typing import TextIO


def open_closed_streams() -> None:
    """Where a caller closed one (`>&-`), Python has none to print to, and the next file that is opened would take its number
    and all that is printed there."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115


def escape_the_unprintable() -> None:
    """Names that a terminal's or a pipe's encoding has no letters for are escaped, as stderr does."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def silence(stream: TextIO) -> None:
    """What it still holds goes nowhere: else Python tries once more at exit, complains, and exits with 120."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class LastingStderr(io.TextIOBase):
    """Stderr as it is at each moment. Lines that cannot be written are lost: no line of progress is worth a run."""

    def write(self, text: str) -> int:
        try:
            return sys.stderr.write(text)
        except OSError:
            silence(sys.stderr)
            return len(text)

    def flush(self) -> None:
        try:
            sys.stderr.flush()
        except OSError:
            silence(sys.stderr)

    def isatty(self) -> bool:
        return sys.stderr.isatty()

    def fileno(self) -> int:
        return sys.stderr.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return sys.stderr.encoding
