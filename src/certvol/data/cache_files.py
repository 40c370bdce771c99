"""Sets of rows in the cache folder, built block by block and then mapped into memory.

A set whose key is K has

    K/            the finished set: a file for each part of its rows, and index.json
    K.building/   the same while it is built, and journal.jsonl: a line per finished block, from
                  which a later process resumes a build that was killed
    K.use         locked (shared) by each process that has the set open; modified at the last use
    K.build       locked by the one process that builds the set
"""

import contextlib
import fcntl
import io
import json
import os
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from certvol.data.cache_space import explain_errors, make_room, remove_set
from certvol.data.folders import printable, reason_of
from certvol.files import fingerprint_of, lock_removable, sync, sync_folder, write_atomically
from certvol.progress import Progress, Silent

Row = tuple[memoryview, ...]
"""The parts of one row, one for each file of the set."""


class Failure(NamedTuple):
    """An item without a row. If the failure is not `lasting`, the item may be readable later."""

    item: int
    reason: str
    lasting: bool


@dataclass
class Index:
    """The number of rows of a set, in the order of its items, and the items without a row."""

    rows: int = 0
    failures: list[Failure] = field(default_factory=list)

    @property
    def items(self) -> int:
        return self.rows + len(self.failures)


class RowSet(ABC):
    """A set of rows. A subclass makes the rows and names them for messages.

    `files` gives what each file holds of a row. The first file is mapped; the others are small, and
    are verified whenever the set is opened.
    """

    noun: str
    task: str

    def __init__(self, folder: Path, key: str, items: int, files: dict[str, np.dtype[Any]]) -> None:
        self.folder, self.key, self.items, self.files = folder, key, items, files
        self.finished, self.building = folder / key, folder / f"{key}.building"

    @abstractmethod
    def make(self, start: int) -> Generator[list[Row | Failure], None, None]:
        """Make the rows of all items from number `start` on, in order and in small groups."""

    @abstractmethod
    def describe(self) -> str:
        """Describe the rows and their number, for the message that the cache is too small."""

    def is_readable(self, item: int) -> bool:
        """Return True if an item that failed for a temporary reason can be read now."""
        return False

    def open(
        self, limit: int, block: int, progress: Progress | None
    ) -> tuple[Index, npt.NDArray[Any]]:
        """Map the set, and build it first if needed; every `block` items add a line to the journal.

        The set cannot be evicted while the array or a view of it is alive.
        """
        with explain_errors(self.folder, self.noun):
            lock = self._lock_for_use()
            try:
                index = self._read_index() or self._build(limit, block, progress or Silent())
                return index, self._map(index, lock)
            except BaseException:
                os.close(lock)
                raise

    def _lock_for_use(self) -> int:
        path = self.folder / f"{self.key}.use"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = lock_removable(path, fcntl.LOCK_SH)
            with contextlib.suppress(OSError):
                os.utime(path)
            return lock
        except OSError:
            index = self.finished / "index.json"
            if index.is_file():  # a finished set in a folder without write permission
                return os.open(index, os.O_RDONLY | os.O_CLOEXEC)
            raise

    def _read_index(self) -> Index | None:
        """Read and check the index of the finished set; None if the set has to be built."""
        if not self.finished.exists():
            return None
        try:
            record = json.loads((self.finished / "index.json").read_bytes())
            index = Index(record["rows"], [Failure(*failure) for failure in record["failures"]])
            for name, part in self.files.items():
                if (self.finished / name).stat().st_size != index.rows * part.itemsize:
                    raise ValueError(f"{name} has another size than the index says")
            if _digests(self.finished, self.files) != record["digests"]:
                raise ValueError("its files have another content than the index says")
        except (OSError, ValueError, KeyError, TypeError) as error:
            warnings.warn(
                f"the {self.noun} in {printable(str(self.finished))} are damaged "
                f"({reason_of(error)}); making them again",
                stacklevel=4,
            )
            return None
        if any(
            not failure.lasting and self.is_readable(failure.item) for failure in index.failures
        ):
            return None
        return index

    def _map(self, index: Index, lock: int) -> npt.NDArray[Any]:
        name, part = next(iter(self.files.items()))
        if index.rows == 0:  # an empty file cannot be mapped
            os.close(lock)
            return np.zeros(0, dtype=part)
        mapped = np.memmap(self.finished / name, dtype=part, mode="r", shape=(index.rows,))
        # Views keep the map alive, not this array, so the lock goes with the map.
        weakref.finalize(mapped._mmap, os.close, lock)  # type: ignore[attr-defined]
        return mapped

    def _build(self, limit: int, block: int, progress: Progress) -> Index:
        with self._locked_for_building(progress):
            if index := self._read_index():  # built by another process while this one waited
                return index
            needed = self.items * sum(part.itemsize for part in self.files.values())
            make_room(self.folder, self.key, needed, limit, self.describe())
            remove_set(self.finished)
            self.building.mkdir(exist_ok=True)
            with contextlib.ExitStack() as open_files:
                open_files.callback(progress.finish)
                writer = BlockWriter(self.building, self.files, open_files)
                index = writer.index
                progress.start(self.task, self.items, index.items)
                groups = open_files.enter_context(contextlib.closing(self.make(index.items)))
                for group in groups:
                    writer.add(group)
                    if writer.unrecorded >= block:
                        writer.end_block()
                    progress.advance(len(group))
                writer.finish()
            digests = _digests(self.building, self.files)
            content = {"rows": index.rows, "failures": index.failures, "digests": digests}
            write_atomically(self.building / "index.json", json.dumps(content).encode())
            self.building.rename(self.finished)
            sync_folder(self.folder)
            # Not earlier: before the rename, losing the journal would lose the whole build.
            (self.finished / "journal.jsonl").unlink(missing_ok=True)
            return index

    @contextlib.contextmanager
    def _locked_for_building(self, progress: Progress) -> Iterator[None]:
        path = self.folder / f"{self.key}.build"
        try:
            lock = lock_removable(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.start(f"waiting for another process: {self.task}", 1)
            lock = lock_removable(path, fcntl.LOCK_EX)
            progress.advance(1)
            progress.finish()
        try:
            yield
        finally:
            os.close(lock)


class BlockWriter:
    """Append rows to the files of a build, starting at the end of an earlier build's journal.

    Rows reach the disk before the journal line that counts them. Rows after the last complete line
    are cut off. A thread waits for the disk while the next block is made.
    """

    def __init__(
        self, folder: Path, files: dict[str, np.dtype[Any]], open_files: contextlib.ExitStack
    ) -> None:
        self.index = Index()
        self._files = [open_files.enter_context(_open_unbuffered(folder / name)) for name in files]
        self._journal = open_files.enter_context(_open_unbuffered(folder / "journal.jsonl"))
        self._resume([part.itemsize for part in files.values()])
        self._recorded = self.index.items
        self._block_failures: list[Failure] = []
        self._recording: Future[None] | None = None
        self._recorder = open_files.enter_context(ThreadPoolExecutor(1))

    def _resume(self, row_bytes: list[int]) -> None:
        sizes = [os.fstat(file.fileno()).st_size for file in self._files]
        whole_rows = min(size // row for size, row in zip(sizes, row_bytes, strict=True))
        journal_bytes = 0
        for line in self._journal:
            try:
                block = json.loads(line) if line.endswith(b"\n") else {}
                rows, failures = block["rows"], [Failure(*failure) for failure in block["failures"]]
            except (ValueError, KeyError, TypeError):  # not complete
                break
            if rows > whole_rows:
                break
            self.index.rows = rows
            self.index.failures += failures
            journal_bytes += len(line)
        lengths = [self.index.rows * row for row in row_bytes]
        for file, length in zip(self._files, lengths, strict=True):
            _cut(file, length)
        _cut(self._journal, journal_bytes)

    @property
    def unrecorded(self) -> int:
        """The number of items added since the last block ended."""
        return self.index.items - self._recorded

    def add(self, group: list[Row | Failure]) -> None:
        for entry in group:
            if isinstance(entry, Failure):
                self.index.failures.append(entry)
                self._block_failures.append(entry)
            else:
                for file, part in zip(self._files, entry, strict=True):
                    _write_all(file, part)
                self.index.rows += 1

    def end_block(self) -> None:
        """Start recording the added items; raise the error of the previous block, if any."""
        self._wait()
        content = {"rows": self.index.rows, "failures": self._block_failures}
        self._recording = self._recorder.submit(self._record, content)
        self._block_failures = []
        self._recorded = self.index.items

    def finish(self) -> None:
        if self.unrecorded:
            self.end_block()
        self._wait()

    def _wait(self) -> None:
        if self._recording is not None:
            self._recording.result()

    def _record(self, content: dict[str, Any]) -> None:
        for file in self._files:
            sync(file)
        _write_all(self._journal, json.dumps(content).encode() + b"\n")
        sync(self._journal)


def _open_unbuffered(path: Path) -> io.FileIO:
    # A buffer would report a full disk only when the file is closed.
    return io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b")


def _cut(file: io.FileIO, length: int) -> None:
    file.truncate(length)
    file.seek(length)


def _write_all(file: io.FileIO, data: memoryview | bytes) -> None:
    view = memoryview(data).cast("B")
    while view:  # an unbuffered file may write a part
        view = view[file.write(view) :]


def _digests(folder: Path, files: dict[str, np.dtype[Any]]) -> dict[str, str]:
    """Return a digest of each small file."""
    return {name: fingerprint_of((folder / name).read_bytes()) for name in list(files)[1:]}
