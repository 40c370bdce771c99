"""The process of one job: `python -m certvol.benchmark.launcher RUN SETTINGS SOURCE TARGET SEED PARENT`.

A run that is begun, gone on with or tried again is always started by these words, and is then what `certvol adapt` is. It asks
the system for a SIGTERM when its parent dies in whatever way: the run then saves its state and leaves its folder free.
"""

import contextlib
import ctypes
import fcntl
import os
import signal
import sys
import time
from pathlib import Path

from certvol.__main__ import main as certvol_command
from certvol.file_systems import flock

PATIENCE = 120.0  # seconds for the run's last process to save its state and go
PR_SET_PDEATHSIG = 1


def main(words: list[str]) -> None:
    run, settings, source, target, seed, parent = words
    with contextlib.suppress(
        OSError, AttributeError
    ):  # Linux alone has it; elsewhere a killed benchmark leaves its runs
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(parent):
        sys.exit("certvol: the benchmark is gone")
    _wait_until_free(Path(run) / "lock")
    begin = ["--source", source, "--target", target, "--out", run, "--config", settings, "--seed", seed]
    order = ["--resume", run] if (Path(run) / "config.yaml").exists() else begin
    sys.argv = ["certvol", "adapt", *order]
    certvol_command()


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
    main(sys.argv[1:])
