"""The process that does a worker's jobs: `python -m certvol.benchmark.launcher PARENT`.

Each line of its input is a job, each line of its output the exit code of one; what a run prints goes to the job's log. A run
that is begun, gone on with or tried again is always started here, and is then what `certvol adapt` is. The process goes on to
the next job until one fails: so Python starts once and a network is compiled once, and no run inherits another's trouble.
It asks the system for a SIGTERM when its parent dies in whatever way: the run then saves its state and leaves its folder free.
"""

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from certvol.__main__ import run as run_command
from certvol.config import read_settings_file
from certvol.errors import UserError
from certvol.file_systems import flock

PATIENCE = 120.0  # seconds for the run's last process to save its state and go
PR_SET_PDEATHSIG = 1
COMPILED_FOR = ("model.", "augment.", "data.image_size", "training.batch", "training.precision", "training.compile")


def main(parent: int) -> int:
    with contextlib.suppress(
        OSError, AttributeError
    ):  # Linux alone has it; elsewhere a killed benchmark leaves its runs
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("certvol: the benchmark is gone")
    # The two pipes get numbers of their own, so that a run finds the usual streams, and none of its children the pipes.
    orders, replies = os.fdopen(os.dup(0), "r", encoding="ascii"), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    code, compiled = 0, Compiled()
    while code == 0 and (line := orders.readline()):
        log, run, settings, *about_run = json.loads(line)
        _print_to(log)
        compiled.keep_for(Path(settings))
        code = _do(run, settings, *about_run)
        with contextlib.suppress(BrokenPipeError):
            os.write(replies, f"{code}\n".encode())
    return code


class Compiled:
    """What this process has compiled is for all runs of one network and one size of batches. Torch keeps a few kinds of each
    function and then compiles no more of them: what other runs have left must not take their places."""

    def __init__(self) -> None:
        self.kind: dict[str, Any] | None = None

    def keep_for(self, settings: Path) -> None:
        """Or else forget it."""
        try:
            given = read_settings_file(settings)
        except UserError:
            return  # which the run itself will tell
        kind = {name: value for name, value in given.items() if name.startswith(COMPILED_FOR)}
        torch = sys.modules.get("torch")
        if torch is not None and self.kind not in (None, kind):
            torch.compiler.reset()
        self.kind = kind


def _print_to(log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)


def _do(run: str, settings: str, source: str, target: str, seed: str) -> int:
    _wait_until_free(Path(run) / "lock")
    begin = ["--source", source, "--target", target, "--out", run, "--config", settings, "--seed", seed]
    try:
        code = run_command(["adapt", *(["--resume", run] if (Path(run) / "config.yaml").exists() else begin)])
    except Exception:
        traceback.print_exc()
        code = 1
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):  # between two runs there is nothing to save
            signal.signal(number, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    _give_memory_back()
    return code


def _give_memory_back() -> None:
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _wait_until_free(lock: Path) -> None:
    """Of a run that another process still holds: the one of a benchmark that was killed a moment ago."""
    until = time.monotonic() + PATIENCE
    while lock.exists() and time.monotonic() < until:
        with lock.open("a") as file:
            try:
                flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
