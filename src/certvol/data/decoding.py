"""Decode image files of every format, mode and orientation to uint8 RGB, or say why not."""

import contextlib
import errno
import hashlib
import io
import logging
import os
import re
import stat
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile

from certvol.data.folders import ListedFile, reason_of
from certvol.errors import RunFailed

DECODER_VERSION = 1  # part of cache keys: increase it when files would decode to other pixels
HASH_BYTES = 16
# No others: some of Pillow's formats start programs.
FORMATS = ("JPEG", "PNG", "BMP", "DIB", "WEBP", "GIF", "TIFF", "AVIF", "HEIF")
with contextlib.suppress(ImportError):
    from pillow_heif import register_heif_opener

    register_heif_opener()
Image.init()  # register all formats now: doing so on first use misses some if threads race
_LARGE_PIXELS = 25_000_000
_MOST_SCANS = 100  # of a progressive JPEG, which usually has about ten; an empty scan takes as long
_HEIF_BRANDS = (b"heic", b"heix", b"hevc", b"hevx", b"heim", b"heis", b"mif1", b"msf1")
_AVIF_BRANDS = (b"avif", b"avis")
_MARKER = re.compile(rb"\xff+([^\x00\xff\xd0-\xd7])")
_EXIF_ORIENTATION = 0x0112

Pixels = npt.NDArray[np.uint8]

# Pillow logs oddities of TIFF files, and Python prints them if there is no handler.
logging.getLogger("PIL").addHandler(logging.NullHandler())


class UnreadableImage(Exception):
    """Raised for an unusable image, with a short reason. If not `lasting`, try again later."""

    def __init__(self, reason: str, lasting: bool = True) -> None:
        super().__init__(reason)
        self.reason, self.lasting = reason, lasting


class LargeImage(Exception):
    """Raised for an image that needs too much memory to be decoded beside others."""


@dataclass(frozen=True)
class ReadImage:
    """One file: the pixels of a readable image, or the reason why there are none.

    `digest` is a hash of the file's bytes, or None if they could not be read.
    """

    digest: bytes | None
    pixels: Pixels | None
    reason: str = ""
    lasting: bool = True


class _PillowSettings:
    """Turn off Pillow's warnings, and raise its size limit to ours, while any thread decodes.

    Both are settings of the whole process, and `warnings.catch_warnings` is not thread-safe. So the
    first thread to enter changes them and the last one to leave restores them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._restore = contextlib.ExitStack()

    @contextlib.contextmanager
    def __call__(self, max_megapixels: float) -> Iterator[None]:
        with self._lock:
            limit = Image.MAX_IMAGE_PIXELS
            if self._inside == 0:
                self._restore.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", module=r"PIL\.")
                self._restore.callback(setattr, Image, "MAX_IMAGE_PIXELS", limit)
            self._inside += 1
            if limit is not None:  # Pillow refuses images above twice its limit
                Image.MAX_IMAGE_PIXELS = max(limit, int(max_megapixels * 1e6 / 2) + 1)
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    self._restore.close()


pillow_settings = _PillowSettings()
one_large_at_a_time = threading.RLock()  # bounds memory: not every thread decodes a large image
_image_locks = [threading.Lock() for _ in range(64)]  # Pillow loads an image in one thread only

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def read_image(
    file: ListedFile, size: int, max_megapixels: float, take_large: bool = True
) -> ReadImage:
    """Read and decode a listed file. See `decode` for `take_large`."""
    digest = None
    try:
        raw = read_listed(file, max_megapixels)
        digest = hashlib.blake2b(raw, digest_size=HASH_BYTES).digest()
        return ReadImage(digest, decode(raw, size, max_megapixels, take_large))
    except UnreadableImage as error:
        return ReadImage(digest, None, error.reason, error.lasting)


def read_listed(file: ListedFile, max_megapixels: float) -> bytes:
    """Read a file that must not have changed since it was listed: cache keys rely on it."""
    raw, status = read_file(Path(file.path), max_megapixels)
    if ListedFile.of(file.path, status) != file or len(raw) != status.st_size:
        raise UnreadableImage("changed while being read", lasting=False)
    return raw


def read_file(path: Path, max_megapixels: float) -> tuple[bytes, os.stat_result]:
    """Return an image file's bytes, and its status after reading; else raise UnreadableImage."""
    most = int(max_megapixels * 8e6) + (64 << 20)  # uncompressed 16-bit RGBA, and metadata
    try:
        # Non-blocking: a file that has become a named pipe since it was listed must not hang us.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:  # noqa: PTH123
            before = os.fstat(descriptor)
            if not stat.S_ISREG(before.st_mode):
                raise UnreadableImage("not a file any more", lasting=False)
            if before.st_size > most:
                size = f"{before.st_size / 1e9:.1f} GB"
                raise UnreadableImage(f"a file of {size}, too large for an image")
            return file.read(before.st_size + 1), os.fstat(descriptor)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise RunFailed(
                "too many open files; raise the limit (ulimit -n) or lower data.workers"
            ) from None
        raise UnreadableImage(f"cannot be read: {reason_of(error)}", lasting=False) from None
    except ValueError:  # a NUL in the path
        raise UnreadableImage("its path is invalid") from None
    except MemoryError:
        raise UnreadableImage("too little memory to read it") from None


def _explain_unknown(raw: bytes) -> UnreadableImage:
    """Return the error for a file that Pillow does not open; name a package that would."""
    brand = raw[8:12] if raw[4:8] == b"ftyp" else b""
    if brand in _HEIF_BRANDS and "HEIF" not in Image.OPEN:
        reason = "a HEIC image; run `pip install 'certvol[heif]'` to read it"
        return UnreadableImage(reason, lasting=False)
    if brand in _AVIF_BRANDS and "AVIF" not in Image.OPEN:
        reason = "an AVIF image; run `pip install -U pillow` to read it (11.3 or newer)"
        return UnreadableImage(reason, lasting=False)
    return UnreadableImage("not an image (JPEG, PNG, BMP, WebP, GIF, TIFF, AVIF or HEIC)")


def decode(raw: bytes, size: int | None, max_megapixels: float, take_large: bool = True) -> Pixels:
    """Decode an image file to RGB pixels: upright, first frame, squashed to size x size if given.

    Transparent parts become white. Raise UnreadableImage for whatever is wrong with the bytes. This
    process decodes large images one at a time; a worker that cannot know what others do says
    `take_large=False` and gets a LargeImage error instead.
    """
    if not raw:
        raise UnreadableImage("empty file (0 bytes)")
    with _opened(raw, max_megapixels) as image:
        return _pixels(image, size, max_megapixels, take_large)


def upright_size(raw: bytes, max_megapixels: float) -> tuple[int, int]:
    """Return the width and height of a full `decode`, from the head of the file alone."""
    with _opened(raw, max_megapixels) as image:
        is_turned = _orientation(image) in (5, 6, 7, 8)
        return (image.height, image.width) if is_turned else (image.width, image.height)


def square(image: Image.Image, size: int, max_megapixels: float) -> Pixels:
    """Decode the current frame of an open image, as `decode` does for a file.

    The image keeps its size. A JPEG whose pixels are loaded already differs a little: `decode` lets
    a large one be decoded at a reduced size.
    """
    with _image_locks[id(image) // 16 % len(_image_locks)], _explained(max_megapixels):
        return _pixels(_reopened(image), size, max_megapixels)


def _reopened(image: Image.Image) -> Image.Image:
    """Reopen an unloaded JPEG, because decoding at a reduced size would shrink the caller's."""
    if not isinstance(image, ImageFile) or not image.tile:
        return image  # its pixels are loaded
    if image.fp is None:
        raise UnreadableImage("its file was closed before its pixels were loaded")
    if not isinstance(image, JpegImageFile):
        return image
    again = Image.open(image.fp, formats=("JPEG",))
    again.seek(image.tell())
    return again


@contextlib.contextmanager
def _opened(raw: bytes, max_megapixels: float) -> Iterator[Image.Image]:
    with _explained(max_megapixels):
        known = [name for name in FORMATS if name in Image.OPEN]
        try:
            image = Image.open(io.BytesIO(raw), formats=known)
        except UnidentifiedImageError:
            raise _explain_unknown(raw) from None
        with image:
            _check_scans(image, raw)
            yield image


def _check_scans(image: Image.Image, raw: bytes) -> None:
    """Refuse a JPEG, or a TIFF made of them, that would take minutes: no signal stops a decoder."""
    scans, parts = raw.count(b"\xff\xda"), 1
    if image.format == "TIFF" and image.info.get("compression") == "jpeg":
        parts = len(image.tag_v2.get(324) or image.tag_v2.get(273) or [0])  # type: ignore[attr-defined]
    elif image.format in ("JPEG", "MPO"):
        scans = _count_scans(raw) if scans > _MOST_SCANS else scans
    else:
        return
    if scans > _MOST_SCANS * parts:
        raise UnreadableImage(f"a JPEG of {scans} scans, which takes too long to decode")


def _count_scans(raw: bytes) -> int:
    """Count the scans up to the image's end; videos that phones append hold the same bytes."""
    place = scans = 0
    while (marker := _MARKER.search(raw, place)) is not None and marker[1] != b"\xd9":
        place = marker.end()
        scans += marker[1] == b"\xda"
        if marker[1] not in (b"\xd8", b"\x01"):
            place += int.from_bytes(raw[place : place + 2], "big")
    return scans


@contextlib.contextmanager
def _explained(max_megapixels: float) -> Iterator[None]:
    """Turn every error of Pillow into an UnreadableImage with a short reason."""
    try:
        with pillow_settings(max_megapixels):
            yield
    except (UnreadableImage, LargeImage):
        raise
    except Image.DecompressionBombError:
        limit = f"data.max_megapixels is {max_megapixels:g}"
        raise UnreadableImage(f"too many pixels ({limit})") from None
    except MemoryError:
        raise UnreadableImage("too little memory to decode it") from None
    except Exception as error:  # Pillow raises nearly every kind of error for broken files
        raise UnreadableImage(f"truncated or damaged image ({_short(error)})") from None


def _pixels(
    image: Image.Image, size: int | None, max_megapixels: float, take_large: bool = True
) -> Pixels:
    count = image.width * image.height
    if count == 0:
        raise UnreadableImage("it has no pixels")
    if count > max_megapixels * 1e6:
        limit = f"data.max_megapixels is {max_megapixels:g}"
        raise UnreadableImage(f"{count / 1e6:.0f} megapixels ({limit})")
    if size is not None:
        image.draft(None, (2 * size, 2 * size))  # decode a JPEG at a half, quarter or eighth
    is_large = image.width * image.height > _LARGE_PIXELS
    if is_large and not take_large:
        raise LargeImage
    with one_large_at_a_time if is_large else contextlib.nullcontext():
        image.load()
        upright = _UPRIGHT.get(_orientation(image))
        small: Image.Image = _eight_bit_rgb_or_grey(image)
        if size is not None and small.size != (size, size):
            small = small.resize((size, size), Image.Resampling.BILINEAR, reducing_gap=3.0)
        if upright is not None:  # after the squash to a square: cheaper, with the same result
            small = small.transpose(upright)
        return np.array(small if small.mode == "RGB" else small.convert("RGB"), dtype=np.uint8)


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_EXIF_ORIENTATION, 1))
    except Exception:  # ignore broken EXIF data
        return 1


def _eight_bit_rgb_or_grey(image: Image.Image) -> Image.Image:
    is_transparent = "transparency" in image.info
    if image.mode in ("RGB", "L") and not is_transparent:
        return image
    if image.mode == "F" or image.mode.startswith("I"):
        is_16_bit = image.mode != "I" or image.format == "PNG"
        return Image.fromarray(_to_eight_bit(np.asarray(image), is_16_bit))
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or is_transparent:
        colours = image.convert("RGBA")
        white = Image.new("RGBA", colours.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, colours).convert("RGB")
    return image.convert("RGB")  # 1, P, CMYK, YCbCr, HSV


def _to_eight_bit(values: npt.NDArray[Any], is_16_bit: bool) -> Pixels:
    """Scale wide grey values. 16-bit values lose their low byte, as Pillow does for 16-bit RGB.

    The file does not name other ranges, so the values decide: 0..1 (floats), 0..255 or 0..65535,
    else from the smallest to the largest.
    """
    is_float = values.dtype.kind == "f"
    values = values.astype(np.float64 if is_float else np.int64)
    values = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
    low, high = float(values.min()), float(values.max())
    if is_16_bit and not is_float and low >= 0 and high <= 65535:
        return (values >> 8).astype(np.uint8)
    ranges = (1.0, 255.0, 65535.0) if is_float else (255.0, 65535.0)
    full = next((top for top in ranges if low >= 0 and high <= top), None)
    if full is None:
        values, full = values - low, max(high - low, 1e-12)
    return np.rint(values * (255.0 / full)).clip(0, 255).astype(np.uint8)


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text[:80] if text and " at 0x" not in text else type(error).__name__
