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
from certvol.files import (
    held_alone,
    is_leftover,
    lock_removable,
    output_file,
    remove_leftovers,
    sync_folder,
    write_atomically,
)
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
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_file_named_like_a_temporary_one_is_left_alone(tmp_path: Path) -> None:
    """Neither a link nor a file of the user beside the output is written into."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "out.csv.part").symlink_to(precious)
    (tmp_path / "other.csv.part").write_text("mine")
    write_atomically(tmp_path / "out.csv", b"new")
    write_atomically(tmp_path / "other.csv", b"new")
    assert precious.read_text() == "precious"
    assert (tmp_path / "other.csv.part").read_text() == "mine"
    assert (tmp_path / "out.csv").read_bytes() == b"new"


def test_a_temporary_file_is_never_one_that_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds even if somebody guesses the random name."""
    monkeypatch.setattr("certvol.files.secrets.token_hex", lambda count: "0" * 2 * count)
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "out.csv.00000000.part").symlink_to(tmp_path / "precious")
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "out.csv", b"new")
    assert (tmp_path / "precious").read_text() == "precious"


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    for name in ("n" * 251 + ".csv", "ü" * 125 + ".csv"):
        write_atomically(tmp_path / name, b"new")
        assert (tmp_path / name).read_bytes() == b"new"


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("old")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("certvol.files.os.fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "file", b"new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "old"}


def test_a_new_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "usual").write_text("")
    write_atomically(tmp_path / "file", b"")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_what_a_killed_process_was_writing_is_removed_when_its_run_is_locked(
    tmp_path: Path,
) -> None:
    (tmp_path / "cycles").mkdir()
    half = [tmp_path / "config.yaml.0123abcd.part", tmp_path / "cycles" / "1.x.89abcdef.part"]
    others = [tmp_path / "mine.part", tmp_path / "cycles" / "0001.safetensors"]
    for path in half + others:
        path.touch()
    with RunFolder(tmp_path).lock():
        assert not any(path.exists() for path in half)
    assert all(path.exists() for path in others)
    assert not any(is_leftover(path.name) for path in others)


def test_an_output_through_a_link_reaches_the_file_and_keeps_the_link(tmp_path: Path) -> None:
    (tmp_path / "latest.csv").symlink_to("deep/first.csv")
    with output_file(tmp_path / "latest.csv") as file:
        file.write(b"new")
    assert (tmp_path / "latest.csv").is_symlink()
    assert (tmp_path / "deep" / "first.csv").read_bytes() == b"new"
    remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*.csv")) == ["first.csv", "latest.csv"]
