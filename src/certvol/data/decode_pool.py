"""Read and decode many image files at once: in worker processes, or in threads if there are few.

Threads alone do not use many cores, because Pillow holds Python's lock for a part of each image;
and a decoder that crashes or hangs in another process loses one image, not the run. So threads
leave large images to a process. A worker is a program (decode_worker.py): not a fork, which is
unsafe beside CUDA and threads, and not a `multiprocessing` child, which would run the user's script
again. docs/decoding.md compares this with joblib's loky.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Generator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import ImageFile

import certvol
from certvol.data.decode_worker import HELLO
from certvol.data.decoding import (
    LargeImage,
    Pixels,
    ReadImage,
    one_large_at_a_time,
    pillow_settings,
    read_image,
)
from certvol.data.folders import ListedFile, Listing, printable
from certvol.errors import RunFailed
from certvol.settings import DataConfig

# -P: no modules from the user's current folder.
_COMMAND = [sys.executable, "-P", "-m", "certvol.data.decode_worker"]
_GROUP_BYTES = 4 << 20
_LARGE_FILE = 64 << 20
_PROCESSES_FROM = 1000  # images, about a second of decoding: starting processes takes a moment


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_images(
    listing: Listing, size: int, config: DataConfig, start: int = 0
) -> Generator[list[ReadImage], None, None]:
    """Yield the images of a listing from number `start` on, in order, in small groups."""
    count = len(listing.paths)
    group = max(1, min(16, _GROUP_BYTES // (size * size * 3)))
    threads = config.workers or cores()
    use_processes = min(threads, cores()) > 1 and count - start >= _PROCESSES_FROM
    reader = _Reader(listing, size, config, use_processes)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
    waiting: deque[Future[list[ReadImage]]] = deque()
    with pillow_settings(config.max_megapixels):
        try:
            for first in range(start, count, group):
                waiting.append(pool.submit(reader.read, range(first, min(first + group, count))))
                if len(waiting) > 2 * threads + 1:  # look no further ahead, to bound the memory
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            reader.kill()  # otherwise the threads would wait for the workers
            pool.shutdown(wait=True, cancel_futures=True)
            reader.close()


class _WorkerDied(Exception):
    """Raised if a worker has ended, or sent only a part of an answer."""


class _Reader:
    """Reads a listing's images for several threads at once; each thread has its own worker."""

    def __init__(
        self, listing: Listing, size: int, config: DataConfig, use_processes: bool
    ) -> None:
        self.listing, self.size, self.config = listing, size, config
        self._use_processes, self._can_start = use_processes, True
        self._root = _identity(listing.root)
        self._lock = threading.Lock()
        self._workers: list[_Worker] = []
        self._of_thread = threading.local()
        self._killed = False

    def read(self, numbers: range) -> list[ReadImage]:
        images = [self._read(self.listing.file(number)) for number in numbers]
        if not all(image.lasting for image in images):
            self._check_root()
        return images

    def kill(self) -> None:
        """End all workers at once. Threads that wait for one stop with CancelledError."""
        with self._lock:
            self._killed = True
            for worker in self._workers:
                worker.process.kill()

    def close(self) -> None:
        """Close the pipes, after `kill` and when no thread reads any more."""
        for worker in self._workers:
            worker.close()

    def _read(self, file: ListedFile) -> ReadImage:
        if file.size <= _LARGE_FILE:
            with contextlib.suppress(LargeImage, _WorkerDied):
                return self._decode(file, alone=False)
        with one_large_at_a_time:  # a worker may have been killed for the memory that others took
            try:
                return self._decode(file, alone=True)
            except _WorkerDied:
                return ReadImage(None, None, "the decoder crashed on it, or was out of memory")

    def _decode(self, file: ListedFile, alone: bool) -> ReadImage:
        """Raise LargeImage if the image has to be decoded `alone`."""
        worker = self._worker_of_thread() if alone or self._use_processes else None
        if worker is None:
            return read_image(file, self.size, self.config.max_megapixels, alone)
        try:
            return worker.read(file, alone)
        except _WorkerDied:
            self._of_thread.worker = None
            worker.close()
            if self._killed:
                raise CancelledError from None
            if worker.process.returncode == -signal.SIGPROF:
                limit = f"data.decode_seconds is {self.config.decode_seconds:g}"
                return ReadImage(None, None, f"takes too long to decode ({limit})")
            raise

    def _worker_of_thread(self) -> "_Worker | None":
        """Return this thread's worker; None if none can start: the thread then decodes itself."""
        worker: _Worker | None = getattr(self._of_thread, "worker", None)
        try:
            with self._lock:
                if self._killed:
                    raise CancelledError
                if worker or not self._can_start:
                    return worker
                worker = _Worker(self.size)
                self._workers.append(worker)
            worker.start(self.config)
            self._of_thread.worker = worker
            return worker
        except (OSError, _WorkerDied):  # too many processes or open files, too little memory
            self._can_start = False
            return None

    def _check_root(self) -> None:
        """Fail if the whole folder is gone, not one file: a network drive may have been lost."""
        if self._root is None or _identity(self.listing.root) != self._root:
            raise RunFailed(
                f"the folder {printable(str(self.listing.root))} became unreadable while its "
                "images were read; finished work is kept; run the command again when the folder is "
                "back"
            )


def _identity(root: Path) -> tuple[int, int] | None:
    try:
        with os.scandir(root) as entries:
            next(entries, None)
        status = root.stat()
        return status.st_dev, status.st_ino
    except OSError:
        return None


class _Worker:
    """A process that decodes images for one thread."""

    def __init__(self, size: int) -> None:
        self._shape = (size, size, 3)
        self.process = subprocess.Popen(
            [*_COMMAND, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._requests, self._answers = self.process.stdin, self.process.stdout

    def start(self, config: DataConfig) -> None:
        if self._answers.readline(len(HELLO)) != HELLO:
            raise _WorkerDied
        load_truncated = ImageFile.LOAD_TRUNCATED_IMAGES  # the user may have set it
        limits = config.max_megapixels, config.decode_seconds
        self._send([self._shape[0], *limits, load_truncated])

    def read(self, file: ListedFile, alone: bool) -> ReadImage:
        """Read an image; raise LargeImage if it has to be decoded `alone`."""
        try:
            self._send([file, alone])
            answer = json.loads(self._answers.readline())
            if answer["large"]:
                raise LargeImage
            if answer["failed"]:
                raise RunFailed(answer["failed"])
            digest = bytes.fromhex(answer["digest"]) or None
            pixels = self._pixels() if answer["has_pixels"] else None
            return ReadImage(digest, pixels, answer["reason"], answer["lasting"])
        except (OSError, ValueError):  # no answer, or only a part of one
            raise _WorkerDied from None

    def _send(self, content: Any) -> None:
        self._requests.write(json.dumps(content).encode() + b"\n")
        self._requests.flush()

    def _pixels(self) -> Pixels:
        pixels = np.empty(self._shape, dtype=np.uint8)
        count = self._answers.readinto(pixels.data.cast("B"))  # type: ignore[attr-defined]
        if count != pixels.nbytes:
            raise ValueError("the answer ends early")
        return pixels

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self._requests, self._answers):
            with contextlib.suppress(OSError):  # a request that could no longer be sent
                pipe.close()


def _environment() -> dict[str, str]:
    """Return an environment in which a process finds modules where this one does."""
    package = str(Path(certvol.__file__).parent.parent)
    places = [place for place in sys.path if isinstance(place, str) and place]
    if package not in places:
        places.insert(0, package)
    # numpy would start threads that nobody uses.
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {**os.environ, **single, "PYTHONPATH": os.pathsep.join(places)}
