"""Images decoded once into a file of raw uint8 pixels that training maps into memory.

In the cache folder, a set of images whose key is K has

    K/            the finished set: pixels.bin, hashes.bin, index.json
    K.building/   the same being made, with journal.jsonl: one line per finished block, so that a build goes on after a kill
    K.use         locked (shared) by whoever has the set open; its time says when the set was last used
    K.build       locked by the one process that builds the set
"""

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from certvol.config import DataConfig
from certvol.data.cache_blocks import BlockWriter, checksum_of, digest_of, sealed, sync
from certvol.data.cache_room import GB, build_lock, gb, locked, make_room, remove_set, told_to_the_user
from certvol.data.decoding import DECODER_VERSION
from certvol.data.folders import Listing, printable, reason_of
from certvol.data.reading import HASH_BYTES, can_be_read, open_to_read, read_at_most, read_images
from certvol.errors import UserError
from certvol.file_systems import sync_folder
from certvol.reporting import Progress

BLOCK_BYTES = 32 << 20  # pixels between two lines of the journal: a kill costs two such blocks at most
_PROBES = 16


@dataclass(frozen=True, eq=False)
class PixelCache:
    """The readable images of a listing, in its order. The set cannot be evicted while `pixels` or a view of it is alive."""

    pixels: npt.NDArray[np.uint8]
    """[n, size, size, 3], a read-only map of the file."""
    paths: list[str]
    hashes: npt.NDArray[np.uint8]
    """[n, 16], blake2b of each FILE's bytes."""
    failures: list[tuple[str, str]]
    """(relative path, reason) of the images left out."""
    positions: npt.NDArray[np.int64]
    """[n], each image's number in the listing."""


@dataclass(frozen=True)
class _Set:
    """What a finished cache says of itself, beside the pixels."""

    rows: int
    failures: list[tuple[int, str, bool]]  # number in the listing, reason, lasting
    hashes: bytes


class _Damaged(Exception):
    """A finished cache that is not what its index says."""


def cache_folder(config: DataConfig) -> Path:
    """Where decoded images are kept: the setting, else $CERTVOL_CACHE, else the user's cache folder."""
    chosen = config.cache_dir or os.environ.get("CERTVOL_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    user = os.environ.get("XDG_CACHE_HOME")
    return (Path(user) if user and Path(user).is_absolute() else Path.home() / ".cache") / "certvol"


def open_cache(listing: Listing, size: int, config: DataConfig, progress: Progress | None = None) -> PixelCache:
    """The decoded images of a listing: mapped where they were decoded before, else decoded now.

    A build that is killed, or runs out of space, goes on from its last finished block when it is asked for again."""
    if not listing.paths:
        none = np.zeros((0, size, size, 3), dtype=np.uint8)
        return PixelCache(none, [], np.zeros((0, HASH_BYTES), np.uint8), [], np.zeros(0, np.int64))
    folder = cache_folder(config)
    with told_to_the_user(folder):
        return _Cache(folder, cache_key(listing, size, config), listing, size, config).open(progress)


def cache_key(listing: Listing, size: int, config: DataConfig) -> str:
    """Names what the folder holds and how it is decoded. Where the folder lies does not matter.

    Names, sizes and times alone could agree for two sets unpacked from archives with fixed times, so the bytes of a few
    files count too."""
    key = hashlib.blake2b(digest_size=16)
    key.update(f"certvol pixels {DECODER_VERSION} {size} {config.max_megapixels!r} {len(listing.paths)}\0".encode())
    for first in range(0, len(listing.paths), 10_000):
        key.update("\0".join([*listing.paths[first : first + 10_000], ""]).encode("utf-8", "surrogateescape"))
    key.update(listing.sizes.tobytes())
    key.update(listing.mtimes_ns.tobytes())
    for i in np.unique(np.linspace(0, len(listing.paths) - 1, _PROBES).astype(int)):
        key.update(_probe(listing.root / listing.paths[i]))
    return key.hexdigest()


def _probe(path: Path) -> bytes:
    """A digest of the head of a file; of nothing where it cannot be read, which is told when it is decoded."""
    try:
        with open_to_read(path) as file:
            head = read_at_most(file, 1 << 16) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
    except OSError:
        head = b""
    return hashlib.blake2b(head, digest_size=16).digest()


class _Cache:
    """One set of images in the cache folder."""

    def __init__(self, folder: Path, key: str, listing: Listing, size: int, config: DataConfig) -> None:
        self.folder = folder
        self.key = key
        self.listing = listing
        self.size = size
        self.config = config
        self.row_bytes = size * size * 3
        self.done = folder / key
        self.building = folder / f"{key}.building"

    def open(self, progress: Progress | None) -> PixelCache:
        needed = self.row_bytes * len(self.listing.paths)
        limit = self.config.cache_limit_gb * GB
        use = self._hold_use()
        try:
            found = self._finished()
            if found is None:
                if needed > limit:
                    raise UserError(
                        f"the {len(self.listing.paths)} images of {printable(str(self.listing.root))} need "
                        f"{gb(needed)} decoded at {self.size} x {self.size}, above the cache's limit of {gb(limit)}; "
                        f"raise data.cache_limit_gb (the cache lies in {printable(str(self.folder))}; "
                        "data.cache_dir sets another place)"
                    )
                with build_lock(self.folder / f"{self.key}.build", progress):
                    found = self._finished()  # another process may have made it while this one waited
                    if found is None:
                        make_room(self.folder, self.key, needed, int(limit))
                        found = self._build(progress)
            return self._map(found, use)
        except BaseException:
            os.close(use)
            raise

    def _hold_use(self) -> int:
        """A shared lock on the set, and the note that it was used now."""
        path = self.folder / f"{self.key}.use"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            use = locked(path, fcntl.LOCK_SH)
            with contextlib.suppress(OSError):
                os.utime(path)
            return use
        except OSError:
            if (self.done / "index.json").is_file():  # a finished cache in a place that can only be read
                return os.open(self.done / "index.json", os.O_RDONLY | os.O_CLOEXEC)
            raise

    def _finished(self) -> _Set | None:
        """The finished set, checked. None where there is none, or none that can be used."""
        if not self.done.exists():
            return None
        try:
            found = self._read_index()
        except (_Damaged, OSError) as problem:
            reason = reason_of(problem)
            warnings.warn(
                f"the decoded images in {printable(str(self.done))} are damaged ({reason}); decoding them again",
                stacklevel=4,
            )
            return None
        if any(can_be_read(self.listing, i, self.config) for i, _, lasting in found.failures if not lasting):
            return None  # what could not be read then can be now, as after a change of its permissions
        return found

    def _read_index(self) -> _Set:
        index = self.done / "index.json"
        if not index.is_file():
            raise _Damaged("its index is missing")
        try:
            record = json.loads(index.read_bytes())
            content, checksum = record["content"], record["checksum"]
            if checksum != checksum_of(content):
                raise _Damaged("its index has another checksum")
            rows, digest = int(content["rows"]), str(content["hashes"])
            failures = [(int(i), str(reason), bool(lasting)) for i, reason, lasting in content["failures"]]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise _Damaged("its index is not readable") from None
        hashes = (self.done / "hashes.bin").read_bytes()
        if len(hashes) != rows * HASH_BYTES or digest_of(hashes) != digest:
            raise _Damaged("its hashes do not fit its index")
        if (self.done / "pixels.bin").stat().st_size != rows * self.row_bytes:
            raise _Damaged("its pixels have another size than its index says")
        if rows + len(failures) != len(self.listing.paths):
            raise _Damaged("its index is about other images")
        return _Set(rows, failures, hashes)

    def _build(self, progress: Progress | None) -> _Set:
        remove_set(self.done)
        self.building.mkdir(exist_ok=True)
        try:
            finished = self._decode_all(progress)
            self._publish(finished)
            return finished
        finally:
            if progress:
                progress.finish()

    def _decode_all(self, progress: Progress | None) -> _Set:
        block = max(1, BLOCK_BYTES // self.row_bytes)
        with contextlib.ExitStack() as files:
            writer = BlockWriter(self.building, self.row_bytes, files)
            if progress:
                progress.start("decoding images", len(self.listing.paths), writer.seen)
            with contextlib.closing(read_images(self.listing, self.size, self.config, writer.seen)) as lots:
                for lot in lots:
                    writer.add(lot)
                    if writer.unrecorded >= block:
                        writer.finish_block()
                    if progress:
                        progress.advance(len(lot))
            writer.finish()
            return _Set(writer.rows, writer.failures, (self.building / "hashes.bin").read_bytes())

    def _publish(self, finished: _Set) -> None:
        content = {"rows": finished.rows, "failures": finished.failures, "hashes": digest_of(finished.hashes)}
        with (self.building / "index.json").open("wb") as file:
            file.write(sealed(content))
            sync(file)
        sync_folder(self.building)
        self.building.rename(self.done)
        sync_folder(self.folder)
        (self.done / "journal.jsonl").unlink(missing_ok=True)  # not before: a kill here would cost the whole build

    def _map(self, found: _Set, use: int) -> PixelCache:
        left_out = {i for i, _, _ in found.failures}
        paths = self.listing.paths
        kept = np.fromiter((i for i in range(len(paths)) if i not in left_out), dtype=np.int64, count=found.rows)
        return PixelCache(
            paths=[paths[i] for i in kept] if left_out else paths,
            hashes=np.frombuffer(found.hashes, dtype=np.uint8).reshape(-1, HASH_BYTES),
            failures=[(paths[i], reason) for i, reason, _ in found.failures],
            positions=kept,
            pixels=self._map_pixels(found.rows, use),
        )

    def _map_pixels(self, rows: int, use: int) -> npt.NDArray[np.uint8]:
        shape = (rows, self.size, self.size, 3)
        if rows == 0:  # an empty file cannot be mapped
            os.close(use)
            return np.zeros(shape, dtype=np.uint8)
        mapped = np.memmap(self.done / "pixels.bin", dtype=np.uint8, mode="r", shape=shape)
        # Views keep the map alive and not this array, so the lock goes with the map.
        weakref.finalize(mapped._mmap, os.close, use)  # type: ignore[attr-defined]
        return mapped
