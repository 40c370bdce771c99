"""Keep a run's warnings in RUN/warnings.jsonl, so that its report can show them."""

from contextlib import suppress

from certvol.progress import Reporter
from certvol.runs.checkpoint import append_line
from certvol.runs.folder import RunFolder


class KeptWarnings:
    """A reporter that also writes its warnings to a file, once the run exists."""

    def __init__(self, reporter: Reporter, run: RunFolder) -> None:
        self.reporter, self.run = reporter, run
        self.unwritten: list[str] = []
        self.say, self.note = reporter.say, reporter.note
        self.start, self.advance, self.finish = reporter.start, reporter.advance, reporter.finish

    def warn(self, text: str) -> None:
        self.reporter.warn(text)
        self.unwritten.append(text)
        self.flush()

    def flush(self) -> None:
        """Write the warnings. One that cannot be written has been shown, so the run continues."""
        if self.run.writes and self.run.holds_a_run:
            with suppress(OSError):
                for text in self.unwritten:
                    append_line(self.run.warnings, {"warning": text})
            self.unwritten.clear()
