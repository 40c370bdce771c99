"""A reporter for tests."""

from certvol.progress import Silent


class RecordingReporter(Silent):
    """Collect messages and warnings."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.warned: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def warn(self, text: str) -> None:
        self.warned.append(text)
