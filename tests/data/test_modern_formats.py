"""AVIF and HEIC images are read if a decoder is installed, and named otherwise."""

import io

import numpy as np
import pytest
from PIL import Image, features

from certvol.data.decoding import UnreadableImage, decode
from certvol.data.folders import has_image_suffix

needs_avif = pytest.mark.skipif(not features.check("avif"), reason="this Pillow reads no AVIF")


def half_red_half_blue(format: str) -> bytes:
    pixels = np.zeros((64, 64, 3), np.uint8)
    pixels[:, :32, 0] = pixels[:, 32:, 2] = 200
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format, quality=90)
    return file.getvalue()


def check_colours(raw: bytes) -> None:
    found = decode(raw, 16, 10).astype(int)
    assert abs(found[:, 2] - [200, 0, 0]).max() < 25
    assert abs(found[:, 13] - [0, 0, 200]).max() < 25


@pytest.mark.parametrize("name", ["a.heic", "a.HEIF", "a.hif", "a.avif"])
def test_the_files_are_listed(name: str) -> None:
    assert has_image_suffix(name)


@needs_avif
def test_avif_is_read() -> None:
    check_colours(half_red_half_blue("AVIF"))


def test_heic_is_read() -> None:
    pytest.importorskip("pillow_heif")
    check_colours(half_red_half_blue("HEIF"))


@pytest.mark.parametrize(
    ("format", "brand", "words"),
    [("HEIF", b"heic", "a HEIC image; run `pip install"), ("AVIF", b"avif", "an AVIF image; run")],
)
def test_without_a_decoder_the_format_is_named(
    format: str, brand: bytes, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(Image.OPEN, format, raising=False)
    with pytest.raises(UnreadableImage, match=words) as caught:
        decode(b"\0\0\0\x18ftyp" + brand + bytes(64), 8, 10)
    assert not caught.value.lasting  # an installed decoder must find the file again
