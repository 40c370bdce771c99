"""Open both domains' images in an order that follows from their content, not from their names."""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from certvol.data import Indices, Place
from certvol.data.cache import PixelCache, open_cache
from certvol.data.folders import Listing, about_small_classes, no_images_in, printable, scan
from certvol.data.sources import scan_sources, with_origins
from certvol.errors import UserError
from certvol.files import fingerprint_of
from certvol.progress import Progress
from certvol.settings import DataConfig


@dataclass(frozen=True, eq=False, kw_only=True)
class TargetImages:
    """Unlabelled images, ordered by content; image i is `pixels[rows[i]]`, from `paths[i]`."""

    pixels: npt.NDArray[np.uint8]
    rows: Indices
    paths: list[str]
    failures: list[tuple[str, str]]
    """(path, reason) of files that are left out."""
    fingerprint: str
    """Identifies the images and their order, whatever their names."""
    hashes: npt.NDArray[np.uint8]
    """[n, 16], one per file."""

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, eq=False, kw_only=True)
class SourceImages(TargetImages):
    """Labelled images, ordered by class, then content; image i has class `classes[labels[i]]`."""

    labels: Indices
    classes: list[str]
    origins: Indices
    """The number of each image's folder, if there are several sources; else 0."""


def open_source(
    folders: Place | Sequence[Place],
    size: int,
    config: DataConfig,
    progress: Progress | None = None,
) -> SourceImages:
    """Open the labelled images of one source or several; leave out unreadable ones and list them.

    Paths are relative to the source's folder or, of several, to the folder that holds all.
    """
    places = [folders] if isinstance(folders, str | os.PathLike) else folders
    found = scan_sources(places)
    listing = found.listing
    classes, all_labels = found.labels()
    cache = _open(listing, size, config, progress)
    labels = all_labels[cache.positions]
    stray = [(cache.paths[i], "lies in no class folder") for i in np.flatnonzero(labels < 0)]
    counts = np.bincount(labels[labels >= 0], minlength=len(classes))
    counted = dict(zip(classes, counts, strict=True))
    for text in about_small_classes(counted, f" in {printable(listing.root)}"):
        warnings.warn(text, stacklevel=2)
    kept = np.flatnonzero(counts)
    if len(kept) < 2:
        raise UserError(
            f"only {len(kept)} of the {len(classes)} classes in {printable(listing.root)} has "
            "readable images, and adaptation needs two; `certvol check` lists the unreadable files"
        )
    order = np.lexsort((*sort_keys(cache.hashes), labels))
    order = order[labels[order] >= 0]
    origins = found.part_N[cache.positions][order]
    if found.several and len(np.unique(origins)) < len(places):
        empty = next(i for i in range(len(places)) if i not in origins)
        raise UserError(f"the source {printable(places[empty])} holds no readable images")
    fingerprint = fingerprint_of(cache.hashes[order].tobytes(), labels[order].tobytes())
    return SourceImages(
        pixels=cache.pixels,
        rows=order,
        labels=np.searchsorted(kept, labels[order]),
        classes=[classes[i] for i in kept],
        paths=[cache.paths[i] for i in order],
        failures=sorted(listing.problems + cache.failures + stray),
        fingerprint=with_origins(fingerprint, origins) if found.several else fingerprint,
        hashes=cache.hashes[order],
        origins=origins,
    )


def open_target(
    folder: Place, size: int, config: DataConfig, progress: Progress | None = None
) -> TargetImages:
    """Open all images below `folder`, in any layout."""
    listing = scan(Path(folder))
    if not listing.paths:
        raise UserError(no_images_in(listing))
    cache = _open(listing, size, config, progress)
    order = np.lexsort(sort_keys(cache.hashes))
    return TargetImages(
        pixels=cache.pixels,
        rows=order,
        paths=[cache.paths[i] for i in order],
        failures=sorted(listing.problems + cache.failures),
        fingerprint=fingerprint_of(cache.hashes[order].tobytes()),
        hashes=cache.hashes[order],
    )


def sort_keys(
    hashes: npt.NDArray[np.uint8],
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Split each hash into two numbers for `lexsort`, the less significant first."""
    halves = np.ascontiguousarray(hashes).view(">u8").astype(np.uint64)
    return halves[:, 1], halves[:, 0]


def _open(listing: Listing, size: int, config: DataConfig, progress: Progress | None) -> PixelCache:
    cache = open_cache(listing, size, config, progress)
    if not cache.paths:
        path, reason = cache.failures[0]
        where = f"{len(listing.paths)} image files in {printable(listing.root)}"
        raise UserError(f"none of the {where} can be read (such as {printable(path)}: {reason})")
    return cache
