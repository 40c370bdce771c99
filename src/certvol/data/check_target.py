"""Warn if a target is small, full of near-duplicates, or has folders with unknown names."""

import difflib
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence

import numpy as np

from certvol.data import Indices
from certvol.data.decoding import Pixels
from certvol.data.folders import class_level, class_of, name_some, printable

HANDFUL = 30  # images
FEW_PER_CLASS = 5
REPEATED = 2  # warn from this many images per distinct one
FEWEST_COMPARED, MOST_COMPARED = 10, 5000  # images
SIDE = 16  # of the small grey versions that are compared
ALIKE = 3.0  # mean difference of grey values, of 255
NAMED = 5
LEAST_SIMILAR = 0.75  # of two names, by difflib


def about_size(images: int, num_classes: int) -> str | None:
    """Warn if there are too few target images to learn from."""
    if images == 0:
        return None
    if images < HANDFUL:
        return (
            f"{images} images are too few to adapt to: a run predicts them, but cannot learn from "
            "them how the target looks; add unlabelled images of the same kind"
        )
    if images < FEW_PER_CLASS * num_classes:
        return (
            f"{images} images for {num_classes} source classes: adaptation can fit the target's "
            "look in general, but hardly that of each class; add unlabelled images of the same kind"
        )
    return None


def about_copies(thumbnails: Sequence[Pixels]) -> str | None:
    """Warn if most images look like other images of the target."""
    chosen = [thumbnails[i] for i in compared(len(thumbnails))] if thumbnails else []
    if len(chosen) < FEWEST_COMPARED:
        return None
    most = len(chosen) // REPEATED + 1
    found = distinct(chosen, most)
    if found == most:
        return None
    which = f"{len(chosen):,} images"
    if len(chosen) < len(thumbnails):
        which += f" (of {len(thumbnails):,})"
    return (
        f"{which} look like {found:,} distinct ones, as frames of a video do; copies teach nothing "
        "new and make rare classes rarer, so keep one of each, or add other images"
    )


def thumbnail(pixels: Pixels) -> Pixels:
    """Shrink a square RGB image, whose side is a multiple of `SIDE`, to SIDE * SIDE grey values.

    They hardly change with the image's size, format and compression, or with slight noise.
    """
    step = len(pixels) // SIDE
    grey = pixels.mean(axis=2).reshape(SIDE, step, SIDE, step).mean(axis=(1, 3))
    return np.asarray(grey.round().astype(np.uint8).ravel())


def compared(count: int) -> Indices:
    """Choose which of `count` images are compared: all, or evenly spread ones."""
    return np.linspace(0, count - 1, min(count, MOST_COMPARED)).round().astype(np.int64)


def distinct(thumbnails: Sequence[Pixels], most: int) -> int:
    """Count images of which no two look alike, up to `most`.

    An image counts unless it looks like one that has been counted.
    """
    counted_KP = np.empty((most, SIDE * SIDE), np.int16)
    count = 0
    for own_P in thumbnails:
        differences_K = np.abs(counted_KP[:count] - own_P.astype(np.int16)).mean(axis=1)
        if (differences_K <= ALIKE).any():
            continue
        if count == most:
            return most
        counted_KP[count] = own_P
        count += 1
    return count


def folder_names(paths: Sequence[str]) -> Counter[str]:
    """Count the images of each folder at the level of class folders."""
    level = class_level(paths)
    found = Counter(class_of(path, level) for path in paths)
    return Counter({name: count for name, count in found.items() if name is not None})


def about_folders(paths: Sequence[str], classes: Sequence[str]) -> str | None:
    """Warn if only some folders are named like source classes, or if names are nearly the same."""
    names = sorted(folder_names(paths))
    known = {unicodedata.normalize("NFC", name) for name in classes}
    strange = [name for name in names if unicodedata.normalize("NFC", name) not in known]
    meant = {name: near for name in strange if (near := similar(name, classes)) is not None}
    if not strange or (len(strange) == len(names) and not meant):
        return None
    text = f"{len(names) - len(strange)} of {len(names)} folders are named like source classes"
    hints = [f"{printable(near)} for {printable(name)}" for name, near in meant.items()]
    if hints:
        more = f" ({len(hints)} in all)" if len(hints) > NAMED else ""
        text += f"; did you mean {', '.join(hints[:NAMED])}{more}?"
    if unknown := [name for name in strange if name not in meant]:
        text += f"; no source class is like {name_some(unknown)}"
    return (
        f"{text}. Adaptation never reads these names; `certvol evaluate` measures the images in "
        "folders that match exactly"
    )


def similar(name: str, classes: Sequence[str]) -> str | None:
    """Return the class that a folder's name probably means: `mug_` or `mugs` for Mug."""
    plain = {_plain(each): each for each in reversed(classes)}
    if _plain(name) in plain:
        return plain[_plain(name)]
    close = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=LEAST_SIMILAR)
    return plain[close[0]] if close else None


def _plain(name: str) -> str:
    """Reduce a name to lower-case letters and digits, without a number in front: `03.Back_Pack`."""
    letters = re.sub(r"[\W_]+", "", unicodedata.normalize("NFC", name).casefold())
    return re.sub(r"^\d+(?=\D)", "", letters) or letters


def domains_above(paths: list[str], classes: set[str]) -> list[str]:
    """Return the first-level folders if each holds folders named like the source's classes."""
    named: Counter[str] = Counter()
    for path in paths:
        first, *rest = path.split("/")
        if rest and rest[0].casefold() == "images":
            rest = rest[1:]
        if len(rest) < 2 or first in classes:
            return []
        named[first] += rest[0] in classes
    return sorted(named) if all(named.values()) else []
