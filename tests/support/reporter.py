"""A reporter for tests."""

from certvol.progress import Silent


class RecordingReporter(Silent):
    """Collect messages, warnings and progress."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.warned: list[str] = []
        self.events: list[tuple[str, int]] = []
        """(text, total) at the start of a bar, ("finish", steps) at its end."""
        self.advanced = 0

    def say(self, text: str) -> None:
        self.said.append(text)

    def warn(self, text: str) -> None:
        self.warned.append(text)

    def start(self, what: str, total: int, done: int = 0) -> None:
        self.events.append((what, total))
        self.advanced += done

    def advance(self, n: int = 1) -> None:
        self.advanced += n

    def finish(self) -> None:
        self.events.append(("finish", self.advanced))
