"""Make thumbnails in sheets of about 200, so that a page decodes only the sheets it shows.

A thumbnail is squashed to a square cell. Its true shape is kept beside it, and the page stretches
it back.
"""

import base64
import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from certvol.data.decode_pool import cores
from certvol.data.decoding import UnreadableImage, decode, read_file, upright_size
from certvol.progress import Progress

COLUMNS = 16
PER_SHEET = COLUMNS * 12
MOST_THUMBNAILS = 20_000
# Largest number of images -> side of a cell, a multiple of WebP's blocks of 16 pixels.
_CELLS = {3_000: 96, 10_000: 80}
_SMALLEST_CELL = 64
_QUALITIES = (75, 60, 45, 30, 15, 5)
_LOSSLESS_CELL = 32  # lossy compression would smear such small thumbnails into each other
_WIDEST = 4.0


@dataclass(frozen=True)
class Thumbnails:
    """Sheets of thumbnails; number i is cell `i % PER_SHEET` of sheet `i // PER_SHEET`."""

    cell: int
    sheets: list[bytes]
    """WebP."""
    shapes: list[int]
    """Per thumbnail 100 x width / height; 0 if the image could not be read."""
    skipped: int = 0
    """The number of images without a thumbnail, in the middle of the list."""

    @property
    def missing(self) -> int:
        return self.shapes.count(0)

    def encoded(self) -> list[str]:
        return [base64.b64encode(sheet).decode("ascii") for sheet in self.sheets]

    def data(self) -> dict[str, Any]:
        """Return what assets/pictures.js needs to find a thumbnail."""
        return {
            "cell": self.cell,
            "columns": COLUMNS,
            "perSheet": PER_SHEET,
            "shapes": self.shapes,
            "skipFrom": len(self.shapes) // 2 if self.skipped else len(self.shapes),
            "skipped": self.skipped,
        }


def make_thumbnails(
    root: Path, paths: Sequence[str], max_megapixels: float, budget: int, progress: Progress
) -> Thumbnails:
    """Make thumbnails of the first and last images, 20,000 at most.

    `budget`: how many bytes the sheets may take in base64.
    """
    half = MOST_THUMBNAILS // 2
    skipped = max(0, len(paths) - 2 * half)
    chosen = [*paths[:half], *paths[-half:]] if skipped else paths
    cell = _cell_size(root, chosen, max_megapixels)
    starts = range(0, len(chosen), PER_SHEET)
    each = int(budget * 3 / 4 / max(1, len(starts))) - 4
    sheets: list[bytes] = []
    shapes: list[int] = []

    def make(start: int) -> tuple[bytes, list[int]]:
        pixels, found = _sheet(root, chosen[start : start + PER_SHEET], cell, max_megapixels)
        return _encoded(pixels, each, lossless=cell <= _LOSSLESS_CELL), found

    progress.start("thumbnails", len(chosen))
    with ThreadPoolExecutor(cores()) as pool:
        for sheet, found in pool.map(make, starts):
            sheets.append(sheet)
            shapes += found
            progress.advance(len(found))
    progress.finish()
    return Thumbnails(cell, sheets, shapes, skipped)


def _cell_size(root: Path, paths: Sequence[str], max_megapixels: float) -> int:
    """Return a side no larger than sampled images: digits, for example, have only 8 x 8 pixels."""
    largest = 0
    for path in paths[:: max(1, len(paths) // 32)]:
        try:
            largest = max(largest, *upright_size(_read(root, path, max_megapixels), max_megapixels))
        except UnreadableImage:
            continue
    wanted = next((cell for most, cell in _CELLS.items() if len(paths) <= most), _SMALLEST_CELL)
    return wanted if largest == 0 else min(wanted, max(8, largest))


def _read(root: Path, path: str, max_megapixels: float) -> bytes:
    """Read only images below `root`, because the table may come from a stranger."""
    parts = PurePosixPath(path)
    if parts.is_absolute() or ".." in parts.parts or "\0" in path:
        raise UnreadableImage("leads out of the folder")
    return read_file(root / path, max_megapixels)[0]


def _sheet(
    root: Path, paths: Sequence[str], cell: int, max_megapixels: float
) -> tuple[NDArray[np.uint8], list[int]]:
    rows = -(-len(paths) // COLUMNS)
    pixels_HWC = np.full((rows * cell, COLUMNS * cell, 3), 127, dtype=np.uint8)
    shapes: list[int] = []
    for i, path in enumerate(paths):
        top, left = i // COLUMNS * cell, i % COLUMNS * cell
        try:
            raw = _read(root, path, max_megapixels)
            width, height = upright_size(raw, max_megapixels)
            pixels_HWC[top : top + cell, left : left + cell] = decode(raw, cell, max_megapixels)
            shapes.append(round(100 * min(max(width / height, 1 / _WIDEST), _WIDEST)))
        except UnreadableImage:
            shapes.append(0)
    return pixels_HWC, shapes


def _encoded(pixels_HWC: NDArray[np.uint8], budget: int, lossless: bool) -> bytes:
    """Encode with the best quality that fits or, as a last resort, with fewer pixels."""
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
