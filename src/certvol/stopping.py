"""Being asked to stop from outside."""

from collections.abc import Iterator
from contextlib import contextmanager


class StopSignal:
    """Calling it gives the number of the signal received, or None. This one is never asked."""

    def __call__(self) -> int | None:
        return None

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, a signal is only remembered: the code there asks for it where it can stop with everything saved."""
        yield
