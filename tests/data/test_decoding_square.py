"""`square` decodes an image that is open already as `decode` decodes its file."""

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from certvol.data.decoding import UnreadableImage, decode, square
from support.pictures import LIMIT, close, encoded, picture


def rotated(kind: str, orientation: int = 6, **options: Any) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(detailed(), kind, exif=exif, **options)


def detailed(width: int = 400, height: int = 300) -> Image.Image:
    """Return an image for which every other way to squash gives other values."""
    noise = np.random.default_rng(0).integers(0, 256, (height // 5, width // 5, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def transparent() -> Image.Image:
    image = detailed().convert("RGBA")
    image.putalpha(detailed().convert("L"))
    return image


WIDE = Image.fromarray(np.arange(120_000, dtype=np.uint16).reshape(300, 400))


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(encoded(detailed(), "PNG"), id="rgb"),
        pytest.param(encoded(detailed().convert("L"), "PNG"), id="grey"),
        pytest.param(encoded(WIDE, "PNG"), id="16-bit"),
        pytest.param(encoded(detailed().convert("1"), "PNG"), id="one-bit"),
        pytest.param(encoded(detailed().convert("P"), "PNG"), id="palette"),
        pytest.param(
            encoded(detailed().convert("P"), "GIF", transparency=3), id="transparent-palette"
        ),
        pytest.param(encoded(transparent(), "PNG"), id="rgba"),
        pytest.param(encoded(transparent(), "WEBP"), id="rgba-webp"),
        pytest.param(encoded(detailed().convert("CMYK"), "TIFF"), id="cmyk"),
        pytest.param(rotated("PNG"), id="exif-png"),
        pytest.param(rotated("WEBP", 5), id="exif-webp"),
        pytest.param(rotated("TIFF", 8), id="exif-tiff"),
        pytest.param(rotated("TIFF", 7, compression="tiff_lzw"), id="exif-compressed-tiff"),
        pytest.param(
            encoded(detailed(), "PNG", save_all=True, append_images=[picture(400, 300)]),
            id="frames",
        ),
    ],
)
def test_square_equals_decode(raw: bytes, loaded: bool) -> None:
    for size in (16, 300, 350):
        image = Image.open(io.BytesIO(raw))
        if loaded:
            image.load()
        pixels = square(image, size, LIMIT)
        assert pixels.dtype == np.uint8
        assert np.array_equal(pixels, decode(raw, size, LIMIT))


JPEGS = [
    pytest.param(encoded(detailed(), "JPEG"), id="rgb"),
    pytest.param(encoded(detailed().convert("L"), "JPEG"), id="grey"),
    pytest.param(encoded(detailed().convert("CMYK"), "JPEG"), id="cmyk"),
    pytest.param(rotated("JPEG"), id="exif"),
    pytest.param(
        encoded(detailed(), "MPO", save_all=True, append_images=[picture(400, 300)]), id="frames"
    ),
]


@pytest.mark.parametrize("raw", JPEGS)
def test_square_of_a_jpeg_that_is_not_loaded_equals_decode(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / "image.jpg").write_bytes(raw)
    for size in (16, 64, 350):
        for source in (io.BytesIO(raw), tmp_path / "image.jpg"):
            with Image.open(source) as image:
                for _ in range(2):
                    assert np.array_equal(square(image, size, LIMIT), decode(raw, size, LIMIT))
                assert image.size == (400, 300)  # the caller's image is as it was
                with Image.open(io.BytesIO(raw)) as other:
                    assert np.array_equal(np.asarray(image), np.asarray(other))


@pytest.mark.parametrize("raw", JPEGS)
def test_square_of_a_loaded_jpeg_is_close_to_decode(raw: bytes) -> None:
    image = Image.open(io.BytesIO(raw))
    image.load()
    assert close(square(image, 16, LIMIT), decode(raw, 16, LIMIT), by=3)
    assert np.array_equal(
        square(image, 300, LIMIT), decode(raw, 300, LIMIT)
    )  # too large for a reduced size


def test_square_takes_the_frame_the_image_stands_at() -> None:
    second = picture(400, 300)
    image = Image.open(
        io.BytesIO(encoded(detailed(), "MPO", save_all=True, append_images=[second], quality=95))
    )
    image.seek(1)
    assert close(
        square(image, 16, LIMIT), np.asarray(second.resize((16, 16), Image.Resampling.BILINEAR))
    )
    assert (image.tell(), image.size) == (1, (400, 300))


def test_square_takes_images_that_were_never_files() -> None:
    assert np.array_equal(
        square(picture(), 16, LIMIT), decode(encoded(picture(), "PNG"), 16, LIMIT)
    )
    assert np.array_equal(
        square(transparent(), 16, LIMIT), decode(encoded(transparent(), "PNG"), 16, LIMIT)
    )


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_square_decodes_one_image_in_many_threads(kind: str) -> None:
    raw = encoded(detailed(), kind)
    expected = decode(raw, 64, LIMIT)
    for _ in range(5):
        image = Image.open(io.BytesIO(raw))
        with ThreadPoolExecutor(8) as pool:
            for pixels in pool.map(lambda image: square(image, 64, LIMIT), [image] * 32):
                assert np.array_equal(pixels, expected)


def test_square_gives_the_same_reasons_as_decode() -> None:
    with pytest.raises(UnreadableImage, match=r"2 megapixels \(data\.max_megapixels is 1\.5\)"):
        square(Image.new("L", (2000, 1000)), 16, 1.5)
    for kind in ("JPEG", "PNG"):
        raw = encoded(detailed(), kind)
        with pytest.raises(UnreadableImage, match="truncated or damaged"):
            square(Image.open(io.BytesIO(raw[: len(raw) // 2])), 16, LIMIT)
        with Image.open(io.BytesIO(raw)) as image:
            pass
        with pytest.raises(UnreadableImage, match="closed before"):
            square(image, 16, LIMIT)
