"""The images of both domains as training gets them: in an order that comes from their content, not from their names."""

import hashlib
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from certvol.config import DataConfig
from certvol.data.cache import PixelCache, open_cache
from certvol.data.folders import Listing, labels_of, name_some, no_images_in, printable, scan
from certvol.errors import UserError
from certvol.reporting import Progress


@dataclass(frozen=True, eq=False)
class SourceImages:
    """Image i is `pixels[rows[i]]`, of class `classes[labels[i]]`, from the file `paths[i]`. By class, then by content."""

    pixels: npt.NDArray[np.uint8]
    rows: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    classes: list[str]
    paths: list[str]
    failures: list[tuple[str, str]]
    fingerprint: str
    """Of what the images are, in their order; not of their names."""
    hashes: npt.NDArray[np.uint8]
    """[n, 16], of each file's bytes."""

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, eq=False)
class TargetImages:
    """Image i is `pixels[rows[i]]`, from the file `paths[i]`, ordered by content. There is no label to be had from it."""

    pixels: npt.NDArray[np.uint8]
    rows: npt.NDArray[np.int64]
    paths: list[str]
    failures: list[tuple[str, str]]
    fingerprint: str
    """Of what the images are, in their order; not of their names."""
    hashes: npt.NDArray[np.uint8]
    """[n, 16], of each file's bytes."""

    def __len__(self) -> int:
        return len(self.rows)


def open_source(
    folder: str | os.PathLike[str], size: int, config: DataConfig, progress: Progress | None = None
) -> SourceImages:
    """The labelled images below `folder`. Files that are no readable images are left out and told in `failures`."""
    listing = scan(Path(folder))
    classes, labels = labels_of(listing)
    cache = open_cache(listing, size, config, progress)
    _need_readable(listing, cache)
    labels = labels[cache.positions]
    stray = [(cache.paths[i], "lies in no class folder") for i in np.flatnonzero(labels < 0)]
    counts = np.bincount(labels[labels >= 0], minlength=len(classes))
    _warn_of_small_classes(listing, classes, counts)
    kept = np.flatnonzero(counts)
    if len(kept) < 2:
        raise UserError(
            f"only {len(kept)} of the {len(classes)} classes in {printable(str(listing.root))} has a readable image; "
            "adaptation needs two: `certvol check` lists what is wrong with the files"
        )
    renumbered = np.full(len(classes), -1, dtype=np.int64)
    renumbered[kept] = np.arange(len(kept))
    order = np.lexsort((*sort_keys(cache.hashes), labels))
    order = order[labels[order] >= 0]
    return SourceImages(
        pixels=cache.pixels,
        rows=order,
        labels=renumbered[labels[order]],
        classes=[classes[i] for i in kept],
        paths=[cache.paths[i] for i in order],
        failures=sorted(listing.problems + cache.failures + stray),
        fingerprint=fingerprint_of(cache.hashes[order], labels[order]),
        hashes=cache.hashes[order],
    )


def open_target(
    folder: str | os.PathLike[str], size: int, config: DataConfig, progress: Progress | None = None
) -> TargetImages:
    """All images below `folder`, whichever way they are laid out."""
    listing = scan(Path(folder))
    if not listing.paths:
        raise UserError(no_images_in(listing))
    cache = open_cache(listing, size, config, progress)
    _need_readable(listing, cache)
    order = np.lexsort(sort_keys(cache.hashes))
    return TargetImages(
        pixels=cache.pixels,
        rows=order,
        paths=[cache.paths[i] for i in order],
        failures=sorted(listing.problems + cache.failures),
        fingerprint=fingerprint_of(cache.hashes[order]),
        hashes=cache.hashes[order],
    )


def sort_keys(hashes: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Each hash as two numbers, the less significant first, as `lexsort` wants them."""
    halves = np.ascontiguousarray(hashes).view(">u8").astype(np.uint64)
    return halves[:, 1], halves[:, 0]


def fingerprint_of(*parts: npt.NDArray[np.generic]) -> str:
    return hashlib.blake2b(b"".join(np.ascontiguousarray(part).tobytes() for part in parts), digest_size=16).hexdigest()


def _need_readable(listing: Listing, cache: PixelCache) -> None:
    if not cache.paths:
        path, reason = cache.failures[0]
        raise UserError(
            f"none of the {len(listing.paths)} image files in {printable(str(listing.root))} can be read "
            f"(such as {printable(path)}: {reason})"
        )


def _warn_of_small_classes(listing: Listing, classes: list[str], counts: npt.NDArray[np.int64]) -> None:
    root = printable(str(listing.root))
    unreadable = [name for name, count in zip(classes, counts, strict=True) if count == 0]
    single = [name for name, count in zip(classes, counts, strict=True) if count == 1]
    if unreadable:
        warnings.warn(
            f"left out {len(unreadable)} of the classes in {root}, as none of their images can be read: {name_some(unreadable)}",
            stacklevel=3,
        )
    if single:
        warnings.warn(
            f"{len(single)} of the classes in {root} have one image only: {name_some(single)}; add images if you can",
            stacklevel=3,
        )
