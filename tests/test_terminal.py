"""Commands in a terminal, where progress is a bar: they end, also on Ctrl-C, and give the cursor back."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from images import tiny, write_domain

SHOWS_CURSOR, HIDES_CURSOR = "\x1b[?25h", "\x1b[?25l"


def in_terminal(words: list[str], columns: int, look: Callable[[str, int], None] | None = None) -> tuple[int, str]:
    """(exit code, what the terminal got). `look` is given what there is so far, and the terminal to type into."""
    outside, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    environment.pop("COLUMNS", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "certvol", *words],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        env=environment,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that a typed Ctrl-C becomes a signal
    )
    os.close(inside)
    seen, until = b"", time.monotonic() + 120
    try:
        while time.monotonic() < until:
            if select.select([outside], [], [], 0.1)[0]:
                try:
                    seen += os.read(outside, 65536)
                except OSError:  # the terminal's other end is closed
                    break
                if look is not None:
                    look(seen.decode("utf-8", "replace"), outside)
        return process.wait(timeout=10), seen.decode("utf-8", "replace")
    finally:
        process.kill()
        process.wait()
        os.close(outside)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("domains")
    source, target = write_domain(root / "source"), write_domain(root / "target", shift=20, seed=1)
    return ["--source", str(source), "--target", str(target)]


def settings(**changed: object) -> list[str]:
    return [word for key, value in tiny(**changed).items() for word in (f"--{key}", str(value))]


@pytest.mark.parametrize("columns", [30, 120])
def test_a_bar_is_drawn_and_the_command_ends(folders: list[str], columns: int) -> None:
    code, seen = in_terminal(["check", *folders], columns)
    assert code == 0
    assert HIDES_CURSOR in seen
    assert seen.count(SHOWS_CURSOR) == seen.count(HIDES_CURSOR)
    assert "36" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)


@pytest.mark.slow
def test_a_run_is_shown_and_ends(folders: list[str], tmp_path: Path) -> None:
    code, seen = in_terminal(["adapt", *folders, "--out", str(tmp_path / "run"), *settings()], 100)
    assert code == 0, seen
    assert "pretraining" in seen
    assert "adapting" in seen
    assert seen.rstrip().count(SHOWS_CURSOR) == seen.count(HIDES_CURSOR) > 0


@pytest.mark.slow
def test_ctrl_c_stops_a_run_with_its_state_saved(folders: list[str], tmp_path: Path) -> None:
    run, pressed = tmp_path / "run", []

    def press(seen: str, terminal: int) -> None:
        if "pretraining" in seen and (run / "history.jsonl").exists() and not pressed:
            pressed.append(os.write(terminal, b"\x03"))

    words = ["adapt", *folders, "--out", str(run), *settings(training__pretrain_steps=100_000)]
    code, seen = in_terminal(words, 100, press)
    assert code == 130, seen
    assert "--resume" in seen
    assert seen.count(SHOWS_CURSOR) == seen.count(HIDES_CURSOR)
    assert (run / "checkpoint" / "latest.json").exists()
