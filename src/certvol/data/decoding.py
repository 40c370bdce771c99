"""Image files into uint8 RGB pixels: every format, mode and orientation, or a reason why not."""

import contextlib
import io
import logging
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile

DECODER_VERSION = 1  # part of the key: raise it whenever the same file would decode to other pixels
FORMATS = ("JPEG", "PNG", "BMP", "DIB", "WEBP", "GIF", "TIFF")  # no others: some of Pillow's start programs
Image.init()  # all formats known from here on: on first use, in several threads, some would be missing
_LARGE_PIXELS = 25_000_000

# Pillow logs oddities of TIFF files; without a handler of any kind Python would print them.
logging.getLogger("PIL").addHandler(logging.NullHandler())


class UnreadableImage(Exception):
    """An image that cannot be used; the text is a short reason. `lasting` is False where the file may be readable later."""

    def __init__(self, reason: str, lasting: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.lasting = lasting


class LargeImage(UnreadableImage):
    """An image that `decode` was told to leave alone because of the memory it takes."""


@dataclass(frozen=True)
class ReadImage:
    """One file: `pixels` of a readable image, else the reason why not. `digest` is of the file's bytes, where they were read."""

    digest: bytes | None
    pixels: npt.NDArray[np.uint8] | None
    reason: str = ""
    lasting: bool = True


class _PillowSettings:
    """Pillow's warnings off and its own size limit not below ours, while any thread decodes.

    Both are settings of the whole process, and `warnings.catch_warnings` is not made for threads: so they are changed by
    the first thread to come and restored by the last to leave."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._stack = contextlib.ExitStack()

    @contextlib.contextmanager
    def __call__(self, max_megapixels: float) -> Iterator[None]:
        with self._lock:
            if self._inside == 0:
                self._stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", module=r"PIL\.")
                self._stack.callback(setattr, Image, "MAX_IMAGE_PIXELS", Image.MAX_IMAGE_PIXELS)
            self._inside += 1
            if Image.MAX_IMAGE_PIXELS is not None:  # Pillow refuses above twice its limit
                Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, int(max_megapixels * 1e6 / 2) + 1)
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    self._stack.close()


pillow_settings = _PillowSettings()
one_large_at_a_time = threading.RLock()  # else memory would be threads x the largest image
_one_thread_per_image = [threading.Lock() for _ in range(64)]  # an image opened by Pillow can only be loaded by one

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(raw: bytes, size: int | None, max_megapixels: float, take_large: bool = True) -> npt.NDArray[np.uint8]:
    """RGB pixels of an image file, upright, the first frame, squashed to size x size (None: as they are).

    Transparency is laid on white. Whatever is wrong with the bytes is an UnreadableImage. Large images are decoded one at a
    time in this process; where others decode beside it, `take_large=False` makes them a LargeImage instead."""
    if not raw:
        raise UnreadableImage("empty file (0 bytes)")
    with _faults_as_reasons(max_megapixels), Image.open(io.BytesIO(raw), formats=FORMATS) as image:
        return _pixels(image, size, max_megapixels, take_large)


def upright_size(raw: bytes, max_megapixels: float) -> tuple[int, int]:
    """Width and height of the image as `decode` gives it without a size, from the file's head alone."""
    with _faults_as_reasons(max_megapixels), Image.open(io.BytesIO(raw), formats=FORMATS) as image:
        lies = _orientation(image) in (5, 6, 7, 8)
        return (image.height, image.width) if lies else (image.width, image.height)


def square(image: Image.Image, size: int, max_megapixels: float) -> npt.NDArray[np.uint8]:
    """What `decode` gives for the file that an image was opened from; of several frames, the one it stands at.

    The image keeps its size. A JPEG whose pixels were loaded before is squashed from all of them: near to `decode`, which
    lets large ones be decoded at a reduced size, but not the same."""
    with _one_thread_per_image[id(image) // 16 % len(_one_thread_per_image)], _faults_as_reasons(max_megapixels):
        return _pixels(_to_be_loaded(image), size, max_megapixels)


def _to_be_loaded(image: Image.Image) -> Image.Image:
    """The image, or a JPEG once more from its file: decoded at a reduced size, the given one would stay small for the caller."""
    if not isinstance(image, ImageFile) or not image.tile:
        return image  # has its pixels
    if image.fp is None:
        raise UnreadableImage("its file was closed before its pixels were loaded")
    if not isinstance(image, JpegImageFile):
        return image
    again = Image.open(image.fp, formats=("JPEG",))
    again.seek(image.tell())
    return again


@contextlib.contextmanager
def _faults_as_reasons(max_megapixels: float) -> Iterator[None]:
    try:
        with pillow_settings(max_megapixels):
            yield
    except UnreadableImage:
        raise
    except UnidentifiedImageError:
        raise UnreadableImage("not an image (JPEG, PNG, BMP, WebP, GIF or TIFF)") from None
    except Image.DecompressionBombError:
        raise UnreadableImage(f"too many pixels (data.max_megapixels is {max_megapixels:g})") from None
    except MemoryError:
        raise UnreadableImage("too little memory to decode it") from None
    except Exception as error:  # Pillow raises nearly every kind of error for broken files
        raise UnreadableImage(f"truncated or damaged image ({_short(error)})") from None


def _pixels(
    image: Image.Image, size: int | None, max_megapixels: float, take_large: bool = True
) -> npt.NDArray[np.uint8]:
    count = image.width * image.height
    if count > max_megapixels * 1e6:
        raise UnreadableImage(f"{count / 1e6:.0f} megapixels (data.max_megapixels is {max_megapixels:g})")
    if size is not None:
        image.draft(None, (2 * size, 2 * size))  # a JPEG decodes straight to a half, quarter or eighth
    large = image.width * image.height > _LARGE_PIXELS
    if large and not take_large:
        raise LargeImage("too large to be decoded beside others", lasting=False)
    with one_large_at_a_time if large else contextlib.nullcontext():
        image.load()
        upright = _UPRIGHT.get(_orientation(image))
        small: Image.Image = _eight_bit_rgb_or_grey(image)
        if size is not None and small.size != (size, size):
            small = small.resize((size, size), Image.Resampling.BILINEAR, reducing_gap=3.0)
        if upright is not None:  # after the squash to a square, where it costs little and gives the same
            small = small.transpose(upright)
        return np.array(small if small.mode == "RGB" else small.convert("RGB"), dtype=np.uint8)


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(0x0112, 1))
    except Exception:  # broken EXIF data is no reason to lose the image
        return 1


def _eight_bit_rgb_or_grey(image: Image.Image) -> Image.Image:
    if image.mode in ("RGB", "L") and "transparency" not in image.info:
        return image
    if image.mode == "F" or image.mode.startswith("I"):
        return Image.fromarray(_to_eight_bit(np.asarray(image), is_16_bit=image.mode != "I" or image.format == "PNG"))
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        colours = image.convert("RGBA")
        white = Image.new("RGBA", colours.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, colours).convert("RGB")
    return image.convert("RGB")  # 1, P, CMYK, YCbCr, HSV


def _to_eight_bit(values: npt.NDArray[Any], is_16_bit: bool) -> npt.NDArray[np.uint8]:
    """16-bit values lose their low byte, as Pillow does for 16-bit RGB. Other ranges are not in the file: they are judged
    by the values, 0..1, 0..255 or 0..65535, else from the least to the greatest."""
    if values.dtype.kind == "f":
        values = np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
        low, high = float(values.min()), float(values.max())
        full = next((top for top in (1.0, 255.0, 65535.0) if low >= 0 and high <= top), None)
    else:
        values = values.astype(np.int64)
        low, high = float(values.min()), float(values.max())
        if is_16_bit and low >= 0 and high <= 65535:
            return (values >> 8).astype(np.uint8)
        full = next((top for top in (255.0, 65535.0) if low >= 0 and high <= top), None)
    if full is None:
        values, full = values - low, max(high - low, 1e-12)
    return np.rint(values * (255.0 / full)).clip(0, 255).astype(np.uint8)


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:80] if text and " at 0x" not in text else type(error).__name__
