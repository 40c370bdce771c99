"""Everything that reads a file either keeps its promise on arbitrary input or raises its own error.

The examples are the same in every run. CERTVOL_FUZZ=20 tries 20 times as many, new ones each time.
"""

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from certvol.data.decoding import UnreadableImage, decode
from certvol.data.folders import printable
from support.corpus import Pictures, encoded
from support.fuzz import fuzz, mutated


def _images() -> list[bytes]:
    picture = Pictures(0)
    exif = Image.Exif()
    exif[0x0112] = 6
    frames = [picture(9, 7) for _ in range(3)]
    rgb, wide = picture(9, 7), picture.rng.integers(0, 65536, (7, 9), dtype=np.uint16)
    return [
        encoded(rgb, "JPEG", exif=exif),
        encoded(rgb, "JPEG", progressive=True, icc_profile=bytes(200)),
        encoded(rgb.convert("CMYK"), "JPEG"),
        encoded(rgb.convert("L"), "JPEG"),
        encoded(rgb, "PNG", exif=exif),
        encoded(rgb.convert("RGBA"), "PNG"),
        encoded(rgb.convert("P"), "PNG", transparency=1),
        encoded(rgb.convert("1"), "PNG"),
        encoded(Image.fromarray(wide), "PNG"),
        encoded(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        encoded(rgb, "BMP"),
        encoded(rgb.convert("P"), "BMP"),
        encoded(rgb, "DIB"),
        encoded(rgb, "WEBP"),
        encoded(rgb.convert("RGBA"), "WEBP", lossless=True, exif=exif),
        encoded(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
        encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        encoded(rgb.convert("P"), "GIF", transparency=1),
        encoded(rgb, "TIFF"),
        encoded(rgb, "TIFF", compression="tiff_lzw"),
        encoded(rgb, "TIFF", compression="jpeg"),
        encoded(rgb.convert("CMYK"), "TIFF", compression="tiff_adobe_deflate"),
        encoded(Image.fromarray(wide), "TIFF"),
        encoded(Image.fromarray(wide.astype(np.float32)), "TIFF"),
        encoded(rgb.convert("1"), "TIFF", compression="group4"),
        encoded(frames[0], "TIFF", save_all=True, append_images=frames[1:]),
    ]


IMAGES = _images()
MAGIC = (
    b"\xff\xd8\xff",
    b"\x89PNG\r\n\x1a\n",
    b"BM",
    b"RIFF\x40\0\0\0WEBP",
    b"GIF89a",
    b"II*\0",
    b"MM\0*",
    b"II+\0",
)


def check_decoding(raw: bytes, size: int | None) -> bool:
    """Return whether the bytes are an image."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            pixels = decode(raw, size, 1.0)
        except UnreadableImage as error:
            reason: str | None = error.reason
        else:
            reason = None
    if reason is not None:
        assert 0 < len(reason) < 200
        assert printable(reason) == reason
        return False
    assert pixels.dtype == np.uint8
    assert pixels.ndim == 3
    assert pixels.shape[2] == 3
    assert 0 < pixels.shape[0] * pixels.shape[1] <= 1_000_000
    assert size is None or pixels.shape == (size, size, 3)
    return True


@pytest.mark.parametrize("raw", IMAGES)
def test_the_images_that_are_mutated_can_be_read(raw: bytes) -> None:
    assert check_decoding(raw, 8)


@fuzz(500)
@given(
    start=st.sampled_from([b"", *MAGIC]),
    rest=st.binary(max_size=300),
    size=st.sampled_from([1, 8, None]),
)
def test_arbitrary_bytes_as_an_image(start: bytes, rest: bytes, size: int | None) -> None:
    check_decoding(start + rest, size)


@fuzz(1500)
@given(raw=mutated(IMAGES), size=st.sampled_from([1, 8, 33, None]))
def test_a_damaged_image_gives_pixels_or_a_reason(raw: bytes, size: int | None) -> None:
    check_decoding(raw, size)
