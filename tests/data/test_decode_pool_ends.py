"""Decoding processes end: when the reader closes, is interrupted or is killed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from certvol.data import cache, decode_pool
from certvol.data.decode_pool import read_images
from certvol.data.folders import scan
from certvol.settings import DataConfig
from support.decoding import children, text_of
from support.pictures import opened
from support.reporter import RecordingReporter


def test_closing_early_leaves_no_process(
    images: Path, odd_worker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_pool, "_GROUP_BYTES", 192)
    odd_worker.with_name("slow").touch()
    before = children()
    groups = read_images(scan(images), 8, DataConfig(workers=2))
    next(groups)
    deadline = time.monotonic() + 600
    while len(children() - before) < 2:  # the second worker may start later than the first
        assert time.monotonic() < deadline
        time.sleep(0.01)
    began = time.monotonic()
    groups.close()
    assert time.monotonic() - began < 30
    assert children() <= before


@pytest.mark.parametrize("processes_from", [1, 1 << 60])
def test_closing_ends_a_decoder_that_hangs(
    images: Path, odd_worker: Path, monkeypatch: pytest.MonkeyPatch, processes_from: int
) -> None:
    (images / "b/39.png").write_bytes((images / "b/39.png").read_bytes() + b"HANG" + bytes(9000))
    monkeypatch.setattr(decode_pool, "_PROCESSES_FROM", processes_from)
    monkeypatch.setattr(decode_pool, "_LARGE_FILE", 9000)
    monkeypatch.setattr(decode_pool, "_GROUP_BYTES", 192)
    before = children()
    groups = read_images(scan(images), 8, DataConfig(workers=2))
    for _ in range(39):
        next(groups)
    began = time.monotonic()
    groups.close()
    assert time.monotonic() - began < 30
    assert children() <= before


@pytest.mark.usefixtures("small_blocks")
def test_an_interrupted_build_leaves_no_process_and_resumes(
    images: Path, config: DataConfig, odd_worker: Path, tmp_path: Path
) -> None:
    class Stopped(RecordingReporter):
        def advance(self, n: int = 1) -> None:
            super().advance(n)
            if self.advanced >= 20:
                raise KeyboardInterrupt

    whole = opened(images, DataConfig(cache_dir=str(tmp_path / "other"), workers=1))
    before = children()
    with pytest.raises(KeyboardInterrupt):
        opened(images, config, progress=Stopped())
    assert children() <= before
    (journal,) = cache.cache_folder(config).glob("*.building/journal.jsonl")
    assert len(journal.read_bytes().splitlines()) >= 4
    progress = RecordingReporter()
    resumed = opened(images, config, progress=progress)
    assert progress.events == [("decoding images", 40), ("finish", 40)]
    assert np.array_equal(resumed.pixels, whole.pixels)
    assert np.array_equal(resumed.hashes, whole.hashes)


ORPHANS = """
import os, sys, time
from certvol.settings import DataConfig
from certvol.data import decode_pool
from certvol.data.folders import scan
decode_pool._PROCESSES_FROM, decode_pool.cores, decode_pool._GROUP_BYTES = 1, lambda: 2, 192
decode_pool._COMMAND = [sys.executable, "-P", sys.argv[2]]
groups = decode_pool.read_images(scan(sys.argv[1]), 8, DataConfig(workers=2))
next(groups)
if os.fork() == 0:  # the user's child keeps the pipes open
    time.sleep(600)
    os._exit(0)
print("under way", flush=True)
sys.stdin.read()  # the groups stay open until this process is killed
"""


def test_workers_end_with_a_killed_parent_but_ignore_ctrl_c(images: Path, odd_worker: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ORPHANS, str(images), str(odd_worker)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"under way\n"
        deadline = time.monotonic() + 600
        while not (
            len(workers := _running(str(odd_worker), parent=process.pid)) == 2
            and all(map(_is_up, workers))
        ):
            assert time.monotonic() < deadline  # the second worker may start later than the first
            time.sleep(0.02)
        for worker in workers:
            os.kill(worker, signal.SIGINT)
        time.sleep(0.2)
        assert _running(str(odd_worker), parent=process.pid) == workers
        process.kill()
        process.wait()
        deadline = time.monotonic() + 600
        while _running(str(odd_worker)) & workers:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _is_up(worker: int) -> bool:
    """Return True once the worker ignores Ctrl-C."""
    lines = text_of(Path(f"/proc/{worker}/status")).splitlines()
    ignored = [line for line in lines if line.startswith("SigIgn:")]
    return bool(ignored) and bool(int(ignored[0].split()[1], 16) >> (signal.SIGINT - 1) & 1)


def _running(script: str, parent: int | None = None) -> set[int]:
    """Return the processes, without zombies, that run this worker script."""
    found = set()
    for place in Path("/proc").glob("[0-9]*"):
        words = text_of(place / "cmdline").split("\0")
        is_worker = len(words) > 3 and words[1:3] == ["-P", script]
        if is_worker and (parent is None or words[3] == str(parent)):
            found.add(int(place.name))
    return found
