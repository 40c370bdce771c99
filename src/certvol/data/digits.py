"""The embedded default, synthetic to real: digits drawn from fonts as the source, handwritten digits as the target.

The target is the UCI set of optically recognised digits that comes with scikit-learn: 32 x 32 bitmaps of handwriting, scaled
to fill the frame, reduced to counts over 4 x 4 blocks. The source is drawn with matplotlib's fonts and reduced the same way.
"""

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from certvol.data.folders import printable
from certvol.errors import UserError

# Those of matplotlib's fonts with digits as people write them: of the rest, most hold symbols, and one dots its zeros.
THIN_FONTS = (
    "DejaVuSans DejaVuSans-Oblique DejaVuSerif DejaVuSerif-Italic STIXGeneral STIXGeneralItalic "
    "cmr10 cmss10 cmti10 cmtt10"
).split()
BOLD_FONTS = (
    "DejaVuSans-Bold DejaVuSans-BoldOblique DejaVuSerif-Bold DejaVuSerif-BoldItalic STIXGeneralBol "
    "STIXGeneralBolIta cmb10"
).split()
SIDE = 32
BLOCK = 4
_CANVAS = 128
_VERSION = 1
_RECORD = "digits.json"
_Bitmap = npt.NDArray[np.uint8]


def write_digits(root: Path, seed: int = 0, per_class: int = 200) -> tuple[Path, Path]:
    """Writes root/source/<digit>/*.png and root/target/<digit>/*.png, unless they are there whole.

    The same seed gives the same pixels."""
    root = Path(root)
    source, target = root / "source", root / "target"
    of_source, of_target = {"version": _VERSION, "seed": seed, "per_class": per_class}, {"version": _VERSION}
    missing = [folder for folder, asked in ((source, of_source), (target, of_target)) if not is_whole(folder, asked)]
    check_replaceable(missing)
    root.mkdir(parents=True, exist_ok=True)
    if source in missing:
        write_folder(source, draw_digits(np.random.default_rng(seed), per_class), of_source)
    if target in missing:
        write_folder(target, handwritten_digits(), of_target)
    return source, target


def draw_digits(rng: np.random.Generator, per_class: int) -> list[tuple[int, _Bitmap]]:
    """(digit, 8 x 8 values 0..16), `per_class` of each digit."""
    fonts = load_fonts()
    return [(digit, draw_digit(digit, fonts, rng)) for digit in range(10) for _ in range(per_class)]


def draw_digit(
    digit: int, fonts: list[ImageFont.FreeTypeFont], rng: np.random.Generator, stroke: tuple[int, int] | None = None
) -> _Bitmap:
    """One digit in a random font, slanted, turned, drawn thicker, then reduced as the real ones were.

    `stroke`: how much thicker at least, and one more than at most; None, for all fonts together: as a pen would, which is
    neither hair nor brush."""
    number = int(rng.integers(len(fonts)))
    low, high = stroke or ((1, 5) if number < len(THIN_FONTS) else (0, 3))
    thicker = int(rng.integers(low, high))
    canvas = Image.new("L", (_CANVAS, _CANVAS))
    middle = (_CANVAS / 2, _CANVAS / 2)
    ImageDraw.Draw(canvas).text(middle, str(digit), fill=255, font=fonts[number], anchor="mm", stroke_width=thicker)
    turned = canvas.transform(canvas.size, Image.Transform.AFFINE, _slant_and_turn(rng), Image.Resampling.BILINEAR)
    return block_counts(_fill_frame(turned, rng))


def _slant_and_turn(rng: np.random.Generator) -> tuple[float, float, float, float, float, float]:
    """The affine map from the new picture to the old, about its middle."""
    turn = math.radians(rng.uniform(-12, 12))
    slant = math.tan(math.radians(rng.uniform(-15, 15)))
    cos, sin = math.cos(turn), math.sin(turn)
    a, b, d, e = cos, slant * cos + sin, -sin, cos - slant * sin
    middle = _CANVAS / 2
    return a, b, middle * (1 - a - b), d, e, middle * (1 - d - e)


def _fill_frame(picture: Image.Image, rng: np.random.Generator) -> _Bitmap:
    """A 32 x 32 bitmap of 0 and 1 with the digit over its whole height, or nearly, and as wide as its shape asks for."""
    digit = picture.crop(picture.getbbox())
    height = round(SIDE * rng.uniform(0.9, 1.0))
    width = round(height * digit.width / digit.height * rng.uniform(0.85, 1.25))
    width = min(max(width, 4), SIDE)
    small = np.asarray(digit.resize((width, height), Image.Resampling.BOX))
    frame = np.zeros((SIDE, SIDE), dtype=np.uint8)
    top = (SIDE - height) // 2
    left = (SIDE - width) // 2
    frame[top : top + height, left : left + width] = small > 127
    return frame


def block_counts(bitmap: _Bitmap) -> _Bitmap:
    """How many of the 16 pixels of each 4 x 4 block are set."""
    blocks = bitmap.reshape(SIDE // BLOCK, BLOCK, SIDE // BLOCK, BLOCK)
    counts: _Bitmap = blocks.sum(axis=(1, 3), dtype=np.uint8)
    return counts


def handwritten_digits() -> list[tuple[int, _Bitmap]]:
    """The 1,797 real digits of scikit-learn: (digit, 8 x 8 values 0..16)."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return [(int(digit), image.astype(np.uint8)) for digit, image in zip(data.target, data.images, strict=True)]


def load_fonts() -> list[ImageFont.FreeTypeFont]:
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    # BASIC: the other layout engine is not in every build of Pillow, and the same seed should draw the same everywhere.
    files = [folder / f"{name}.ttf" for name in (*THIN_FONTS, *BOLD_FONTS)]
    return [ImageFont.truetype(file, 72, layout_engine=ImageFont.Layout.BASIC) for file in files]


def write_folder(folder: Path, images: Sequence[tuple[int, npt.NDArray[np.generic]]], settings: dict[str, int]) -> None:
    """Beside its place first, then renamed into it: a folder that is there is whole."""
    check_replaceable([folder])
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        numbers = [0] * 10
        for digit in range(10):
            (temporary / str(digit)).mkdir()
        for digit, image in images:
            pixels = np.rint(image.astype(np.float64) * (255 / 16)).astype(np.uint8)
            _save(pixels, temporary / str(digit) / f"{numbers[digit]:04d}.png")
            numbers[digit] += 1
        record = {"settings": settings, "names": _names_digest(temporary)}
        (temporary / _RECORD).write_text(json.dumps(record), encoding="utf-8")
        temporary.chmod(0o755)
        old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            if folder.exists():
                folder.rename(old / folder.name)  # not deleted in its place: half of one would pass for a user's
            temporary.rename(folder)
        finally:
            shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_replaceable(folders: Sequence[Path]) -> None:
    """UserError where one of them is neither absent, nor empty, nor written here: it is a user's, and stays."""
    for folder in folders:
        if os.path.lexists(folder) and (folder.is_symlink() or not _is_ours(folder)):
            raise UserError(
                f"{printable(str(folder))} is where digits are to be written, and is not a folder of digits that certvol made: "
                "nothing of it was changed; move it away, or give another place"
            )


def _is_ours(folder: Path) -> bool:
    """Also of other settings, or with files lost; not where something was added beside the classes."""
    try:
        names = {path.name for path in folder.iterdir()}
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8")) if names else {"settings": {}, "names": ""}
    except (OSError, ValueError):
        return False
    own = isinstance(record, dict) and record.keys() == {"settings", "names"}
    return own and names <= {_RECORD, *map(str, range(10))}


def _save(pixels: npt.NDArray[np.uint8], path: Path) -> None:
    try:
        Image.fromarray(pixels).save(path)
    except OSError as error:
        error.filename = str(path)  # a failed write does not say where
        raise


def is_whole(folder: Path, settings: dict[str, int]) -> bool:
    try:
        record = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
        return bool(record["settings"] == settings and record["names"] == _names_digest(folder))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _names_digest(folder: Path) -> str:
    """Of the names and sizes of all images: tells a folder from which files were lost."""
    names = []
    for digit in range(10):
        with os.scandir(folder / str(digit)) as entries:
            names += [f"{digit}/{entry.name} {entry.stat().st_size}" for entry in entries]
    return hashlib.blake2b("\n".join(sorted(names)).encode(), digest_size=16).hexdigest()
