"""Features of images computed once into a file of raw float32 numbers that training maps into memory.

It lies beside the decoded images, under the same limit and with the same locks (see `cache.py` for the names of the files).
Rows are computed chunk by chunk; the journal names each finished chunk, so that a build goes on after a kill.
"""

import contextlib
import fcntl
import json
import os
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from certvol.config import DataConfig
from certvol.data.cache import cache_folder
from certvol.data.cache_blocks import checksum_of, journal_record, sealed, sync
from certvol.data.cache_room import GB, build_lock, gb, locked, make_room, remove_set, told_to_the_user
from certvol.data.folders import printable
from certvol.errors import UserError
from certvol.file_systems import sync_folder
from certvol.reporting import Progress

Features = npt.NDArray[np.float32]


def open_features(
    key: str,
    shape: tuple[int, int, int],
    compute: Callable[[int, int], Features],
    chunk: int,
    config: DataConfig,
    progress: Progress | None = None,
) -> Features:
    """Images x views x dimensions, a read-only map: found under `key`, else made by `compute(start, stop)`, `chunk` images
    at a time. The set cannot be evicted while the map or a view of it is alive."""
    folder = cache_folder(config)
    with told_to_the_user(folder, "features"):
        return _FeatureSet(folder, key, shape, int(config.cache_limit_gb * GB)).open(compute, chunk, progress)


class _FeatureSet:
    def __init__(self, folder: Path, key: str, shape: tuple[int, int, int], limit: int) -> None:
        self.folder, self.key, self.shape, self.limit = folder, key, shape, limit
        self.row_bytes = shape[1] * shape[2] * 4
        self.done, self.building = folder / key, folder / f"{key}.building"

    def open(self, compute: Callable[[int, int], Features], chunk: int, progress: Progress | None) -> Features:
        self.folder.mkdir(parents=True, exist_ok=True)
        use = locked(self.folder / f"{self.key}.use", fcntl.LOCK_SH)
        try:
            with contextlib.suppress(OSError):
                os.utime(self.folder / f"{self.key}.use")
            if not self._finished():
                self._check_limit()
                with build_lock(self.folder / f"{self.key}.build", progress, "extracts the same features"):
                    if not self._finished():  # another process may have made it while this one waited
                        needed = self.shape[0] * self.row_bytes
                        make_room(self.folder, self.key, needed, self.limit, "extracting features")
                        self._build(compute, chunk, progress)
            mapped = np.memmap(self.done / "features.bin", dtype=np.float32, mode="r", shape=self.shape)
        except BaseException:
            os.close(use)
            raise
        weakref.finalize(mapped._mmap, os.close, use)  # type: ignore[attr-defined]
        return mapped

    def _check_limit(self) -> None:
        needed = self.shape[0] * self.row_bytes
        if needed > self.limit:
            raise UserError(
                f"features of {self.shape[0]} images in {self.shape[1]} views need {gb(needed)}, above the cache's limit of "
                f"{gb(self.limit)}; lower data.views or raise data.cache_limit_gb (the cache lies in "
                f"{printable(str(self.folder))})"
            )

    def _finished(self) -> bool:
        if not self.done.exists():
            return False
        try:
            record = json.loads((self.done / "index.json").read_bytes())
            content = record["content"]
            whole = record["checksum"] == checksum_of(content) and tuple(content["shape"]) == self.shape
            size = (self.done / "features.bin").stat().st_size
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            whole, size = False, 0
        if whole and size == self.shape[0] * self.row_bytes:
            return True
        warnings.warn(f"the features in {printable(str(self.done))} are damaged; extracting them again", stacklevel=4)
        return False

    def _build(self, compute: Callable[[int, int], Features], chunk: int, progress: Progress | None) -> None:
        remove_set(self.done)
        self.building.mkdir(exist_ok=True)
        try:
            with (
                (self.building / "features.bin").open("ab+") as rows,
                (self.building / "journal").open("ab+") as journal,
            ):
                row = self._take_up(rows, journal, chunk)
                if progress:
                    progress.start("extracting features", self.shape[0], row)
                while row < self.shape[0]:
                    stop = min(row + chunk, self.shape[0])
                    rows.write(np.ascontiguousarray(compute(row, stop), dtype=np.float32).tobytes())
                    sync(rows)  # the rows reach the disk before the line that says so
                    journal.write(sealed({"rows": stop, "chunk": chunk}) + b"\n")
                    sync(journal)
                    if progress:
                        progress.advance(stop - row)
                    row = stop
        finally:
            if progress:
                progress.finish()
        with (self.building / "index.json").open("wb") as file:
            file.write(sealed({"shape": list(self.shape)}))
            sync(file)
        sync_folder(self.building)
        self.building.rename(self.done)
        sync_folder(self.folder)
        (self.done / "journal").unlink(missing_ok=True)

    def _take_up(self, rows: IO[bytes], journal: IO[bytes], chunk: int) -> int:
        """How many rows an earlier build has finished. Whatever lies beyond them is cut off."""
        journal.seek(0)
        done = valid = 0
        there = os.fstat(rows.fileno()).st_size // self.row_bytes
        for line in journal:
            record = journal_record(line) or {}
            rows_then = record.get("rows") if record.get("chunk") == chunk else None
            if not isinstance(rows_then, int) or not done <= rows_then <= there:
                break
            done, valid = rows_then, valid + len(line)
        rows.truncate(done * self.row_bytes)
        journal.truncate(valid)
        return done
