"""The process that runs a benchmark's jobs: `python -m certvol.cli._benchmark_worker PARENT`.

Each line of stdin is a job, each line of stdout the exit code of one; a run prints into the
job's log. The process continues until a job fails: Python starts once, a network is compiled once,
and a run never inherits another's failure. If the parent dies, the system sends SIGTERM: the run
then saves its state and unlocks its folder.
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

from certvol.cli._main import run as run_command
from certvol.errors import UserError
from certvol.files import flock
from certvol.settings import read_settings_file

LOCK_SECONDS = 120.0  # for an earlier process of the run to save its state and end
PR_SET_PDEATHSIG = 1
COMPILED_FOR = (
    "model.",
    "augment.",
    "data.image_size",
    "training.batch",
    "training.precision",
    "training.compile",
)


def main(parent: int) -> int:
    with contextlib.suppress(OSError, AttributeError):  # only Linux has prctl
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("certvol: the benchmark has ended")
    # Move the pipes, so that a run finds the usual streams and its children do not get the pipes.
    orders, replies = os.fdopen(os.dup(0), "r", encoding="ascii"), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    code, compiled = 0, CompiledNetworks()
    while code == 0 and (line := orders.readline()):
        log, run, settings, sources, target, seed = json.loads(line)
        _print_to(log)
        compiled.keep_for(Path(settings))
        begin = [word for source in sources for word in ("--source", source)]
        begin += ["--target", target, "--out", run]
        begin += ["--config", settings, "--seed", seed]
        _wait_until_free(Path(run) / "lock")
        resumes = (Path(run) / "config.yaml").exists()
        code = _adapt(["--resume", run] if resumes else begin)
        with contextlib.suppress(BrokenPipeError):
            os.write(replies, f"{code}\n".encode())
    return code


class CompiledNetworks:
    """Forget what torch compiled when a run uses another network or batch size.

    Torch stops compiling a function that it has compiled for several others.
    """

    def __init__(self) -> None:
        self.settings: dict[str, object] = {}

    def keep_for(self, settings_file: Path) -> None:
        with contextlib.suppress(UserError):  # the run itself reports it
            given = read_settings_file(settings_file)
            settings = {k: v for k, v in given.items() if k.startswith(COMPILED_FOR)}
            torch = sys.modules.get("torch")
            if torch is not None and self.settings and self.settings != settings:
                torch.compiler.reset()
            self.settings = settings


def _print_to(log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)


def _adapt(options: list[str]) -> int:
    try:
        code = run_command(["adapt", *options])
    except Exception:
        traceback.print_exc()
        code = 1
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):  # between two runs there is nothing to save
            signal.signal(number, signal.SIG_DFL)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return code


def _wait_until_free(lock: Path) -> None:
    """Wait for a run that a process of a killed benchmark is still saving."""
    until = time.monotonic() + LOCK_SECONDS
    while lock.exists() and time.monotonic() < until:
        with lock.open("a") as file:
            try:
                flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
