"""In a terminal, progress is a bar; commands end, also on Ctrl-C, and restore the cursor."""

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

from support.commands import adapt_words

SHOWS_CURSOR, HIDES_CURSOR = "\x1b[?25h", "\x1b[?25l"


def in_terminal(
    words: list[str], columns: int, look: Callable[[str, int], None] | None = None
) -> tuple[int, str]:
    """Return the exit code and the output; call `look` with the output so far and the terminal."""
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
        preexec_fn=lambda: fcntl.ioctl(
            0, termios.TIOCSCTTY, 0
        ),  # so that a typed Ctrl-C becomes a signal
    )
    os.close(inside)
    seen, until = b"", time.monotonic() + 600
    try:
        while time.monotonic() < until:
            if select.select([outside], [], [], 0.1)[0]:
                try:
                    seen += os.read(outside, 65536)
                except OSError:  # the terminal's other end is closed
                    break
                if look is not None:
                    look(seen.decode("utf-8", "replace"), outside)
        return process.wait(timeout=600), seen.decode("utf-8", "replace")
    finally:
        process.kill()
        process.wait()
        os.close(outside)


def test_a_bar_is_drawn_and_the_command_ends(folders: tuple[Path, Path]) -> None:
    words = ["check", "--source", str(folders[0]), "--target", str(folders[1])]
    code, seen = in_terminal(words, 30)
    assert code == 0
    assert HIDES_CURSOR in seen
    assert seen.count(SHOWS_CURSOR) == seen.count(HIDES_CURSOR)
    assert "36" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)


@pytest.mark.slow
def test_a_run_is_shown_and_ends(folders: tuple[Path, Path], tmp_path: Path) -> None:
    code, seen = in_terminal(adapt_words(*folders, tmp_path / "run"), 100)
    assert code == 0, seen
    assert "pretraining" in seen
    assert "adapting" in seen
    assert seen.rstrip().count(SHOWS_CURSOR) == seen.count(HIDES_CURSOR) > 0


@pytest.mark.slow
def test_ctrl_c_stops_a_run_with_its_state_saved(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    run, pressed = tmp_path / "run", list[int]()

    def press(seen: str, terminal: int) -> None:
        if "pretraining" in seen and (run / "history.jsonl").exists() and not pressed:
            pressed.append(os.write(terminal, b"\x03"))

    words = adapt_words(*folders, run, training__pretrain_steps=100_000)
    code, seen = in_terminal(words, 100, press)
    assert code == 130, seen
    assert "--resume" in seen
    assert seen.count(SHOWS_CURSOR) == seen.count(HIDES_CURSOR)
    assert (run / "checkpoint" / "latest.json").exists()
