"""Small pictures of many images, in sheets: one file for some 200 images, which a page decodes only when one is looked at.

A thumbnail is squashed to a square cell; its true shape is kept beside it, and the page stretches it back.
"""

import base64
import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from certvol.data.decoding import UnreadableImage, decode, upright_size
from certvol.data.reading import cores, read_file
from certvol.reporting import Progress

COLUMNS = 16
PER_SHEET = COLUMNS * 12
MOST_THUMBNAILS = 20_000
_CELLS = (
    (3_000, 96),
    (10_000, 80),
    (MOST_THUMBNAILS, 64),
)  # images up to -> side of a cell; blocks of WebP have 16 pixels
_QUALITIES = (75, 60, 45, 30, 15, 5)
_LOSSLESS_CELL = 32  # compression would smear one thumbnail of this size into the next
_WIDEST = 4.0
_GREY = 127


@dataclass(frozen=True)
class Thumbnails:
    """Image i is cell `i % PER_SHEET` of sheet `i // PER_SHEET`."""

    cell: int
    sheets: list[bytes]
    """WebP."""
    shapes: list[int]
    """Per image 100 x width / height; 0 where the image could not be read."""

    @property
    def missing(self) -> int:
        return self.shapes.count(0)

    def encoded(self) -> list[str]:
        return [base64.b64encode(sheet).decode("ascii") for sheet in self.sheets]


def make_thumbnails(
    root: Path, paths: Sequence[str], max_megapixels: float, budget: int, progress: Progress, workers: int = 0
) -> Thumbnails:
    """`budget`: bytes that the sheets may take, as base64 text."""
    cell = _cell_size(root, paths, max_megapixels)
    starts = range(0, len(paths), PER_SHEET)
    each = int(budget * 3 / 4 / max(1, len(starts))) - 4
    sheets: list[bytes] = []
    shapes: list[int] = []

    def make(start: int) -> tuple[bytes, list[int]]:
        return _sheet(root, paths[start : start + PER_SHEET], cell, max_megapixels, each)

    progress.start("thumbnails", len(paths))
    with ThreadPoolExecutor(workers or cores()) as pool:
        for sheet, found in pool.map(make, starts):
            sheets.append(sheet)
            shapes += found
            progress.advance(len(found))
    progress.finish()
    return Thumbnails(cell, sheets, shapes)


def _cell_size(root: Path, paths: Sequence[str], max_megapixels: float) -> int:
    """No larger than the images are: those of the digits have 8 x 8 pixels."""
    largest = 0
    for path in paths[:: max(1, len(paths) // 32)]:
        try:
            largest = max(largest, *upright_size(_read(root, path, max_megapixels), max_megapixels))
        except UnreadableImage:
            continue
    wanted = next((cell for most, cell in _CELLS if len(paths) <= most), _CELLS[-1][1])
    return wanted if largest == 0 else min(wanted, max(8, largest))


def _read(root: Path, path: str, max_megapixels: float) -> bytes:
    """A table from elsewhere must not lead out of the images' folder: the page may be shown to others."""
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or "\0" in path:
        raise UnreadableImage("leads out of the folder")
    return read_file(root / path, max_megapixels)[0]


def _sheet(root: Path, paths: Sequence[str], cell: int, max_megapixels: float, budget: int) -> tuple[bytes, list[int]]:
    rows = -(-len(paths) // COLUMNS)
    pixels_HWC = np.full((rows * cell, COLUMNS * cell, 3), _GREY, dtype=np.uint8)
    shapes: list[int] = []
    for number, path in enumerate(paths):
        top, left = number // COLUMNS * cell, number % COLUMNS * cell
        try:
            raw = _read(root, path, max_megapixels)
            width, height = upright_size(raw, max_megapixels)
            pixels_HWC[top : top + cell, left : left + cell] = decode(raw, cell, max_megapixels)
            shapes.append(round(100 * min(max(width / height, 1 / _WIDEST), _WIDEST)))
        except UnreadableImage:
            shapes.append(0)
    return _encoded(pixels_HWC, budget, lossless=cell <= _LOSSLESS_CELL), shapes


def _encoded(pixels_HWC: NDArray[np.uint8], budget: int, lossless: bool) -> bytes:
    """The best quality that the budget allows; where none does, fewer pixels, which the page stretches."""
    image = Image.fromarray(pixels_HWC)
    if lossless and len(data := _webp(image, lossless=True, method=3)) <= budget:
        return data
    for quality in _QUALITIES:
        if len(data := _webp(image, quality=quality, method=2)) <= budget:
            return data
    while min(image.size) > COLUMNS and len(data) > budget:
        image = image.reduce(2)
        data = _webp(image, quality=_QUALITIES[-1], method=2)
    return data


def _webp(image: Image.Image, **options: int) -> bytes:
    data = io.BytesIO()
    image.save(data, "WEBP", **options)
    return data.getvalue()
