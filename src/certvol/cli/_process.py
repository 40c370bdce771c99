"""Handle signals and broken streams of a command, and its place under torchrun."""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, TextIO

from certvol.errors import Interrupted, UserError
from certvol.progress import StopSignal, place_in_team


def process_rank() -> int:
    """Return the number of this process among those that torchrun started, else 0."""
    try:
        return place_in_team()[0]
    except UserError:  # `join_team` says what is wrong
        return 0


def stop_at_once(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C and SIGTERM while a command starts, and in commands without `Signals`.

    During an import, end the process: there is nothing to save yet, and the imported code may
    swallow an exception or turn it into another one.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"certvol: stopped\n")
            os._exit(128 + number)
        frame = frame.f_back
    raise Interrupted("stopped", 128 + number)


class Signals(StopSignal):
    """Raise `Interrupted` on Ctrl-C and SIGTERM; inside `deferred`, only remember the first one.

    A second signal always acts at once.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.waits = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: Any) -> None:
        if not self.waits or self.received is not None:
            raise Interrupted("stopped", 128 + number)
        self.received = number
        if process_rank() == 0:
            with contextlib.suppress(RuntimeError):  # the signal interrupted another write
                QuietStderr().write("certvol: stopping after this step ...\n")

    def __call__(self) -> int | None:
        return self.received

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        self.waits = True
        try:
            yield
        finally:
            self.waits = False


class QuietStderr(io.TextIOBase):
    """The current stderr, without errors: a run must not end because its log cannot be written.

    Ctrl-C also ends the `tee` in `certvol ... 2>&1 | tee log`, and the run still has to be saved.
    """

    def write(self, text: str) -> int:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except OSError:
            discard(sys.stderr)
        return len(text)

    def isatty(self) -> bool:
        return sys.stderr.isatty()


def discard(stream: TextIO) -> None:
    """Send the rest of a broken stream to /dev/null, so that Python can exit without an error."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
