"""Cache decoded images and features of a frozen backbone: compute once, then map into memory."""

import os
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

from certvol.data import Features, Indices
from certvol.data.cache_files import Failure, Row, RowSet
from certvol.data.decode_pool import read_images
from certvol.data.decoding import (
    DECODER_VERSION,
    HASH_BYTES,
    Pixels,
    UnreadableImage,
    read_file,
    read_listed,
)
from certvol.data.folders import Listing, printable
from certvol.errors import UserError
from certvol.files import expanded
from certvol.progress import Progress
from certvol.settings import DataConfig

BLOCK_BYTES = 32 << 20  # pixels between two journal lines; a kill loses at most two such blocks
_FILES_IN_KEY = 16
_HASH = np.dtype((np.uint8, (HASH_BYTES,)))


@dataclass(frozen=True, eq=False)
class PixelCache:
    """The readable images of a listing, in its order.

    The set cannot be evicted while `pixels` or a view of it is alive.
    """

    pixels: Pixels
    """[n, size, size, 3], a read-only map of the file."""
    paths: list[str]
    hashes: npt.NDArray[np.uint8]
    """[n, 16], blake2b of each file's bytes (not of its pixels)."""
    failures: list[tuple[str, str]]
    """(relative path, reason) of the images left out."""
    positions: Indices
    """[n], each image's number in the listing."""


def cache_folder(config: DataConfig) -> Path:
    """Return the setting's folder, else $CERTVOL_CACHE, else a folder in the user's cache."""
    chosen = config.cache_dir or os.environ.get("CERTVOL_CACHE")
    if chosen:
        return expanded(chosen).absolute()
    user = os.environ.get("XDG_CACHE_HOME")
    if user and Path(user).is_absolute():
        return Path(user) / "certvol"
    try:
        return Path.home() / ".cache" / "certvol"
    except RuntimeError:
        raise UserError(
            "this user has no home folder for decoded images; set `data.cache_dir` or CERTVOL_CACHE"
        ) from None


def open_cache(
    listing: Listing, size: int, config: DataConfig, progress: Progress | None = None
) -> PixelCache:
    """Map the decoded images of a listing, after decoding those that no earlier call decoded.

    A build that was killed, or ran out of space, continues from its last finished block.
    """
    images = _Images(listing, size, config)
    block = max(1, BLOCK_BYTES // (size * size * 3))
    index, pixels = images.open(_limit(config), block, progress)
    failed = {failure.item for failure in index.failures}
    positions = np.array([i for i in range(len(listing.paths)) if i not in failed], dtype=np.int64)
    return PixelCache(
        pixels=pixels,
        paths=[listing.paths[i] for i in positions],
        hashes=np.fromfile(images.finished / "hashes.bin", dtype=_HASH),
        failures=[(listing.paths[item], reason) for item, reason, _ in index.failures],
        positions=positions,
    )


def open_features(
    key: str,
    shape: tuple[int, int, int],
    compute: Callable[[int, int], Features],
    chunk: int,
    config: DataConfig,
    progress: Progress | None = None,
) -> Features:
    """Map features, images x views x dimensions, after computing them if no earlier call did.

    `compute(start, stop)` returns the features of `chunk` images; a kill loses about one chunk. The
    set cannot be evicted while the map or a view of it is alive.
    """
    features = _Features(cache_folder(config), key, shape, compute, chunk)
    return features.open(_limit(config), chunk, progress)[1]


def _limit(config: DataConfig) -> int:
    return int(config.cache_limit_gb * 1e9)


def cache_key(listing: Listing, size: int, config: DataConfig) -> str:
    """Name a set after the folder's content and how it is decoded, not after the folder's path.

    Names, sizes and times alone may be the same in two sets unpacked from archives with fixed
    times, so the bytes of a few files are included.
    """
    count, most = len(listing.paths), config.max_megapixels
    settings = f"certvol pixels {DECODER_VERSION} {size} {most!r} {count}\0"
    key = blake2b(settings.encode(), digest_size=16)
    for path in listing.paths:
        key.update(os.fsencode(path) + b"\0")
    key.update(listing.status_N3.T.tobytes())  # all sizes, then all times
    for i in range(0, count, max(1, count // _FILES_IN_KEY)):
        with suppress(UnreadableImage):
            key.update(blake2b(read_file(listing.root / listing.paths[i], most)[0]).digest())
    return key.hexdigest()


class _Images(RowSet):
    noun, task = "decoded images", "decoding images"

    def __init__(self, listing: Listing, size: int, config: DataConfig) -> None:
        self.listing, self.size, self.config = listing, size, config
        files = {"pixels.bin": np.dtype((np.uint8, (size, size, 3))), "hashes.bin": _HASH}
        key = cache_key(listing, size, config)
        super().__init__(cache_folder(config), key, len(listing.paths), files)

    def describe(self) -> str:
        root = printable(str(self.listing.root))
        return f"the {self.items} images of {root} decoded at {self.size} x {self.size}"

    def make(self, start: int) -> Generator[list[Row | Failure], None, None]:
        with closing(read_images(self.listing, self.size, self.config, start)) as groups:
            for group in groups:
                yield [
                    Failure(item, image.reason, image.lasting)
                    if image.pixels is None
                    else (image.pixels.data, memoryview(image.digest or b""))
                    for item, image in enumerate(group, start)
                ]
                start += len(group)

    def is_readable(self, item: int) -> bool:
        try:
            read_listed(self.listing.file(item), self.config.max_megapixels)
            return True
        except UnreadableImage:
            return False


class _Features(RowSet):
    noun, task = "features", "extracting features"

    def __init__(
        self,
        folder: Path,
        key: str,
        shape: tuple[int, int, int],
        compute: Callable[[int, int], Features],
        chunk: int,
    ) -> None:
        images, self.views, _ = shape
        self.compute, self.chunk = compute, chunk
        super().__init__(folder, key, images, {"features.bin": np.dtype((np.float32, shape[1:]))})

    def describe(self) -> str:
        return f"features of {self.items} images in {self.views} views (data.views)"

    def make(self, start: int) -> Generator[list[Row | Failure], None, None]:
        for first in range(start, self.items, self.chunk):
            rows = self.compute(first, min(first + self.chunk, self.items))
            yield [(row.data,) for row in np.ascontiguousarray(rows, dtype=np.float32)]
