"""Locks, syncing and writing on file systems that lack them or fail."""

import errno
import fcntl
import os
import stat
import time
from pathlib import Path

import pytest

from certvol.cli._benchmark_worker import _wait_until_free
from certvol.errors import UserError
from certvol.files import held_alone, lock_removable, sync_folder, write_atomically
from certvol.runs.folder import RunFolder


def _failing_locks(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fail(file: object, kind: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fail)


def _failing_folders(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    honest = os.fsync

    def fail(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(number, os.strerror(number))
        honest(file)

    monkeypatch.setattr(os, "fsync", fail)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_everything_works_on_a_file_system_without_locks(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _failing_locks(monkeypatch, number)
    with RunFolder(tmp_path).lock():
        pass
    started = time.monotonic()
    _wait_until_free(tmp_path / "lock")
    assert time.monotonic() - started < 10
    os.close(lock_removable(tmp_path / "set.use", fcntl.LOCK_EX))


def test_a_held_lock_and_a_failing_lock_give_different_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "lock"
    with (
        held_alone(place, "mine"),
        pytest.raises(UserError, match="theirs"),
        held_alone(place, "theirs"),
    ):
        pass
    with held_alone(place, "free again"):
        pass
    _failing_locks(monkeypatch, errno.EIO)
    with (
        pytest.raises(UserError, match=r"cannot lock .*lock: Input/output error"),
        RunFolder(tmp_path).lock(),
    ):
        pass


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_sync_folders_is_accepted(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _failing_folders(monkeypatch, number)
    write_atomically(tmp_path / "file", b"whole")
    assert (tmp_path / "file").read_bytes() == b"whole"


def test_an_io_error_while_syncing_a_folder_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _failing_folders(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        sync_folder(tmp_path)


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"first")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("certvol.files.os.fsync", fail)
    with pytest.raises(OSError, match="No space"):
        write_atomically(path, b"second")
    assert path.read_bytes() == b"first"
