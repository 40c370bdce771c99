"""Locks and syncing, also where a file system has them not, as some network ones."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from certvol.errors import UserError

_UNSUPPORTED = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def flock(file: int, kind: int) -> None:
    """Of `fcntl`. Nothing where there are no locks: one process at a time works there all the same."""
    try:
        fcntl.flock(file, kind)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, *_UNSUPPORTED):
            raise


def is_held(error: OSError) -> bool:
    """Whether this is what `flock` raises with LOCK_NB where another process has the lock."""
    return error.errno in (errno.EAGAIN, errno.EWOULDBLOCK, errno.EACCES)


@contextmanager
def held_alone(path: Path, refusal: str) -> Iterator[None]:
    """One process at a time: `refusal` is what another one is told. One that dies in any way leaves the lock free."""
    try:
        file = path.open("a")
    except OSError as error:
        raise UserError(f"cannot write into {path.parent}: {error.strerror}") from None
    with file:
        try:
            flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(refusal if is_held(error) else f"cannot lock {path}: {error.strerror}") from None
        yield


def sync_folder(folder: Path) -> None:
    """So that new names in it outlive a loss of power, where the file system can."""
    place = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(place)
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.EINVAL, *_UNSUPPORTED):
            raise
    finally:
        os.close(place)
