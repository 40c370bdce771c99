"""Keep the cache folder below its size limit, and explain errors of the folder."""

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
from certvol.files import lock_removable

_FILES_OF_A_SET = re.compile(r"([0-9a-f]{32})(\.building|\.use|\.build)?")


def make_room(folder: Path, key: str, needed: int, limit: int, rows: str) -> None:
    """Evict the least recently used sets until `needed` bytes fit below the limit and on disk."""
    sets = _list_sets(folder)
    _, present = sets.pop(key, (0.0, 0))
    others = sum(size for _, size in sets.values())
    free = shutil.disk_usage(folder).free
    missing = max(0, needed - present)
    evictable = sorted(sets, key=lambda other: sets[other]) if needed <= limit else []
    for other in evictable:
        if others + needed <= limit and missing <= free:
            break
        if _evict(folder, other):
            others -= sets[other][1]
            free += sets[other][1]
    shown, elsewhere = printable(str(folder)), "or set data.cache_dir to another folder"
    if others + needed > limit:
        beside = f" beside {_gigabytes(others)} in use" if needed <= limit else ""
        raise UserError(
            f"{rows} need {_gigabytes(needed)}{beside} in {shown}, above the limit of "
            f"{_gigabytes(limit)}; raise data.cache_limit_gb, {elsewhere}"
        )
    if missing > free:
        raise UserError(
            f"{rows} need {_gigabytes(missing)} in {shown}, where {_gigabytes(free)} are free; "
            f"free some space, {elsewhere}"
        )


def _list_sets(folder: Path) -> dict[str, tuple[float, int]]:
    """Return each set's last use and size in bytes, by key. Other files are ignored."""
    sets: dict[str, tuple[float, int]] = {}
    for path in folder.iterdir():
        if match := _FILES_OF_A_SET.fullmatch(path.name):
            used, size = sets.get(match[1], (0.0, 0))
            with contextlib.suppress(OSError):  # another process may evict the set right now
                if match[2] == ".use":
                    used = path.stat().st_mtime
                elif path.is_dir():
                    size += sum(file.stat().st_size for file in path.iterdir())
            sets[match[1]] = (used, size)
    return sets


def _evict(folder: Path, key: str) -> bool:
    """Remove a set unless it is open somewhere; return True if it is gone."""
    try:
        use = folder / f"{key}.use"
        lock = lock_removable(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
        os.close(lock)


def remove_set(folder: Path) -> None:
    """Remove a set, its index first, so that a half-removed set does not look complete."""
    with contextlib.suppress(FileNotFoundError):
        (folder / "index.json").unlink(missing_ok=True)
        shutil.rmtree(folder)


@contextlib.contextmanager
def explain_errors(folder: Path, noun: str) -> Iterator[None]:
    """Turn errors of the cache folder into messages. Errors of the images never get here."""
    shown = printable(str(folder))
    elsewhere = "set data.cache_dir (or $CERTVOL_CACHE) to another folder"
    try:
        yield
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"the cache folder {shown} is not a folder; {elsewhere}") from None
    except OSError as error:
        reason = reason_of(error)
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(f"cannot write {noun} to {shown} ({reason}); {elsewhere}") from None
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"{reason}: the {noun} do not fit in {shown}; free some space, or {elsewhere} "
                "(finished work is kept; run the command again)"
            ) from None
        raise RunFailed(
            f"the cache of {noun} in {shown} failed ({reason}); finished work is kept; run the "
            f"command again, or {elsewhere}"
        ) from None


def _gigabytes(count: float) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.3f} MB"
