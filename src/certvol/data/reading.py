"""Image files read and decoded by all cores, each file once, in order."""

import contextlib
import errno
import hashlib
import io
import os
import stat
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from certvol.config import DataConfig
from certvol.data.decode_processes import DecodeProcesses, can_be_started
from certvol.data.decoding import LargeImage, ReadImage, UnreadableImage, decode, one_large_at_a_time, pillow_settings
from certvol.data.folders import Listing, printable, reason_of
from certvol.errors import RunFailed

HASH_BYTES = 16
_TASK_BYTES = 4 << 20
_LARGE_FILE = 64 << 20
_PROCESSES_FROM = 1000  # images: about a second of decoding, against a moment to start processes


def read_images(
    listing: Listing, size: int, config: DataConfig, start: int = 0
) -> Generator[list[ReadImage], None, None]:
    """The images of a listing from number `start` on, in order, in small lots, each file read once.

    Many are decoded by processes, since Pillow lets only one thread at a time decode a JPEG; few by threads."""
    lot = max(1, min(16, _TASK_BYTES // (size * size * 3)))
    workers = config.workers or cores()
    waiting: deque[Future[list[ReadImage]]] = deque()
    reader = _Reader(listing, size, config.max_megapixels)
    many = len(listing.paths) - start >= _PROCESSES_FROM
    if many and workers > 1 and cores() > 1 and can_be_started():
        reader.processes = DecodeProcesses(listing.root, size, config.max_megapixels)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="decode")
    with pillow_settings(config.max_megapixels):
        try:
            for first in range(start, len(listing.paths), lot):
                waiting.append(pool.submit(reader.read, range(first, min(first + lot, len(listing.paths)))))
                if len(waiting) > 2 * workers + 1:  # looks ahead this far and no further: memory stays bounded
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            if reader.processes:
                reader.processes.kill()  # first: else the threads would wait for them
            pool.shutdown(wait=True, cancel_futures=True)
            if reader.processes:
                reader.processes.close()


class _Reader:
    """Reads lots of a listing, for several threads at once."""

    def __init__(self, listing: Listing, size: int, max_megapixels: float) -> None:
        self.listing = listing
        self.size = size
        self.max_megapixels = max_megapixels
        self.processes: DecodeProcesses | None = None
        self.watch = _RootWatch(listing.root)

    def read(self, numbers: range) -> list[ReadImage]:
        found = self._by_processes(numbers)
        return [self._checked(found.get(i) or self._read_here(i)) for i in numbers]

    def _checked(self, image: ReadImage) -> ReadImage:
        if not image.lasting:
            self.watch.check()
        return image

    def _by_processes(self, numbers: range) -> dict[int, ReadImage]:
        if self.processes is None:
            return {}
        small = [i for i in numbers if self.listing.sizes[i] <= _LARGE_FILE]
        return self.processes.read({i: (self.listing.paths[i], *_listed(self.listing, i)) for i in small})

    def _read_here(self, i: int) -> ReadImage:
        with one_large_at_a_time if self.listing.sizes[i] > _LARGE_FILE else contextlib.nullcontext():
            return read_image(
                self.listing.root / self.listing.paths[i],
                _listed(self.listing, i),
                self.max_megapixels,
                lambda raw: decode(raw, self.size, self.max_megapixels),
            )


def read_image(
    path: Path,
    listed: tuple[int, int],
    max_megapixels: float,
    pixels_of: Callable[[bytes], npt.NDArray[np.uint8]],
) -> ReadImage:
    """A file read and decoded, where it is still the one listed. A LargeImage is the caller's to see to."""
    digest = None
    try:
        raw = _read_as_listed(path, listed, max_megapixels)
        digest = hashlib.blake2b(raw, digest_size=HASH_BYTES).digest()
        return ReadImage(digest, pixels_of(raw))
    except LargeImage:
        raise
    except UnreadableImage as error:
        return ReadImage(digest, None, error.reason, error.lasting)


def _listed(listing: Listing, i: int) -> tuple[int, int]:
    return int(listing.sizes[i]), int(listing.mtimes_ns[i])


def _read_as_listed(path: Path, listed: tuple[int, int], max_megapixels: float) -> bytes:
    """The bytes of a file that is still the one listed: else the cache's key would not be about them."""
    raw, status = read_file(path, max_megapixels)
    if (status.st_size, status.st_mtime_ns) != listed or len(raw) != status.st_size:
        raise UnreadableImage("changed while being read", lasting=False)
    return raw


def can_be_read(listing: Listing, i: int, config: DataConfig) -> bool:
    try:
        _read_as_listed(listing.root / listing.paths[i], _listed(listing, i), config.max_megapixels)
        return True
    except UnreadableImage:
        return False


class _RootWatch:
    """Tells a file that went away from a whole folder that did, as when a network drive is lost."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.identity = self._identity()

    def _identity(self) -> tuple[int, int] | None:
        try:
            with os.scandir(self.root) as entries:
                next(entries, None)
            status = self.root.stat()
            return status.st_dev, status.st_ino
        except OSError:
            return None

    def check(self) -> None:
        if self.identity is None or self._identity() != self.identity:
            raise RunFailed(
                f"the folder {printable(str(self.root))} became unreadable while its images were read; "
                "what was decoded is kept: run again once the folder is back"
            )


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_file(path: Path, max_megapixels: float) -> tuple[bytes, os.stat_result]:
    """The bytes of an image file and its status after they were read. UnreadableImage where that is not possible."""
    most = int(max_megapixels * 8e6) + (64 << 20)  # 16-bit RGBA without compression, and room for what comes with it
    try:
        with open_to_read(path) as file:
            before = os.fstat(file.fileno())
            if not stat.S_ISREG(before.st_mode):
                raise UnreadableImage("not a file any more", lasting=False)
            if before.st_size > most:
                raise UnreadableImage(f"a file of {before.st_size / 1e9:.1f} GB, too large for an image")
            raw = read_at_most(file, before.st_size + 1)
            return raw, os.fstat(file.fileno())
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise RunFailed("too many open files; raise the limit (ulimit -n) or lower data.workers") from None
        raise UnreadableImage(f"cannot be read: {reason_of(error)}", lasting=False) from None
    except MemoryError:
        raise UnreadableImage("too little memory to read it") from None


def open_to_read(path: Path) -> io.FileIO:
    """Without waiting: a file that has become a named pipe since it was listed must not hold us up."""
    return io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def read_at_most(file: io.FileIO, count: int) -> bytes:
    parts: list[bytes] = []
    while count > 0 and (part := file.read(count)):
        parts.append(part)
        count -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
