"""Images decoded once into a file of raw uint8 pixels that training maps into memory.

In the cache folder, a set of images whose key is K has

    K/            the finished set: pixels.bin, hashes.bin, index.json
    K.building/   the same being made, with journal.jsonl: one line per finished block, so that a build goes on after a kill
    K.use         locked (shared) by whoever has the set open; its time says when the set was last used
    K.build       locked by the one process that builds the set
"""

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import logging
import os
import re
import shutil
import stat
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from certvol.config import DataConfig
from certvol.data.folders import Listing, printable, reason_of
from certvol.errors import RunFailed, UserError

DECODER_VERSION = 1  # part of the key: raise it whenever the same file would decode to other pixels
FORMATS = ("JPEG", "PNG", "BMP", "DIB", "WEBP", "GIF", "TIFF")  # no others: some of Pillow's start programs
Image.init()  # all formats known from here on: on first use, in several threads, some would be missing
HASH_BYTES = 16
BLOCK_BYTES = 32 << 20  # pixels between two lines of the journal: what a kill can cost
_TASK_BYTES = 4 << 20
_LARGE_PIXELS = 25_000_000
_LARGE_FILE = 64 << 20
_PROBES = 16
_GB = 1e9

# Pillow logs oddities of TIFF files; without a handler of any kind Python would print them.
logging.getLogger("PIL").addHandler(logging.NullHandler())


class UnreadableImage(Exception):
    """An image that cannot be used; the text is a short reason. `lasting` is False where the file may be readable later."""

    def __init__(self, reason: str, lasting: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.lasting = lasting


class Progress(Protocol):
    """Shows how far a long piece of work is."""

    def start(self, what: str, total: int) -> None: ...
    def advance(self, n: int) -> None: ...
    def finish(self) -> None: ...


# --- decoding ---------------------------------------------------------------------------------------------------------


class _PillowSettings:
    """Pillow's warnings off and its own size limit not below ours, while any thread decodes.

    Both are settings of the whole process, and `warnings.catch_warnings` is not made for threads: so they are changed by
    the first thread to come and restored by the last to leave."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._stack = contextlib.ExitStack()

    @contextlib.contextmanager
    def __call__(self, max_megapixels: float) -> Iterator[None]:
        with self._lock:
            if self._inside == 0:
                self._stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", module=r"PIL\.")
                self._stack.callback(setattr, Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
            self._inside += 1
            if Image.MAX_IMAGE_PIXELS is not None:  # Pillow refuses above twice its limit
                Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, int(max_megapixels * 1e6 / 2) + 1)
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    self._stack.close()


_pillow_settings = _PillowSettings()
_one_large_at_a_time = threading.RLock()  # else memory would be threads x the largest image

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(raw: bytes, size: int | None, max_megapixels: float) -> npt.NDArray[np.uint8]:
    """RGB pixels of an image file, upright, the first frame, squashed to size x size (None: as they are).

    Transparency is laid on white. Whatever is wrong with the bytes is an UnreadableImage."""
    if not raw:
        raise UnreadableImage("empty file (0 bytes)")
    try:
        with _pillow_settings(max_megapixels):
            return _decode(raw, size, max_megapixels)
    except UnreadableImage:
        raise
    except UnidentifiedImageError:
        raise UnreadableImage("not an image (JPEG, PNG, BMP, WebP, GIF or TIFF)") from None
    except Image.DecompressionBombError:
        raise UnreadableImage(f"too many pixels (data.max_megapixels is {max_megapixels:g})") from None
    except MemoryError:
        raise UnreadableImage("too little memory to decode it") from None
    except Exception as error:  # Pillow raises nearly every kind of error for broken files
        raise UnreadableImage(f"truncated or damaged image ({_short(error)})") from None


def _decode(raw: bytes, size: int | None, max_megapixels: float) -> npt.NDArray[np.uint8]:
    with Image.open(io.BytesIO(raw), formats=FORMATS) as image:
        pixels = image.width * image.height
        if pixels > max_megapixels * 1e6:
            raise UnreadableImage(f"{pixels / 1e6:.0f} megapixels (data.max_megapixels is {max_megapixels:g})")
        if size is not None:
            image.draft(None, (2 * size, 2 * size))  # a JPEG decodes straight to a half, quarter or eighth
        with _one_large_at_a_time if image.width * image.height > _LARGE_PIXELS else contextlib.nullcontext():
            image.load()
            upright = _UPRIGHT.get(_orientation(image))
            small: Image.Image = _eight_bit_rgb_or_grey(image)
            if size is not None and small.size != (size, size):
                small = small.resize((size, size), Image.Resampling.BILINEAR, reducing_gap=3.0)
            if upright is not None:
                small = small.transpose(
                    upright
                )  # after the squash to a square, where it costs little and gives the same
            return np.array(small if small.mode == "RGB" else small.convert("RGB"), dtype=np.uint8)


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(0x0112, 1))
    except Exception:  # broken EXIF data is no reason to lose the image
        return 1


def _eight_bit_rgb_or_grey(image: Image.Image) -> Image.Image:
    if image.mode in ("RGB", "L") and "transparency" not in image.info:
        return image
    if image.mode == "F" or image.mode.startswith("I"):
        return Image.fromarray(_to_eight_bit(np.asarray(image), is_16_bit=image.mode != "I" or image.format == "PNG"))
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        colours = image.convert("RGBA")
        white = Image.new("RGBA", colours.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, colours).convert("RGB")
    return image.convert("RGB")  # 1, P, CMYK, YCbCr, HSV


def _to_eight_bit(values: npt.NDArray[Any], is_16_bit: bool) -> npt.NDArray[np.uint8]:
    """16-bit values lose their low byte, as Pillow does for 16-bit RGB. Other ranges are not in the file: they are judged
    by the values, 0..1, 0..255 or 0..65535, else from the least to the greatest."""
    if values.dtype.kind == "f":
        values = np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
        low, high = float(values.min()), float(values.max())
        full = next((top for top in (1.0, 255.0, 65535.0) if low >= 0 and high <= top), None)
    else:
        values = values.astype(np.int64)
        low, high = float(values.min()), float(values.max())
        if is_16_bit and low >= 0 and high <= 65535:
            return (values >> 8).astype(np.uint8)
        full = next((top for top in (255.0, 65535.0) if low >= 0 and high <= top), None)
    if full is None:
        values, full = values - low, max(high - low, 1e-12)
    return np.rint(values * (255.0 / full)).clip(0, 255).astype(np.uint8)


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:80] if text and " at 0x" not in text else type(error).__name__


def read_file(path: Path, max_megapixels: float) -> tuple[bytes, os.stat_result]:
    """The bytes of an image file and its status after they were read. UnreadableImage where that is not possible."""
    most = int(max_megapixels * 8e6) + (64 << 20)  # 16-bit RGBA without compression, and room for what comes with it
    try:
        with _open_to_read(path) as file:
            before = os.fstat(file.fileno())
            if not stat.S_ISREG(before.st_mode):
                raise UnreadableImage("not a file any more", lasting=False)
            if before.st_size > most:
                raise UnreadableImage(f"a file of {before.st_size / _GB:.1f} GB, too large for an image")
            raw = _read_at_most(file, before.st_size + 1)
            return raw, os.fstat(file.fileno())
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise RunFailed("too many open files; raise the limit (ulimit -n) or lower data.workers") from None
        raise UnreadableImage(f"cannot be read: {reason_of(error)}", lasting=False) from None
    except MemoryError:
        raise UnreadableImage("too little memory to read it") from None


def _open_to_read(path: Path) -> io.FileIO:
    """Without waiting: a file that has become a named pipe since it was listed must not hold us up."""
    return io.FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def _read_at_most(file: io.FileIO, count: int) -> bytes:
    parts: list[bytes] = []
    while count > 0 and (part := file.read(count)):
        parts.append(part)
        count -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


# --- reading many files ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadImage:
    """One file: `pixels` of a readable image, else the reason why not. `digest` is of the file's bytes, where they were read."""

    digest: bytes | None
    pixels: npt.NDArray[np.uint8] | None
    reason: str = ""
    lasting: bool = True


def read_images(
    listing: Listing, size: int, config: DataConfig, start: int = 0
) -> Generator[list[ReadImage], None, None]:
    """The images of a listing from number `start` on, in order, in small lots, each file read once. Decoded by threads."""
    lot = max(1, min(16, _TASK_BYTES // (size * size * 3)))
    workers = config.workers or _cores()
    waiting: deque[Future[list[ReadImage]]] = deque()
    watch = _RootWatch(listing.root)

    def read_lot(first: int) -> list[ReadImage]:
        numbers = range(first, min(first + lot, len(listing.paths)))
        return [_read_one(listing, i, size, config.max_megapixels, watch) for i in numbers]

    pool = ThreadPoolExecutor(workers, thread_name_prefix="decode")
    with _pillow_settings(config.max_megapixels):
        try:
            for first in range(start, len(listing.paths), lot):
                waiting.append(pool.submit(read_lot, first))
                if len(waiting) > 2 * workers + 1:  # looks ahead this far and no further: memory stays bounded
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _read_one(listing: Listing, i: int, size: int, max_megapixels: float, watch: "_RootWatch") -> ReadImage:
    large = int(listing.sizes[i]) > _LARGE_FILE
    digest = None
    try:
        with _one_large_at_a_time if large else contextlib.nullcontext():
            raw = _read_as_listed(listing, i, max_megapixels)
            digest = hashlib.blake2b(raw, digest_size=HASH_BYTES).digest()
            return ReadImage(digest, decode(raw, size, max_megapixels))
    except UnreadableImage as error:
        if not error.lasting:
            watch.check()
        return ReadImage(digest, None, error.reason, error.lasting)


def _read_as_listed(listing: Listing, i: int, max_megapixels: float) -> bytes:
    """The bytes of a file that is still the one listed: else the cache's key would not be about them."""
    raw, status = read_file(listing.root / listing.paths[i], max_megapixels)
    listed = (int(listing.sizes[i]), int(listing.mtimes_ns[i]))
    if (status.st_size, status.st_mtime_ns) != listed or len(raw) != status.st_size:
        raise UnreadableImage("changed while being read", lasting=False)
    return raw


def _can_be_read(listing: Listing, i: int, config: DataConfig) -> bool:
    try:
        _read_as_listed(listing, i, config.max_megapixels)
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


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# --- the cache ---------------------------------------------------------------------------------------------------------


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
    with _told_to_the_user(folder):
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
        with _open_to_read(path) as file:
            head = _read_at_most(file, 1 << 16) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
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
        limit = self.config.cache_limit_gb * _GB
        use = self._hold_use()
        try:
            found = self._finished()
            if found is None:
                if needed > limit:
                    raise UserError(
                        f"the {len(self.listing.paths)} images of {printable(str(self.listing.root))} need "
                        f"{_gb(needed)} decoded at {self.size} x {self.size}, above the cache's limit of {_gb(limit)}; "
                        f"raise data.cache_limit_gb (the cache lies in {printable(str(self.folder))}; "
                        "data.cache_dir sets another place)"
                    )
                with _build_lock(self.folder / f"{self.key}.build", progress):
                    found = self._finished()  # another process may have made it while this one waited
                    if found is None:
                        _make_room(self.folder, self.key, needed, int(limit))
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
            use = _locked(path, fcntl.LOCK_SH)
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
        if any(_can_be_read(self.listing, i, self.config) for i, _, lasting in found.failures if not lasting):
            return None  # what could not be read then can be now, as after a change of its permissions
        return found

    def _read_index(self) -> _Set:
        index = self.done / "index.json"
        if not index.is_file():
            raise _Damaged("its index is missing")
        try:
            record = json.loads(index.read_bytes())
            content, checksum = record["content"], record["checksum"]
            if checksum != _checksum(content):
                raise _Damaged("its index has another checksum")
            rows, digest = int(content["rows"]), str(content["hashes"])
            failures = [(int(i), str(reason), bool(lasting)) for i, reason, lasting in content["failures"]]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise _Damaged("its index is not readable") from None
        hashes = (self.done / "hashes.bin").read_bytes()
        if len(hashes) != rows * HASH_BYTES or _digest(hashes) != digest:
            raise _Damaged("its hashes do not fit its index")
        if (self.done / "pixels.bin").stat().st_size != rows * self.row_bytes:
            raise _Damaged("its pixels have another size than its index says")
        if rows + len(failures) != len(self.listing.paths):
            raise _Damaged("its index is about other images")
        return _Set(rows, failures, hashes)

    def _build(self, progress: Progress | None) -> _Set:
        _remove(self.done)
        self.building.mkdir(exist_ok=True)
        if progress:
            progress.start("decoding images", len(self.listing.paths))
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
            writer = _BlockWriter(self.building, self.row_bytes, files)
            if progress:
                progress.advance(writer.seen)
            with contextlib.closing(read_images(self.listing, self.size, self.config, writer.seen)) as lots:
                for lot in lots:
                    writer.add(lot)
                    if writer.unrecorded >= block:
                        writer.finish_block()
                    if progress:
                        progress.advance(len(lot))
            writer.finish_block()
            return _Set(writer.rows, writer.failures, (self.building / "hashes.bin").read_bytes())

    def _publish(self, finished: _Set) -> None:
        content = {"rows": finished.rows, "failures": finished.failures, "hashes": _digest(finished.hashes)}
        with (self.building / "index.json").open("wb") as file:
            file.write(json.dumps({"content": content, "checksum": _checksum(content)}).encode())
            _sync(file)
        _sync_folder(self.building)
        self.building.rename(self.done)
        _sync_folder(self.folder)
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


class _BlockWriter:
    """Appends images to the files of a build, and goes on where the journal of an earlier one ends.

    Pixels reach the disk before the line that says so: whatever lies beyond the last whole line is cut off again."""

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

    def _take_up(self, row_bytes: int) -> None:
        rows_there = min(_length(self._pixels) // row_bytes, _length(self._hashes) // HASH_BYTES)
        self._journal.seek(0)
        valid = 0
        for line in self._journal:
            record = _journal_record(line)
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
        for image in lot:
            if image.pixels is not None and image.digest is not None:
                _write_all(self._pixels, image.pixels.tobytes())
                _write_all(self._hashes, image.digest)
                self.rows += 1
            else:
                self._block_failures.append((self.seen, image.reason, image.lasting))
            self.seen += 1

    def finish_block(self) -> None:
        if self.unrecorded == 0:
            return
        _sync(self._pixels)
        _sync(self._hashes)
        content = {"rows": self.rows, "seen": self.seen, "failures": self._block_failures}
        _write_all(self._journal, json.dumps({"content": content, "checksum": _checksum(content)}).encode() + b"\n")
        _sync(self._journal)
        self.failures += self._block_failures
        self._block_failures = []
        self._recorded = self.seen


def _appending(path: Path) -> io.FileIO:
    """Without buffering: a full disk is met where we write, not when a buffer is emptied on the way out."""
    return io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b")


def _write_all(file: io.FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]


def _length(file: io.FileIO) -> int:
    return os.fstat(file.fileno()).st_size


def _sync(file: io.FileIO | io.BufferedWriter) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    place = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot
            os.fsync(place)
    finally:
        os.close(place)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _checksum(content: Any) -> str:
    return _digest(json.dumps(content, sort_keys=True).encode())


def _journal_record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
        content: dict[str, Any] = record["content"]
        return content if line.endswith(b"\n") and record["checksum"] == _checksum(content) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


# --- room, locks, faults -------------------------------------------------------------------------------------------------

_OURS = re.compile(r"([0-9a-f]{32})(\.building|\.use|\.build)?")


def _make_room(folder: Path, key: str, needed: int, limit: int) -> None:
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
            f"decoding needs {_gb(needed)} beside {_gb(others)} that are in use in {shown}, above the limit of {_gb(limit)}; "
            "raise data.cache_limit_gb, or set data.cache_dir to another place"
        )
    if missing > free:
        raise UserError(
            f"decoding needs {_gb(missing)} in {shown}, where {_gb(free)} are free; "
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
        held = _locked(use, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    try:
        _remove(folder / key)
        _remove(folder / f"{key}.building")
        (folder / f"{key}.build").unlink(missing_ok=True)
        use.unlink(missing_ok=True)
        return True
    except OSError:
        return False
    finally:
        os.close(held)


def _remove(place: Path) -> None:
    """Removes a set's folder, its index first: a removal that is cut short must not leave what looks whole."""
    with contextlib.suppress(FileNotFoundError):
        (place / "index.json").unlink(missing_ok=True)
        shutil.rmtree(place)


def _locked(path: Path, kind: int) -> int:
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
            _flock(file, kind)
            if _is_at(file, path):
                return file
        except BaseException:
            os.close(file)
            raise
        os.close(file)  # the set was evicted between opening and locking: that lock protects nothing


def _flock(file: int, kind: int) -> None:
    try:
        fcntl.flock(file, kind)
    except OSError as error:
        # Some network file systems have no locks. One process at a time works there all the same.
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP):
            raise


def _is_at(file: int, path: Path) -> bool:
    try:
        there, here = path.stat(), os.fstat(file)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


@contextlib.contextmanager
def _build_lock(path: Path, progress: Progress | None) -> Iterator[None]:
    try:
        file = _locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if progress:
            progress.start("waiting for another process that decodes the same images", 1)
        file = _locked(path, fcntl.LOCK_EX)
        if progress:
            progress.advance(1)
            progress.finish()
    try:
        yield
    finally:
        os.close(file)


@contextlib.contextmanager
def _told_to_the_user(folder: Path) -> Iterator[None]:
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
            what = "no space left" if error.errno == errno.ENOSPC else "the disk quota is used up"
            raise UserError(
                f"{what} for decoded images in {shown}; free some space or {elsewhere}: "
                "what is decoded stays and the next run goes on from there"
            ) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(
                f"cannot write decoded images to {shown} ({reason_of(error)}); "
                "set data.cache_dir (or $CERTVOL_CACHE) to a folder you can write to"
            ) from None
        raise RunFailed(
            f"the cache of decoded images in {shown} failed ({reason_of(error)}); what is decoded stays: run again, "
            "or set data.cache_dir to another place"
        ) from None


def _gb(count: float) -> str:
    return f"{count / _GB:.2f} GB" if count >= 1e7 else f"{count / 1e6:.3f} MB"
