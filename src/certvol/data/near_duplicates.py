"""Count images that look different, because many frames of a video are hardly more than one.

It compares small grey versions of images, which hardly change with size, format, compression or
slight noise. P pixels, N images.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from certvol.data.decoding import Pixels

SIDE = 16
ALIKE = 3.0  # mean difference of grey values, of 255
MOST_COMPARED = 5000


def thumbnail(pixels: Pixels) -> Pixels:
    """Shrink a square RGB image, whose side is a multiple of `SIDE`, to SIDE * SIDE grey values."""
    step = len(pixels) // SIDE
    grey = pixels.mean(axis=2).reshape(SIDE, step, SIDE, step).mean(axis=(1, 3))
    return np.asarray(grey.round().astype(np.uint8).ravel())


def compared(count: int) -> npt.NDArray[np.int64]:
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
