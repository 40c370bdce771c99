"""Make digits, synthetic and real: the demo's two domains, and further domains made from them.

The real digits are the UCI set of handwritten digits that comes with scikit-learn: 32 x 32 bitmaps,
scaled to fill the frame and reduced to counts over 4 x 4 blocks. The synthetic ones are drawn with
matplotlib's fonts and reduced the same way. A picture is 8 x 8, with values from 0 to 16.
"""

import json
import math
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from certvol.data.folders import printable
from certvol.errors import UserError
from certvol.files import fingerprint_of

# The fonts of matplotlib whose digits look handwritten enough: most others hold symbols.
THIN_FONTS = (
    "DejaVuSans DejaVuSans-Oblique DejaVuSerif DejaVuSerif-Italic STIXGeneral STIXGeneralItalic "
    "cmr10 cmss10 cmti10 cmtt10"
).split()
BOLD_FONTS = (
    "DejaVuSans-Bold DejaVuSans-BoldOblique DejaVuSerif-Bold DejaVuSerif-BoldItalic STIXGeneralBol "
    "STIXGeneralBolIta cmb10"
).split()
ALL_FONTS = slice(None)
SIDE, BLOCK = 32, 4
WHITE = 16.0
PER_CLASS = 100  # images of a domain drawn with fonts; domains of real digits have all 1,797
_CANVAS = 128
_VERSION = {"version": 1}
_RECORD = "digits.json"

Picture = npt.NDArray[np.float64]
Digits = Sequence[tuple[int, Picture]]
Stroke = tuple[int, int]  # range of pixels added to the pen; the end is excluded


def write_digits(root: Path, seed: int = 0, per_class: int = 200) -> tuple[Path, Path]:
    """Write root/source/<digit>/*.png and root/target/<digit>/*.png; skip those that are complete.

    The source is drawn from fonts by `seed`, the target is handwritten.
    """
    source, target = Path(root) / "source", Path(root) / "target"
    settings = {**_VERSION, "seed": seed, "per_class": per_class}
    _write_missing(
        {
            source: (settings, lambda: draw_digits(np.random.default_rng(seed), per_class)),
            target: (_VERSION, handwritten_digits),
        }
    )
    return source, target


def write_digit_domains(root: Path, names: Sequence[str]) -> list[Path]:
    """Write root/<name>/<digit>/*.png of each domain; skip those that are complete."""
    _write_missing({root / name: (_VERSION, partial(draw_domain, name)) for name in names})
    return [root / name for name in names]


def digit_domains_exist(root: Path, names: Sequence[str]) -> bool:
    return all(_is_complete(root / name, _VERSION) for name in names)


# --- pictures -------------------------------------------------------------------------------------


def draw_digits(
    rng: np.random.Generator, per_class: int, fonts: slice = ALL_FONTS, stroke: Stroke | None = None
) -> Digits:
    loaded = load_fonts()[fonts]
    digits = [digit for digit in range(10) for _ in range(per_class)]
    return [(digit, draw_digit(digit, loaded, rng, stroke)) for digit in digits]


def draw_digit(
    digit: int,
    fonts: list[ImageFont.FreeTypeFont],
    rng: np.random.Generator,
    stroke: Stroke | None = None,
) -> Picture:
    """Draw a digit in a random font, slanted, turned and thickened, and reduce it to a picture.

    Without `stroke`, `fonts` are all fonts, and thin ones are thickened more, as if drawn with one
    pen.
    """
    number = int(rng.integers(len(fonts)))
    thicker = int(rng.integers(*(stroke or ((1, 5) if number < len(THIN_FONTS) else (0, 3)))))
    canvas = Image.new("L", (_CANVAS, _CANVAS))
    middle = (_CANVAS / 2, _CANVAS / 2)
    ImageDraw.Draw(canvas).text(
        middle, str(digit), fill=255, font=fonts[number], anchor="mm", stroke_width=thicker
    )
    affine, matrix = Image.Transform.AFFINE, _slant_and_turn(rng)
    turned = canvas.transform(canvas.size, affine, matrix, Image.Resampling.BILINEAR)
    return block_counts(_fill_frame(turned, rng))


def _slant_and_turn(rng: np.random.Generator) -> tuple[float, float, float, float, float, float]:
    """Draw the affine map from the new image to the old, about its middle."""
    turn = math.radians(rng.uniform(-12, 12))
    slant = math.tan(math.radians(rng.uniform(-15, 15)))
    cos, sin = math.cos(turn), math.sin(turn)
    a, b, d, e = cos, slant * cos + sin, -sin, cos - slant * sin
    middle = _CANVAS / 2
    return a, b, middle * (1 - a - b), d, e, middle * (1 - d - e)


def _fill_frame(image: Image.Image, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Scale the digit to (almost) the height of a 32 x 32 bitmap, and about in proportion."""
    digit = image.crop(image.getbbox())
    height = round(SIDE * rng.uniform(0.9, 1.0))
    width = round(height * digit.width / digit.height * rng.uniform(0.85, 1.25))
    width = min(max(width, 4), SIDE)
    small = np.asarray(digit.resize((width, height), Image.Resampling.BOX))
    frame = np.zeros((SIDE, SIDE), dtype=np.bool_)
    top, left = (SIDE - height) // 2, (SIDE - width) // 2
    frame[top : top + height, left : left + width] = small > 127
    return frame


def block_counts(bitmap: npt.NDArray[np.bool_]) -> Picture:
    """Count the pixels that are set in each 4 x 4 block."""
    blocks = bitmap.reshape(SIDE // BLOCK, BLOCK, SIDE // BLOCK, BLOCK)
    return np.asarray(blocks.sum(axis=(1, 3), dtype=np.float64))


def handwritten_digits() -> Digits:
    from sklearn.datasets import load_digits

    data = load_digits()
    return [(int(digit), image) for digit, image in zip(data.target, data.images, strict=True)]


def load_fonts() -> list[ImageFont.FreeTypeFont]:
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    # Not every build of Pillow has the other layout engine, and a seed should always draw the same.
    basic = ImageFont.Layout.BASIC
    files = [folder / f"{name}.ttf" for name in (*THIN_FONTS, *BOLD_FONTS)]
    return [ImageFont.truetype(file, 72, layout_engine=basic) for file in files]


# --- domains --------------------------------------------------------------------------------------


def draw_domain(name: str, per_class: int = PER_CLASS) -> Digits:
    """Draw a domain; its seed follows from the name, so the pictures are the same everywhere."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if name in PENS:
        drawn = draw_digits(rng, per_class, *PENS[name])
        return [(digit, WHITE - picture if name == "ink" else picture) for digit, picture in drawn]
    change = CHANGES[name]
    return [(digit, change(picture, rng).clip(0, WHITE)) for digit, picture in handwritten_digits()]


def _image(picture: Picture) -> Image.Image:
    return Image.fromarray(np.rint(picture * (255 / WHITE)).astype(np.uint8))


def _reduced(image: Image.Image, side: int = 8) -> Picture:
    small = image.resize((side, side), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float64) * (WHITE / 255)


def _turn(picture: Picture, rng: np.random.Generator) -> Picture:
    angle = rng.uniform(20, 35) * rng.choice([-1, 1])
    return _reduced(_image(picture).resize((64, 64)).rotate(angle, Image.Resampling.BILINEAR))


def _blur(picture: Picture, rng: np.random.Generator) -> Picture:
    blur = ImageFilter.GaussianBlur(rng.uniform(3, 5))
    return _reduced(_image(picture).resize((32, 32)).filter(blur))


def _rule(picture: Picture, rng: np.random.Generator) -> Picture:
    """Put stripes of any direction and width behind the digit, as on ruled paper."""
    y, x = np.mgrid[0:8, 0:8]
    angle, width = rng.uniform(0, np.pi), rng.uniform(1.2, 2.5)
    phase = rng.uniform(0, 2 * np.pi)
    waves = np.sin((x * np.cos(angle) + y * np.sin(angle)) * np.pi / width + phase)
    return np.asarray(np.maximum(picture, (waves > 0) * rng.uniform(4, 8)))


def _light(picture: Picture, rng: np.random.Generator) -> Picture:
    """Light the paper from one side: it brightens across the picture, and the digit pales."""
    y, x = np.mgrid[0:8, 0:8] / 7 - 0.5
    angle = rng.uniform(0, 2 * np.pi)
    return np.asarray(5 + 7 * (x * np.cos(angle) + y * np.sin(angle)) + picture * 0.5)


def _stain(picture: Picture, rng: np.random.Generator) -> Picture:
    top, left = rng.integers(0, 6, 2)
    stained = picture.copy()
    stained[top : top + 3, left : left + 3] = rng.choice([0.0, WHITE])
    return stained


def _shrink(picture: Picture, rng: np.random.Generator) -> Picture:
    """Shrink to three quarters of the size, anywhere in the frame."""
    top, left = rng.integers(0, 3, 2)
    frame = np.zeros((8, 8))
    frame[top : top + 6, left : left + 6] = _reduced(_image(picture).resize((32, 32)), 6)
    return frame


PENS: dict[str, tuple[slice, Stroke | None]] = {
    "fonts": (ALL_FONTS, None),
    "thin": (slice(0, len(THIN_FONTS)), (0, 1)),
    "bold": (slice(len(THIN_FONTS), None), (3, 6)),
    "ink": (ALL_FONTS, None),  # dark on light
}
CHANGES: dict[str, Callable[[Picture, np.random.Generator], Picture]] = {
    "real": lambda picture, rng: picture,
    "turned": _turn,
    "blurred": _blur,
    "ruled": _rule,
    "lit": _light,
    "stained": _stain,
    "small": _shrink,
}
DOMAINS = (*PENS, *CHANGES)


# --- folders --------------------------------------------------------------------------------------


def _write_missing(wanted: Mapping[Path, tuple[Mapping[str, int], Callable[[], Digits]]]) -> None:
    missing = [folder for folder in wanted if not _is_complete(folder, wanted[folder][0])]
    for folder in missing:
        check_replaceable(folder)
    for folder in missing:
        settings, draw = wanted[folder]
        folder.parent.mkdir(parents=True, exist_ok=True)
        _write_folder(folder, draw(), settings)


def check_replaceable(folder: Path) -> None:
    """Raise UserError if the folder is neither absent, nor empty, nor written by certvol."""
    if os.path.lexists(folder) and (folder.is_symlink() or not _is_ours(folder)):
        raise UserError(
            f"cannot write digits to {printable(folder)}: it is not a folder of digits that "
            "certvol made; move it away, or use another folder"
        )


def _is_ours(folder: Path) -> bool:
    """Accept a folder of digits, even of other settings or with lost files, but nothing else."""
    try:
        names = {path.name for path in folder.iterdir()}
    except OSError:
        return False
    return not names or (names <= {_RECORD, *map(str, range(10))} and bool(_read_record(folder)))


def _read_record(folder: Path) -> dict[str, Any]:
    """Return the record of a folder of digits, empty for another folder."""
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    is_record = isinstance(record, dict) and record.keys() == {"settings", "names"}
    return record if is_record else {}


def _write_folder(folder: Path, digits: Digits, settings: Mapping[str, int]) -> None:
    """Write beside the folder, then rename, so that a folder that exists is complete."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        new = temporary / "new"
        for digit in range(10):
            (new / str(digit)).mkdir(parents=True)
            pictures = [picture for other, picture in digits if other == digit]
            for number, picture in enumerate(pictures):
                _image(picture).save(new / str(digit) / f"{number:04d}.png")
        record = {"settings": settings, "names": _names_digest(new)}
        (new / _RECORD).write_text(json.dumps(record), encoding="utf-8")
        if folder.exists():
            folder.rename(temporary / "old")
        new.rename(folder)
    except OSError as error:
        error.filename = error.filename or str(folder)  # Pillow does not name the file
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _is_complete(folder: Path, settings: Mapping[str, int]) -> bool:
    return _read_record(folder) == {"settings": settings, "names": _names_digest(folder)}


def _names_digest(folder: Path) -> str:
    """Hash the names and sizes of all images, to notice lost files."""
    images = folder.glob("[0-9]/*")
    names = [f"{path.parent.name}/{path.name} {path.lstat().st_size}" for path in images]
    return fingerprint_of("\n".join(sorted(names)).encode())
