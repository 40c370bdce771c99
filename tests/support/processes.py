"""Run `certvol` in processes of their own that need not import torch again.

A server imports certvol once and forks itself for every process, which saves four seconds each. A
process has its own memory, files and signals, as one started by a user has. Tests of start-up start
an interpreter instead.
"""

import io
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

IMPORTED = [
    *("certvol.__main__", "certvol.cli._main", "certvol.cli._console", "certvol.api"),
    *(f"certvol.cli.{name}" for name in ("adapt", "benchmark", "check", "review")),
    *("certvol.methods", "certvol.training.pseudo_labels", "certvol.training.setup"),
    *("certvol.report.page", "certvol.report.run_page", "certvol.report.embedding"),
    *("torch._dynamo", "torch.distributed.nn.functional", "sklearn.manifold"),
]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(IMPORTED)


@dataclass(frozen=True)
class Surroundings:
    """What a process finds: environment variables, folder, and files for what it prints."""

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    stdout: str = os.devnull
    stderr: str = os.devnull
    folder: str = field(default_factory=os.getcwd)


class Forked:
    """A stand-in for `subprocess.Popen([sys.executable, *words])`."""

    def __init__(self, words: Sequence[str], surroundings: Surroundings) -> None:
        self._words, self._surroundings = list(words), surroundings
        # A daemon ends with the tests. It may start processes, but none of `multiprocessing`.
        self._process = CONTEXT.Process(target=_run, args=(words, surroundings), daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def errors(self) -> str:
        return Path(self._surroundings.stderr).read_text(errors="replace")

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._words, timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(words: Sequence[str], surroundings: Surroundings) -> None:
    """Do what `python -m certvol ...` or `python -c PROGRAM ...` does."""
    import torch

    from certvol.__main__ import main

    os.environ.clear()
    os.environ.update(surroundings.environment)
    os.chdir(surroundings.folder)
    for number, place in ((1, surroundings.stdout), (2, surroundings.stderr)):
        opened = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(io.FileIO(number, "w", closefd=False), write_through=True)
        for number in (1, 2)
    )
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    how, what, *arguments = words
    sys.argv = [how, *arguments]
    if how == "-c":
        exec(compile(what, "<program>", "exec"), {"__name__": "__main__"})
    else:
        assert (how, what) == ("-m", "certvol")
        main()
