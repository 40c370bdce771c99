"""How the library talks to whoever runs it: the command line shows bars or lines, a script may stay silent."""

from typing import Protocol


class Progress(Protocol):
    """Shows how far a long piece of work is."""

    def start(self, what: str, total: int, done: int = 0) -> None:
        """`done`: of the total, before, and so not at this pace."""

    def advance(self, n: int = 1) -> None: ...
    def finish(self) -> None: ...


class Reporter(Progress, Protocol):
    def say(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...
    def note(self, text: str) -> None: ...


class Silent:
    def say(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        pass

    def start(self, what: str, total: int, done: int = 0) -> None:
        pass

    def advance(self, n: int = 1) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def finish(self) -> None:
        pass
