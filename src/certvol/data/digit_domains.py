"""Further domains from the demo's two sets of digits: other pens, other light, other paper.

All are drawn by a fixed seed of their own, so that they are the same images everywhere. Those made of handwritten digits hold all
1,797 of them; those drawn from fonts hold 100 of each digit.
"""

import functools
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFilter

from certvol.data import digits

PER_CLASS = 100
WHITE = 16.0  # the values of an 8 x 8 digit go from 0 to this
_VERSION = 1
_Picture = npt.NDArray[np.float64]
_Change = Callable[[_Picture, np.random.Generator], _Picture]


def _drawn(rng: np.random.Generator, fonts: slice, stroke: tuple[int, int] | None) -> list[tuple[int, _Picture]]:
    loaded = digits.load_fonts()[fonts]
    return [
        (digit, digits.draw_digit(digit, loaded, rng, stroke).astype(np.float64))
        for digit in range(10)
        for _ in range(PER_CLASS)
    ]


def _handwritten(rng: np.random.Generator, change: _Change | None = None) -> list[tuple[int, _Picture]]:
    pictures = [(digit, picture.astype(np.float64)) for digit, picture in digits.handwritten_digits()]
    if change is None:
        return pictures
    return [(digit, change(picture, rng).clip(0, WHITE)) for digit, picture in pictures]


def _as_image(picture: _Picture, side: int) -> Image.Image:
    return Image.fromarray(np.rint(picture * (255 / WHITE)).astype(np.uint8)).resize((side, side))


def _as_picture(image: Image.Image) -> _Picture:
    return np.asarray(image, dtype=np.float64) * (WHITE / 255)


def _turn(picture: _Picture, rng: np.random.Generator) -> _Picture:
    angle = rng.uniform(20, 35) * rng.choice([-1, 1])
    turned = _as_image(picture, 64).rotate(angle, Image.Resampling.BILINEAR)
    return _as_picture(turned.resize((8, 8), Image.Resampling.BOX))


def _blur(picture: _Picture, rng: np.random.Generator) -> _Picture:
    blurred = _as_image(picture, 32).filter(ImageFilter.GaussianBlur(rng.uniform(3, 5)))
    return _as_picture(blurred.resize((8, 8), Image.Resampling.BOX))


def _rule(picture: _Picture, rng: np.random.Generator) -> _Picture:
    """On ruled paper: stripes of any direction and width behind the digit."""
    y, x = np.mgrid[0:8, 0:8]
    angle, width = rng.uniform(0, np.pi), rng.uniform(1.2, 2.5)
    waves = np.sin((x * np.cos(angle) + y * np.sin(angle)) * np.pi / width + rng.uniform(0, 2 * np.pi))
    stripes: _Picture = (waves > 0) * rng.uniform(4, 8)
    return np.maximum(picture, stripes)


def _light(picture: _Picture, rng: np.random.Generator) -> _Picture:
    """Light from one side: the ground brightens across the picture, and the digit pales."""
    y, x = np.mgrid[0:8, 0:8] / 7 - 0.5
    angle = rng.uniform(0, 2 * np.pi)
    ground: _Picture = 5 + 7 * (x * np.cos(angle) + y * np.sin(angle))
    return np.add(ground, picture * 0.5)


def _stain(picture: _Picture, rng: np.random.Generator) -> _Picture:
    top, left = rng.integers(0, 6, 2)
    stained = picture.copy()
    stained[top : top + 3, left : left + 3] = rng.choice([0.0, WHITE])
    return stained


def _shrink(picture: _Picture, rng: np.random.Generator) -> _Picture:
    """Two thirds of the size, anywhere in the frame."""
    small = _as_picture(_as_image(picture, 32).resize((6, 6), Image.Resampling.BOX))
    top, left = rng.integers(0, 3, 2)
    frame = np.zeros((8, 8))
    frame[top : top + 6, left : left + 6] = small
    return frame


def _fonts(rng: np.random.Generator) -> list[tuple[int, _Picture]]:
    return _drawn(rng, slice(None), None)


def _thin(rng: np.random.Generator) -> list[tuple[int, _Picture]]:
    return _drawn(rng, slice(0, len(digits.THIN_FONTS)), (0, 1))


def _bold(rng: np.random.Generator) -> list[tuple[int, _Picture]]:
    return _drawn(rng, slice(len(digits.THIN_FONTS), None), (3, 6))


def _ink(rng: np.random.Generator) -> list[tuple[int, _Picture]]:
    """Dark on light."""
    return [(digit, WHITE - picture) for digit, picture in _drawn(rng, slice(None), None)]


def _written(change: _Change | None = None) -> Callable[[np.random.Generator], list[tuple[int, _Picture]]]:
    return functools.partial(_handwritten, change=change)


DOMAINS: dict[str, Callable[[np.random.Generator], list[tuple[int, _Picture]]]] = {
    "fonts": _fonts,
    "thin": _thin,
    "bold": _bold,
    "ink": _ink,
    "real": _written(),
    "turned": _written(_turn),
    "blurred": _written(_blur),
    "ruled": _written(_rule),
    "lit": _written(_light),
    "stained": _written(_stain),
    "small": _written(_shrink),
}


_SETTINGS = {"version": _VERSION}


def are_whole(root: Path, names: Sequence[str]) -> bool:
    return all(digits.is_whole(root / name, _SETTINGS) for name in names)


def write_digit_domains(root: Path, names: Sequence[str]) -> list[Path]:
    """root/<name>/<digit>/*.png of each, unless it is there whole."""
    missing = [name for name in names if not are_whole(root, [name])]
    digits.check_replaceable([root / name for name in missing])  # all of them, before one is written
    root.mkdir(parents=True, exist_ok=True)
    for name in missing:
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        digits.write_folder(root / name, DOMAINS[name](rng), _SETTINGS)
    return [root / name for name in names]
