import errno
import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from certvol.data import cache_files, decoding
from certvol.data.cache import cache_folder
from certvol.data.decoding import decode
from certvol.errors import RunFailed, UserError
from certvol.files import sync
from certvol.settings import DataConfig
from support.pictures import forbid_decoding, opened
from support.reporter import RecordingReporter


def die_at(monkeypatch: pytest.MonkeyPatch, call: int, error: BaseException) -> None:
    real, calls, lock = decode, [0], threading.Lock()

    def dying(*args: Any) -> np.ndarray:
        with lock:
            calls[0] += 1
        if calls[0] == call:
            raise error
        return real(*args)

    monkeypatch.setattr(decoding, "decode", dying)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("call", [1, 7, 23, 40])
def test_an_interrupted_build_resumes(
    images: Path, config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    (images / "a/03bad.jpg").write_bytes(b"text")
    whole = opened(images, DataConfig(cache_dir=str(tmp_path / "other")))
    with monkeypatch.context() as patch:
        die_at(patch, call, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            opened(images, DataConfig(cache_dir=config.cache_dir, workers=1))
    calls: list[int] = []
    real = decode
    monkeypatch.setattr(decoding, "decode", lambda *a: calls.append(1) or real(*a))
    progress = RecordingReporter()
    resumed = opened(images, config, progress=progress)
    if call == 40:
        assert len(calls) < 20  # most of it was kept
    assert progress.events == [("decoding images", 41), ("finish", 41)]
    assert np.array_equal(resumed.pixels, whole.pixels)
    assert np.array_equal(resumed.hashes, whole.hashes)
    assert (resumed.paths, resumed.failures) == (whole.paths, whole.failures)
    assert not list(cache_folder(config).glob("*.building"))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", ["journal.jsonl", "pixels.bin", "hashes.bin"])
@pytest.mark.parametrize("cut", [0, 1, 100, 1000])
def test_a_torn_build_resumes_from_its_last_complete_block(
    images: Path,
    config: DataConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    cut: int,
) -> None:
    whole = opened(images, DataConfig(cache_dir=str(tmp_path / "other")))
    with monkeypatch.context() as patch:
        die_at(patch, 30, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            opened(images, DataConfig(cache_dir=config.cache_dir, workers=1))
    (building,) = cache_folder(config).glob("*.building")
    data = (building / name).read_bytes()
    (building / name).write_bytes(
        data[: max(0, len(data) - cut)] + (b"\xffgarbage" if cut == 100 else b"")
    )
    resumed = opened(images, config)
    assert np.array_equal(resumed.pixels, whole.pixels)
    assert np.array_equal(resumed.hashes, whole.hashes)


# It decodes until the journal has so many lines, then waits to be killed.
KILLED = """
import sys, time
from pathlib import Path
from certvol.settings import DataConfig
from certvol.data import cache, decode_pool, decoding
from certvol.data.folders import scan
cache.BLOCK_BYTES, decode_pool._GROUP_BYTES = 4 * 192, 192
real, most = decoding.decode, int((sys.argv[3:] or [1000])[0])
def decode(*given):
    journals = Path(sys.argv[2]).rglob("journal.jsonl")
    if sum(len(each.read_bytes().splitlines()) for each in journals) >= most:
        print("enough", flush=True)
        sys.stdin.read()
    time.sleep(0.01)  # so that two processes meet
    return real(*given)
decoding.decode = decode
print("begun", flush=True)
opened = cache.open_cache(scan(sys.argv[1]), 8, DataConfig(cache_dir=sys.argv[2], workers=1), None)
print("built", len(opened.paths), flush=True)
sys.stdin.read()
"""


def test_a_build_killed_twice_ends_with_the_same_pixels(
    images: Path, config: DataConfig, tmp_path: Path
) -> None:
    whole = opened(images, DataConfig(cache_dir=str(tmp_path / "other")))
    for lines in (2, 5):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(images), str(config.cache_dir), str(lines)],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        assert process.stdout.readline() == b"enough\n"
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert lines <= len(journal_lines(config)) < 10
    resumed = opened(images, config)
    assert np.array_equal(resumed.pixels, whole.pixels)
    assert np.array_equal(resumed.hashes, whole.hashes)


def journal_lines(config: DataConfig) -> list[bytes]:
    return b"".join(
        path.read_bytes() for path in cache_folder(config).glob("*.building/journal.jsonl")
    ).splitlines()


def test_two_processes_build_once_and_a_set_in_use_is_kept(
    images: Path, config: DataConfig, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", KILLED, str(images), str(config.cache_dir)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) for _ in range(2)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"begun\n"
            assert process.stdout.readline() == b"built 40\n"
        folder = cache_folder(config)
        (done,) = (p for p in folder.iterdir() if p.is_dir())
        other = DataConfig(
            cache_dir=config.cache_dir, cache_limit_gb=9000 / 1e9
        )  # room for one set, not for two
        (images / "a/00.png").unlink()
        with pytest.raises(UserError, match=r"in use .*raise data\.cache_limit_gb"):
            opened(images, other)
        assert done.is_dir()
    finally:
        for process in processes:
            process.communicate(b"")
    assert len(opened(images, other).paths) == 39
    assert not done.exists()


def test_a_kill_between_index_and_rename_costs_nothing(
    images: Path, config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            opened(images, config)
    forbid_decoding(monkeypatch)
    assert len(opened(images, config).paths) == 40


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "no space left"), (errno.EDQUOT, "quota")]
)
@pytest.mark.parametrize("after", [0, 1500, 6000])
def test_a_full_disk_is_reported_and_the_next_run_resumes(
    images: Path,
    config: DataConfig,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    words: str,
    after: int,
) -> None:
    whole = opened(images, DataConfig(cache_dir=str(images.parent / "other")))
    written = [0]
    real = cache_files._write_all

    def fill(file: io.FileIO, data: memoryview | bytes) -> None:
        view = memoryview(data).cast("B")
        written[0] += len(view)
        if written[0] > after:
            file.write(view[: len(view) // 2])  # a disk fills in the middle of a write
            raise OSError(number, os.strerror(number))
        real(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(cache_files, "_write_all", fill)
        with pytest.raises(UserError, match=rf"{words}.*data\.cache_dir"):
            opened(images, config)
    resumed = opened(images, config)
    assert np.array_equal(resumed.pixels, whole.pixels)
    assert np.array_equal(resumed.hashes, whole.hashes)


def test_an_io_error_of_the_cache_fails_the_run(
    images: Path, config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(cache_files, "_write_all", broken)
        with pytest.raises(RunFailed, match="input/output error"):
            opened(images, config)
    assert len(opened(images, config).paths) == 40


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("call", [1, 3, 29])
def test_a_block_that_does_not_reach_the_disk_is_not_recorded(
    images: Path, config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Each of the 10 blocks makes 3 calls, so the last case is the last block."""
    whole = opened(images, DataConfig(cache_dir=str(tmp_path / "other")))
    real, calls = sync, [0]

    def fail(file: io.FileIO) -> None:
        calls[0] += 1
        if calls[0] >= call:
            raise OSError(errno.EIO, "Input/output error")
        real(file)

    with monkeypatch.context() as patch:
        patch.setattr(cache_files, "sync", fail)
        with pytest.raises(RunFailed, match="input/output error"):
            opened(images, config)
    assert not list(cache_folder(config).glob("*/index.json"))
    resumed = opened(images, config)
    assert np.array_equal(resumed.pixels, whole.pixels)
    assert np.array_equal(resumed.hashes, whole.hashes)
