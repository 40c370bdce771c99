"""Call `certvol` commands and read what they say."""

import contextlib
import io
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from certvol.cli._main import run
from support.images import tiny


def words_of(settings: Mapping[str, object]) -> list[str]:
    """Return settings as they are given on the command line."""
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def adapt_words(source: Path, target: Path, out: Path, **changed: object) -> list[str]:
    """Return the arguments of `certvol adapt` for a run that takes a second."""
    places = {"source": source, "target": target, "out": out}
    return ["adapt", *words_of(places), *words_of(tiny(**changed))]


def wait_for(folder: Path, pattern: str, seconds: float = 600) -> None:
    """Wait until a file of this name is in the folder."""
    deadline = time.monotonic() + seconds
    while not list(folder.glob(pattern)):
        assert time.monotonic() < deadline, f"no {pattern} in {folder}"
        time.sleep(0.01)


def last_sentence(errors: str) -> str:
    """Return the one sentence on stderr of a command that was refused or failed."""
    assert "Traceback" not in errors
    sentences = [line for line in errors.splitlines() if line.startswith("certvol: ")]
    assert len(sentences) == 1, errors
    return sentences[0]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """Run a command that must fail and return its one sentence on stderr."""
    assert run(arguments) == code
    return last_sentence(capsys.readouterr().err)


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Everything printed, with the lines of tables joined."""
        return " ".join(re.sub("[│┃]", " ", self.out + self.err).split())


def spoken(*arguments: str) -> Said:
    """Run a command on streams like a terminal's: stdout takes only Unicode."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="strict", write_through=True)
    err = io.TextIOWrapper(
        io.BytesIO(), encoding="utf-8", errors="backslashreplace", write_through=True
    )
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(arguments)
    said = Said(code, out.buffer.getvalue().decode(), err.buffer.getvalue().decode())
    assert "Traceback" not in said.err
    return said
