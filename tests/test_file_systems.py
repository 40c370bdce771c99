"""File systems that lack locks or cannot sync a folder, and that fail for other reasons."""

import errno
import fcntl
import os
import stat
import time
from pathlib import Path

import pytest

from certvol.benchmark.launcher import _wait_until_free
from certvol.data.cache_room import locked
from certvol.errors import UserError
from certvol.file_systems import held_alone, sync_folder
from certvol.training.checkpoint import write_atomically
from certvol.training.run_folder import RunFolder


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
def test_without_locks_there_is_work_all_the_same(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _failing_locks(monkeypatch, number)
    with RunFolder(tmp_path).lock():
        pass
    started = time.monotonic()
    _wait_until_free(tmp_path / "lock")
    assert time.monotonic() - started < 10
    os.close(locked(tmp_path / "set.use", fcntl.LOCK_EX))


def test_a_lock_that_another_holds_is_told_from_one_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "lock"
    with held_alone(place, "mine"), pytest.raises(UserError, match="theirs"), held_alone(place, "theirs"):
        pass
    with held_alone(place, "free again"):
        pass
    _failing_locks(monkeypatch, errno.EIO)
    with pytest.raises(UserError, match=r"cannot lock .*lock: Input/output error"), RunFolder(tmp_path).lock():
        pass


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_folder_that_cannot_be_synced_is_no_fault(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _failing_folders(monkeypatch, number)
    write_atomically(tmp_path / "file", b"whole")
    assert (tmp_path / "file").read_bytes() == b"whole"


def test_a_disk_that_fails_while_a_folder_is_synced_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _failing_folders(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        sync_folder(tmp_path)
