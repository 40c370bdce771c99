"""Warnings of a run, kept beside it: a terminal scrolls away, the report still shows them."""

from certvol.reporting import Reporter
from certvol.training.checkpoint import append_line
from certvol.training.run_folder import RunFolder


class KeptWarnings:
    """A reporter that also writes what it warns of to RUN/warnings.jsonl, from the moment there is a run to write to."""

    def __init__(self, reporter: Reporter, run: RunFolder) -> None:
        self.reporter, self.run = reporter, run
        self.waiting: list[str] = []

    def warn(self, text: str) -> None:
        self.reporter.warn(text)
        self.waiting.append(text)
        self.flush()

    def flush(self) -> None:
        """A warning that cannot be kept was still shown: it is never what ends a run."""
        if not (self.run.writes and self.run.holds_a_run):
            return
        try:
            for text in self.waiting:
                append_line(self.run.path / "warnings.jsonl", {"warning": text})
        except OSError:
            pass
        self.waiting.clear()

    def say(self, text: str) -> None:
        self.reporter.say(text)

    def note(self, text: str) -> None:
        self.reporter.note(text)

    def start(self, what: str, total: int, done: int = 0) -> None:
        self.reporter.start(what, total, done)

    def advance(self, n: int = 1) -> None:
        self.reporter.advance(n)

    def finish(self) -> None:
        self.reporter.finish()
