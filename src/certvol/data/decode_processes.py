"""Processes that decode images, as seen from the one that asks them (decode_worker.py is the other end).

A worker is a program of its own, not a fork (unsafe beside CUDA and threads) and not one of `multiprocessing` (which would run
the user's script again). To each goes a line of JSON with some files to read; back come a line of JSON, with the digest or
the fault of each, and then the bare pixels of all that have any."""

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile

import certvol
from certvol.data.decoding import ReadImage, one_large_at_a_time
from certvol.errors import RunFailed

HELLO = b"certvol decodes\n"
ListedFile = tuple[str, int, int]
"""Path below the root, size and time (ns) as listed."""
_COMMAND = [sys.executable, "-P", "-m", "certvol.data.decode_worker"]  # -P: no modules from the user's current folder
_PIPE_BYTES = 1 << 20
_START_SECONDS = 60.0
_STARTS_THAT_MAY_FAIL = 3
_LONGEST_HEADER = 1 << 20


class _Died(Exception):
    """A worker that ended, or does not answer as a worker does. `number` is the signal that ended it, where one did."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number


class _Over(Exception):
    """Nobody waits for the answer any more."""


class DecodeProcesses:
    """Decodes files below `root`, for several threads at once: as many processes are started as threads ask at a time."""

    def __init__(self, root: Path, size: int, max_megapixels: float) -> None:
        self._shape = (size, size, 3)
        self._settings = {
            "root": os.fsencode(root.absolute()).decode("latin-1"),
            "size": size,
            "max_megapixels": max_megapixels,
            # What the user may have set in this process counts in the others too.
            "max_image_pixels": Image.MAX_IMAGE_PIXELS,
            "load_truncated": ImageFile.LOAD_TRUNCATED_IMAGES,
        }
        self._lock = threading.Lock()
        self._all: set[_Worker] = set()
        self._idle: list[_Worker] = []
        self._failed_starts = 0
        self._over = False

    def read(self, files: Mapping[int, ListedFile]) -> dict[int, ReadImage]:
        """The images by their numbers. Those left out are the caller's to read: large ones, or all where no process starts.

        Where a file makes its worker crash, the lot is read again one by one, and that file alone is at fault."""
        with contextlib.suppress(_Died):
            return self._ask(files)
        found: dict[int, ReadImage] = {}
        with one_large_at_a_time:  # it may have been killed for its memory
            for i, file in files.items():
                try:
                    found |= self._ask({i: file})
                except _Died as death:
                    why = " (killed; too little memory?)" if death.number == signal.SIGKILL else ""
                    found[i] = ReadImage(None, None, f"the decoder crashed on it{why}")
        return found

    def kill(self) -> None:
        """Ends all workers, whatever they do. Threads that wait for one get an error."""
        with self._lock:
            self._over = True
            for worker in self._all:
                worker.process.kill()

    def close(self) -> None:
        """After `kill`, when no thread asks any more."""
        for worker in self._all:
            worker.close()
        self._all.clear()
        self._idle.clear()

    def _ask(self, files: Mapping[int, ListedFile]) -> dict[int, ReadImage]:
        worker = self._take() if files else None
        if worker is None:
            return {}
        try:
            images = worker.ask(list(files.values()))
        except _Died:
            self._drop(worker)
            raise
        with self._lock:
            self._idle.append(worker)
        return {i: image for i, image in zip(files, images, strict=True) if image is not None}

    def _take(self) -> "_Worker | None":
        with self._lock:
            if self._over:
                raise _Over
            if self._idle:
                return self._idle.pop()
            if self._failed_starts >= _STARTS_THAT_MAY_FAIL:
                return None
        try:
            worker = _Worker(self._shape)
        except OSError:  # too many processes or open files, too little memory
            self._count_failed_start()
            return None
        with self._lock:
            self._all.add(worker)
            if self._over:
                worker.process.kill()
        try:
            worker.greet(self._settings)
            return worker
        except _Died:
            self._drop(worker)
            self._count_failed_start()
            return None

    def _drop(self, worker: "_Worker") -> None:
        worker.close()
        with self._lock:
            self._all.discard(worker)
            if self._over:
                raise _Over from None

    def _count_failed_start(self) -> None:
        with self._lock:
            self._failed_starts += 1


class _Worker:
    """One process; asked by one thread at a time."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self._shape = shape
        self.process = subprocess.Popen(
            [*_COMMAND, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self._to, self._from = self.process.stdin, self.process.stdout
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with contextlib.suppress(OSError):  # the user's share of such memory may be spent
                fcntl.fcntl(self._from, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def greet(self, settings: Mapping[str, Any]) -> None:
        waiting = select.poll()
        waiting.register(self._from, select.POLLIN)
        try:
            if not waiting.poll(_START_SECONDS * 1000) or self._from.readline(len(HELLO)) != HELLO:
                raise _Died
            self._send(settings)
        except OSError:
            raise _Died from None

    def ask(self, files: list[ListedFile]) -> list[ReadImage | None]:
        """The files' images; None for one that is too large to be decoded beside others."""
        try:
            self._send([[os.fsencode(path).decode("latin-1"), size, time] for path, size, time in files])
            line = self._from.readline(_LONGEST_HEADER)
            if not line.endswith(b"\n"):
                raise _Died
            answer = json.loads(line)
            if "failed" in answer:
                raise RunFailed(str(answer["failed"]))
            rows = [_Row(*row) for row in answer["images"]]
            if len(rows) != len(files):
                raise _Died
            pixels = iter(self._pixels(sum(row.has_pixels for row in rows)))
            return [row.image(pixels) for row in rows]
        except (_Died, OSError, ValueError, KeyError, TypeError, RecursionError):
            raise _Died(self._end()) from None

    def _send(self, content: Any) -> None:
        self._to.write(json.dumps(content).encode("ascii") + b"\n")
        self._to.flush()

    def _pixels(self, count: int) -> npt.NDArray[np.uint8]:
        pixels = np.empty((count, *self._shape), dtype=np.uint8)
        # No other thread is held up while this one reads.
        if count and self._from.readinto(pixels.data.cast("B")) != pixels.nbytes:  # type: ignore[attr-defined]
            raise _Died
        return pixels

    def _end(self) -> int:
        """Ends the process; the signal that had ended it before, else 0."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return max(0, -self.process.wait(1.0))  # its pipe closes a moment before it is gone
        self.process.kill()
        self.process.wait()
        return 0

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self._to, self._from):
            with contextlib.suppress(OSError):  # what could not be sent any more
                pipe.close()


class _Row:
    """What a worker says of one file."""

    def __init__(self, digest: str | None, has_pixels: bool, reason: str, lasting: bool, large: bool) -> None:
        self.digest = None if digest is None else bytes.fromhex(digest)
        self.has_pixels = bool(has_pixels)
        self.reason, self.lasting, self.large = str(reason), bool(lasting), bool(large)

    def image(self, pixels: Any) -> ReadImage | None:
        if self.large:
            return None
        return ReadImage(self.digest, next(pixels) if self.has_pixels else None, self.reason, self.lasting)


def can_be_started() -> bool:
    """False inside a frozen application, whose executable is not Python."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def _environment() -> dict[str, str]:
    """That of this process, with its modules found in the same places and in the same order."""
    home = str(Path(certvol.__file__).parent.parent)
    places = [place for place in sys.path if isinstance(place, str) and place]
    if home not in places:
        places.insert(0, home)
    single = dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
    )  # numpy would start some
    return {**os.environ, **single, "PYTHONPATH": os.pathsep.join(places)}
