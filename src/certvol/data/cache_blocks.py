"""The files of a cache that is being built, block by block, with a journal from which a killed build goes on."""

import contextlib
import hashlib
import io
import json
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import numpy as np

from certvol.data.decoding import ReadImage
from certvol.data.reading import HASH_BYTES


class BlockWriter:
    """Appends images to the files of a build, and goes on where the journal of an earlier one ends.

    Pixels reach the disk before the line that says so: whatever lies beyond the last whole line is cut off again. The disk is
    waited for in a thread, one block at a time, while the next block is decoded."""

    def __init__(self, place: Path, row_bytes: int, files: contextlib.ExitStack) -> None:
        self.rows = 0
        self.seen = 0
        self.failures: list[tuple[int, str, bool]] = []
        self._block_failures: list[tuple[int, str, bool]] = []
        self._recorded = 0
        self._pixels = files.enter_context(_appending(place / "pixels.bin"))
        self._hashes = files.enter_context(_appending(place / "hashes.bin"))
        self._journal = files.enter_context(_appending(place / "journal.jsonl"))
        self._take_up(row_bytes)
        self._recording: Future[None] | None = None
        self._recorder = files.enter_context(ThreadPoolExecutor(1))  # ends before the files above are closed

    def _take_up(self, row_bytes: int) -> None:
        rows_there = min(_length(self._pixels) // row_bytes, _length(self._hashes) // HASH_BYTES)
        self._journal.seek(0)
        valid = 0
        for line in self._journal:
            record = journal_record(line)
            if record is None or record["rows"] > rows_there:
                break
            valid += len(line)
            self.rows, self.seen = record["rows"], record["seen"]
            self.failures += [(i, reason, lasting) for i, reason, lasting in record["failures"]]
        self._recorded = self.seen
        for file, length in (
            (self._pixels, self.rows * row_bytes),
            (self._hashes, self.rows * HASH_BYTES),
            (self._journal, valid),
        ):
            file.truncate(length)
            file.seek(length)

    @property
    def unrecorded(self) -> int:
        return self.seen - self._recorded

    def add(self, lot: list[ReadImage]) -> None:
        digests: list[bytes] = []
        for image in lot:
            if image.pixels is not None and image.digest is not None:
                _write_all(self._pixels, np.ascontiguousarray(image.pixels).data.cast("B"))  # without a copy
                digests.append(image.digest)
            else:
                self._block_failures.append((self.seen, image.reason, image.lasting))
            self.seen += 1
        _write_all(self._hashes, b"".join(digests))
        self.rows += len(digests)

    def finish_block(self) -> None:
        """Begins to record what was added; what went wrong with the block before is raised here."""
        self._wait()
        if self.unrecorded == 0:
            return
        content = {"rows": self.rows, "seen": self.seen, "failures": self._block_failures}
        self._recording = self._recorder.submit(self._record, content)
        self.failures += self._block_failures
        self._block_failures = []
        self._recorded = self.seen

    def finish(self) -> None:
        self.finish_block()
        self._wait()

    def _wait(self) -> None:
        if self._recording is not None:
            self._recording.result()

    def _record(self, content: dict[str, Any]) -> None:
        sync(self._pixels)
        sync(self._hashes)
        _write_all(self._journal, sealed(content) + b"\n")
        sync(self._journal)


def _appending(path: Path) -> io.FileIO:
    """Without buffering: a full disk is met where we write, not when a buffer is emptied on the way out."""
    return io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b")


def _write_all(file: io.FileIO, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _length(file: io.FileIO) -> int:
    return os.fstat(file.fileno()).st_size


def sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def digest_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def checksum_of(content: Any) -> str:
    return digest_of(json.dumps(content, sort_keys=True).encode())


def sealed(content: Any) -> bytes:
    """JSON of the content with its checksum."""
    return json.dumps({"content": content, "checksum": checksum_of(content)}).encode()


def journal_record(line: bytes) -> dict[str, Any] | None:
    """What a line of `sealed` holds; None where the line is not whole."""
    try:
        record = json.loads(line)
        content = record["content"]
        whole = line.endswith(b"\n") and record["checksum"] == checksum_of(content)
        return content if whole and isinstance(content, dict) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
