"""File locks, syncing and atomic writing, no-ops on file systems without them; paths; modules.

They use `flock`, because the cache needs shared locks and the `filelock` package has no plain ones.
"""

import errno
import fcntl
import hashlib
import importlib
import os
import pkgutil
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import IO

from certvol.errors import UserError

LONGEST_STEM = 40  # characters of a name that its temporary file keeps
LEFTOVER = re.compile(r"\.[0-9a-f]{8}\.part$")
_UNSUPPORTED = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def expanded(path: str | os.PathLike[str]) -> Path:
    """Replace `~` and `~name` at the beginning of a path; UserError if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        shown = os.fspath(path).partition(os.sep)[0]
        raise UserError(
            f"{shown} in {os.fspath(path)} is not a user's home folder; write the path in full, or "
            f"`./{shown}` for a folder of that name"
        ) from None


def modules_of(package: str, path: Iterable[str]) -> dict[str, ModuleType]:
    """Import every module of a package whose name has no underscore in front, by its name.

    `path` is the package's `__path__`.
    """
    names = sorted(module.name for module in pkgutil.iter_modules(path))
    public = [name for name in names if not name.startswith("_")]
    return {name: importlib.import_module(f"{package}.{name}") for name in public}


def check_regular(path: Path) -> None:
    """Raise OSError for a pipe or a device, which may have no end or never begin."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))


def flock(file: int, kind: int) -> None:
    """Lock an open file as `fcntl.flock` does; do nothing if the file system has no locks."""
    try:
        fcntl.flock(file, kind)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, *_UNSUPPORTED):
            raise


@contextmanager
def held_alone(path: Path, refusal: str) -> Iterator[None]:
    """Hold a lock file; raise `refusal` as a UserError if another process holds it.

    The system frees the lock when its holder ends, even by a kill.
    """
    try:
        file = path.open("a")
    except OSError as error:
        raise UserError(f"cannot write into {path.parent}: {error.strerror}") from None
    with file:
        try:
            flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(refusal) from None
        except OSError as error:
            raise UserError(f"cannot lock {path}: {error.strerror}") from None
        yield


def lock_removable(path: Path, kind: int) -> int:
    """Open and lock a file that its exclusive holder may remove; return the descriptor.

    Raise BlockingIOError if `kind` has LOCK_NB and another process holds the lock.
    """
    while True:
        file = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            flock(file, kind)
            if os.path.samestat(os.fstat(file), path.stat()):
                return file
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # removed between opening and locking: this lock protects nothing


def sync(file: IO[bytes]) -> None:
    """Wait until the content of a file has reached the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk, so that they survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.EINVAL, *_UNSUPPORTED):
            raise
    finally:
        os.close(descriptor)


@contextmanager
def replaced(path: Path, synced: bool = True) -> Iterator[IO[bytes]]:
    """Yield a new file that takes the place of `path` when the block ends without an error.

    A crash leaves the old content or the new, never a mixture. Until then the new file has a random
    name in the same folder, and is opened so that it cannot be a link or somebody else's file.
    Syncing takes a moment and protects against a power cut as well.
    """
    temporary = path.with_name(f"{path.name[:LONGEST_STEM]}.{secrets.token_hex(4)}.part")
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                if synced:
                    sync(file)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if synced:
            sync_folder(path.parent)
    except OSError as error:
        error.filename = str(path)  # a failed write does not name its file
        raise


def write_atomically(path: Path, data: bytes | bytearray, synced: bool = True) -> None:
    """Replace a file in one step, as `replaced` does."""
    with replaced(path, synced) as file:
        file.write(data)


def is_leftover(name: str) -> bool:
    """Return whether a file has the name of one that a killed process was writing."""
    return LEFTOVER.search(name) is not None


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes were writing below `folder`, which no other process writes."""
    for path in folder.rglob("*.part"):
        if is_leftover(path.name):
            path.unlink(missing_ok=True)


@contextmanager
def output_file(path: Path) -> Iterator[IO[bytes]]:
    """Open an output path that the user gave; follow links, and write into pipes and devices.

    A regular file is replaced in one step, and the folders above it are created.
    """
    if path.exists() and not path.is_file():
        with path.open("wb", buffering=0) as stream:
            yield stream
        return
    place = path.resolve()  # a link stays a link
    place.parent.mkdir(parents=True, exist_ok=True)
    with replaced(place) as file:
        yield file


def fingerprint_of(*parts: bytes) -> str:
    """Return a hash of all parts, one after another."""
    return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()
