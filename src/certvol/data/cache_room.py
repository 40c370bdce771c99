"""The cache's place: its limit, what is evicted, who holds which set, and its faults in words."""

import contextlib
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from certvol.data.folders import printable, reason_of
from certvol.errors import RunFailed, UserError
from certvol.file_systems import flock
from certvol.reporting import Progress

GB = 1e9
_OURS = re.compile(r"([0-9a-f]{32})(\.building|\.use|\.build)?")


def make_room(folder: Path, key: str, needed: int, limit: int, doing: str = "decoding") -> None:
    """Evicts the longest unused sets until `needed` bytes fit under the limit and on the disk."""
    sets = _sets_in(folder)
    already = sets.pop(key, (0.0, 0))[1]
    others = sum(taken for _, taken in sets.values())
    free = shutil.disk_usage(folder).free
    missing = max(0, needed - already)
    for other, (_, taken) in sorted(sets.items(), key=lambda item: item[1][0]):
        if others + needed <= limit and missing <= free:
            return
        if _evict(folder, other):
            others -= taken
            free += taken
    shown = printable(str(folder))
    if others + needed > limit:
        raise UserError(
            f"{doing} needs {gb(needed)} beside {gb(others)} that are in use in {shown}, above the limit of {gb(limit)}; "
            "raise data.cache_limit_gb, or set data.cache_dir to another place"
        )
    if missing > free:
        raise UserError(
            f"{doing} needs {gb(missing)} in {shown}, where {gb(free)} are free; "
            "free some space, or set data.cache_dir to another place"
        )


def _sets_in(folder: Path) -> dict[str, tuple[float, int]]:
    """Key of each set, with its last use and its bytes. Whatever else lies in the folder is not ours and not touched."""
    sets: dict[str, tuple[float, int]] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            match = _OURS.fullmatch(entry.name)
            if match is None:
                continue
            used, taken = sets.get(match[1], (0.0, 0))
            with contextlib.suppress(OSError):  # another process may evict it at this moment
                if match[2] == ".use":
                    used = entry.stat().st_mtime
                elif entry.is_dir(follow_symlinks=False):
                    taken += sum(file.stat().st_size for file in Path(entry.path).iterdir())
            sets[match[1]] = (used, taken)
    return sets


def _evict(folder: Path, key: str) -> bool:
    """Removes a set unless somebody has it open. True where it is gone."""
    use = folder / f"{key}.use"
    try:
        held = locked(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    try:
        remove_set(folder / key)
        remove_set(folder / f"{key}.building")
        (folder / f"{key}.build").unlink(missing_ok=True)
        use.unlink(missing_ok=True)
        return True
    except OSError:
        return False
    finally:
        os.close(held)


def remove_set(place: Path) -> None:
    """Removes a set's folder, its index first: a removal that is cut short must not leave what looks whole."""
    with contextlib.suppress(FileNotFoundError):
        (place / "index.json").unlink(missing_ok=True)
        shutil.rmtree(place)


def locked(path: Path, kind: int) -> int:
    """An open file with the lock. BlockingIOError where LOCK_NB is asked and another holds it."""
    while True:
        try:
            file = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
            try:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise error from None  # that the place cannot be written is what the user has to know
        try:
            flock(file, kind)
            if _is_at(file, path):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # the set was evicted between opening and locking: that lock protects nothing


def _is_at(file: int, path: Path) -> bool:
    try:
        there, here = path.stat(), os.fstat(file)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


@contextlib.contextmanager
def build_lock(path: Path, progress: Progress | None, doing: str = "decodes the same images") -> Iterator[None]:
    try:
        file = locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if progress:
            progress.start(f"waiting for another process that {doing}", 1)
        file = locked(path, fcntl.LOCK_EX)
        if progress:
            progress.advance(1)
            progress.finish()
    try:
        yield
    finally:
        os.close(file)


@contextlib.contextmanager
def told_to_the_user(folder: Path, what: str = "decoded images") -> Iterator[None]:
    """Faults of the cache's place, in a sentence. Faults of the images never get here."""
    shown = printable(str(folder))
    elsewhere = "set data.cache_dir (or $CERTVOL_CACHE) to a place with room"
    try:
        yield
    except (FileExistsError, NotADirectoryError):
        raise UserError(
            f"the cache's place {shown} is not a folder; set data.cache_dir (or $CERTVOL_CACHE) to one"
        ) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            lack = "no space left" if error.errno == errno.ENOSPC else "the disk quota is used up"
            raise UserError(
                f"{lack} for {what} in {shown}; free some space or {elsewhere}: "
                "what is done stays and the next run goes on from there"
            ) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(
                f"cannot write {what} to {shown} ({reason_of(error)}); "
                "set data.cache_dir (or $CERTVOL_CACHE) to a folder you can write to"
            ) from None
        raise RunFailed(
            f"the cache of {what} in {shown} failed ({reason_of(error)}); what is done stays: run again, "
            "or set data.cache_dir to another place"
        ) from None


def gb(count: float) -> str:
    return f"{count / GB:.2f} GB" if count >= 1e7 else f"{count / 1e6:.3f} MB"
