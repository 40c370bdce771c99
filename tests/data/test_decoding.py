import logging
import os
import struct
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from certvol.data import decoding
from certvol.data.decoding import UnreadableImage, decode, read_file, square
from support.pictures import LIMIT, close, encoded, picture

# --- decode: formats and modes


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("BMP", {}),
        ("DIB", {}),
        ("TIFF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("WEBP", {"lossless": True}),
        ("JPEG", {"quality": 95, "subsampling": 0}),
        ("JPEG", {"quality": 95, "subsampling": 0, "progressive": True}),
        ("GIF", {}),
    ],
)
def test_every_format_decodes(kind: str, options: dict[str, Any]) -> None:
    pixels = decode(encoded(picture(), kind, **options), None, LIMIT)
    assert pixels.dtype == np.uint8
    assert close(pixels, np.asarray(picture()), by=3 if kind == "JPEG" else 0.5)


def _with_scans(scans: int) -> bytes:
    """Add empty scans to a progressive JPEG: each costs as much time as a full one."""
    raw = encoded(Image.new("L", (64, 64), 128), "JPEG", progressive=True)
    return raw[:-2] + b"\xff\xda\x00\x08\x01\x01\x00\x01\x3f\x00" * scans + raw[-2:]


def _as_tiff(jpeg: bytes) -> bytes:
    """Wrap a grey JPEG of 64 x 64 in a TIFF of one strip."""
    tags = {256: 64, 257: 64, 258: 8, 259: 7, 262: 1, 273: 122, 277: 1, 278: 64, 279: len(jpeg)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + jpeg


@pytest.mark.parametrize("wrapped", [bytes, _as_tiff])
def test_a_jpeg_of_many_empty_scans_is_refused_at_once(wrapped: Callable[[bytes], bytes]) -> None:
    assert close(decode(wrapped(_with_scans(90)), None, LIMIT), np.full((64, 64, 3), 128))
    with pytest.raises(UnreadableImage, match="scans, which takes too long to decode"):
        decode(wrapped(_with_scans(200)), None, LIMIT)


def test_bytes_after_the_end_of_a_jpeg_are_no_scans() -> None:
    raw = _with_scans(0) + b"\xff\xda" * 1000  # a phone appends a video
    assert close(decode(raw, None, LIMIT), np.full((64, 64, 3), 128))
    comment = b"\xff\xfe\x00\x04\xff\xd9"  # it does not end the image
    raw = raw[:2] + comment + _with_scans(200)[2:]
    with pytest.raises(UnreadableImage, match="scans"):
        decode(raw, None, LIMIT)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [None, 16])
def test_the_exif_orientation_is_applied(kind: str, orientation: int, size: int | None) -> None:
    undo = {
        2: 0,
        3: 3,
        4: 1,
        5: 5,
        6: 2,
        7: 6,
        8: 4,
    }  # number of the transpose that turns upright into as-stored
    upright = picture()
    stored = upright if orientation == 1 else upright.transpose(Image.Transpose(undo[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    raw = encoded(stored, kind, exif=exif, **({"quality": 95} if kind in ("JPEG", "WEBP") else {}))
    expected = np.asarray(
        upright if size is None else upright.resize((size, size), Image.Resampling.BILINEAR)
    )
    assert close(decode(raw, size, LIMIT), expected, by=6)


def test_a_compressed_tiff_is_turned_once() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    raw = encoded(
        picture().transpose(Image.Transpose.ROTATE_90), "TIFF", exif=exif, compression="tiff_lzw"
    )
    assert np.array_equal(decode(raw, None, LIMIT), np.asarray(picture()))


@pytest.mark.parametrize("orientation", [0, 9, 60000])
def test_nonsense_orientation_is_ignored(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert decode(encoded(picture(), "PNG", exif=exif), None, LIMIT).shape == (24, 40, 3)


def test_broken_exif_is_ignored() -> None:
    raw = encoded(picture(), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\xfe" * 60)
    assert decode(raw, None, LIMIT).shape == (24, 40, 3)


def test_corrupt_colour_profile_is_ignored() -> None:
    for kind in ("JPEG", "PNG", "TIFF", "WEBP"):
        raw = encoded(picture(), kind, icc_profile=b"not a profile" * 20)
        assert decode(raw, 8, LIMIT).shape == (8, 8, 3)


def test_grey_and_one_bit_images_become_rgb() -> None:
    grey = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16))
    assert np.array_equal(
        decode(encoded(grey, "PNG"), None, LIMIT), np.repeat(np.asarray(grey)[..., None], 3, axis=2)
    )
    bits = decode(encoded(grey.convert("1", dither=Image.Dither.NONE), "PNG"), None, LIMIT)
    assert set(np.unique(bits)) == {0, 255}
    assert (bits[0] == 0).all()
    assert (bits[-1] == 255).all()


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("LA", "PNG"), ("LA", "TIFF"), ("RGBA", "PNG"), ("RGBA", "TIFF"), ("PA", "TIFF")],
)
def test_alpha_is_laid_on_white(mode: str, kind: str) -> None:
    black = Image.new("RGBA", (4, 2), (0, 0, 0, 255))
    black.putpixel((0, 0), (0, 0, 0, 0))
    black.putpixel((1, 0), (0, 0, 0, 128))
    pixels = decode(encoded(black.convert(mode), kind), None, LIMIT)
    assert pixels[0, 0].tolist() == [255, 255, 255]
    assert pixels[1, 1].tolist() == [0, 0, 0]
    assert abs(int(pixels[0, 1, 0]) - 127) <= 1


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_transparent_palette_is_laid_on_white(kind: str) -> None:
    image = Image.new("P", (3, 1))
    image.putpalette([9, 9, 9, 200, 0, 0, 0, 0, 200])
    image.putdata([0, 1, 2])
    pixels = decode(encoded(image, kind, transparency=0), None, LIMIT)
    assert pixels.tolist() == [[[255, 255, 255], [200, 0, 0], [0, 0, 200]]]


def test_colour_key_transparency_is_laid_on_white() -> None:
    image = Image.new("RGB", (2, 1), (1, 2, 3))
    image.putpixel((1, 0), (50, 60, 70))
    pixels = decode(encoded(image, "PNG", transparency=(1, 2, 3)), None, LIMIT)
    assert pixels.tolist() == [[[255, 255, 255], [50, 60, 70]]]


@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_cmyk_becomes_rgb(kind: str) -> None:
    raw = encoded(picture().convert("CMYK"), kind, **({"quality": 95} if kind == "JPEG" else {}))
    assert close(decode(raw, None, LIMIT), np.asarray(picture()), by=8)


def test_a_ycbcr_tiff_becomes_rgb() -> None:
    assert close(
        decode(encoded(picture().convert("YCbCr"), "TIFF"), None, LIMIT),
        np.asarray(picture()),
        by=3,
    )


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_grey_keeps_its_high_byte(kind: str) -> None:
    values = np.array([[0, 255, 256, 32768, 65535]], dtype=np.uint16)
    pixels = decode(encoded(Image.fromarray(values), kind), None, LIMIT)
    assert pixels[0, :, 0].tolist() == [0, 0, 1, 128, 255]


def test_a_big_endian_16_bit_tiff_keeps_its_high_bytes() -> None:
    header = b"MM\0*\0\0\0\x08"
    tags = [
        (256, 4, 2),
        (257, 4, 1),
        (258, 3, 16),
        (259, 3, 1),
        (262, 3, 1),
        (273, 4, 200),
        (277, 3, 1),
        (279, 4, 4),
    ]
    entries = b"".join(
        struct.pack(">HHI", tag, kind, 1)
        + (struct.pack(">I", v) if kind == 4 else struct.pack(">HH", v, 0))
        for tag, kind, v in tags
    )
    raw = (header + struct.pack(">H", len(tags)) + entries + struct.pack(">I", 0)).ljust(200, b"\0")
    pixels = decode(raw + struct.pack(">HH", 0x1234, 0xFF00), None, LIMIT)
    assert pixels[0, :, 0].tolist() == [0x12, 0xFF]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([[0, 100, 255]], np.int32), [0, 100, 255]),
        (np.array([[0, 257, 65535]], np.int32), [0, 1, 255]),
        (np.array([[-1000, 0, 1000]], np.int32), [0, 128, 255]),
        (np.array([[0.0, 0.2, 1.0]], np.float32), [0, 51, 255]),
        (np.array([[0.0, 51.0, 255.0]], np.float32), [0, 51, 255]),
        (np.array([[-2.0, np.nan, 2.0]], np.float32), [0, 128, 255]),
        (np.array([[-7.0, -7.0, -7.0]], np.float32), [0, 0, 0]),
    ],
)
def test_wide_grey_values_are_scaled(values: np.ndarray, expected: list[int]) -> None:
    assert (
        decode(encoded(Image.fromarray(values), "TIFF"), None, LIMIT)[0, :, 0].tolist() == expected
    )


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "TIFF", "PNG"])
def test_the_first_frame_is_decoded(kind: str) -> None:
    red, blue = Image.new("RGB", (8, 8), (255, 0, 0)), Image.new("RGB", (8, 8), (0, 0, 255))
    options = {"lossless": True} if kind == "WEBP" else {}
    raw = encoded(red, kind, save_all=True, append_images=[blue, red], **options)
    assert (decode(raw, None, LIMIT) == (255, 0, 0)).all()


def test_size_squashes_with_antialiasing() -> None:
    stripes = np.zeros((64, 64), dtype=np.uint8)
    stripes[:, ::2] = 255
    pixels = decode(encoded(Image.fromarray(stripes), "PNG"), 8, LIMIT)
    assert pixels.shape == (8, 8, 3)
    assert (abs(pixels.astype(int) - 127) <= 12).all()  # nearest-neighbour would be 0 or 255


@pytest.mark.parametrize("shape", [(1, 1), (1, 900), (2000, 1), (20000, 3)])
def test_extreme_shapes_decode(shape: tuple[int, int]) -> None:
    for kind in ("PNG", "JPEG"):
        raw = encoded(Image.new("RGB", shape, (9, 99, 199)), kind)
        assert close(decode(raw, 16, LIMIT), np.full((16, 16, 3), (9, 99, 199)))


@pytest.mark.parametrize("side", [256, 1600])
def test_a_jpeg_decoded_at_reduced_size_is_near_the_full_decoding(side: int) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (48, 48, 3), dtype=np.uint8)
    large = Image.fromarray(noise).resize((side, side), Image.Resampling.BICUBIC)
    expected = np.asarray(large.resize((64, 64), Image.Resampling.BILINEAR))
    assert close(
        decode(encoded(large, "JPEG", quality=95, subsampling=0), 64, LIMIT), expected, by=4
    )


# --- decode: damaged and hostile files


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "empty file"),
        (b"hello, I am text named .jpg", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        (b"\xff\xd8\xff", "not an image"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 40, "not an image|damaged"),
        (b"GIF89a" + b"\xff" * 30, "not an image|damaged|megapixels|too many"),
    ],
)
def test_bytes_that_are_not_an_image_give_a_reason(raw: bytes, reason: str) -> None:
    with pytest.raises(UnreadableImage, match=reason):
        decode(raw, 16, LIMIT)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "WEBP", "GIF", "TIFF"])
@pytest.mark.parametrize("size", [None, 8])
def test_truncated_images_give_a_reason(kind: str, size: int | None) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    raw = encoded(noise, kind)
    with pytest.raises(UnreadableImage, match=r"truncated or damaged|not an image"):
        decode(raw[: len(raw) // 2], size, LIMIT)


def test_a_large_truncated_jpeg_is_noticed_in_draft_mode() -> None:
    raw = encoded(picture(1600, 1200), "JPEG")
    with pytest.raises(UnreadableImage, match="truncated"):
        decode(raw[: len(raw) * 3 // 4], 32, LIMIT)


def test_images_above_the_pixel_limit_are_refused() -> None:
    raw = encoded(Image.new("L", (2000, 1000)), "PNG")
    with pytest.raises(UnreadableImage, match=r"2 megapixels \(data\.max_megapixels is 1\.5\)"):
        decode(raw, 16, 1.5)
    assert decode(raw, 16, 2.0).shape == (16, 16, 3)


def png_header(width: int, height: int) -> bytes:
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 100))
        + chunk(b"IEND", b"")
    )


def test_a_bomb_is_refused_without_decoding() -> None:
    with pytest.raises(UnreadableImage, match=r"too many pixels|megapixels"):
        decode(png_header(60000, 60000), 16, LIMIT)


def test_the_limit_can_be_set_above_that_of_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    raw = encoded(Image.new("L", (100, 100)), "PNG")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode(raw, 16, 1.0).shape == (16, 16, 3)
    assert Image.MAX_IMAGE_PIXELS == 1000


def test_random_damage_gives_pixels_or_a_reason_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rng = np.random.default_rng(1)
    files = [encoded(picture(), kind) for kind in ("JPEG", "PNG", "BMP", "WEBP", "GIF", "TIFF")]
    files.append(encoded(picture(), "TIFF", compression="tiff_lzw"))
    files.append(encoded(picture().convert("P"), "PNG", transparency=1))
    outcomes, reasons = set(), set()
    caplog.set_level(logging.CRITICAL, "PIL")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for raw in files:
            for _ in range(120):
                damaged = bytearray(raw)
                for place in rng.integers(0, len(raw), rng.integers(1, 8)):
                    damaged[place] = rng.integers(256)
                try:
                    outcomes.add(decode(bytes(damaged), 8, 5.0).shape)
                except UnreadableImage as error:
                    reasons.add(error.reason)
    assert outcomes == {(8, 8, 3)}
    assert reasons
    assert all("\n" not in reason and 0 < len(reason) < 140 for reason in reasons)


def test_too_little_memory_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(decoding, "_pixels", no_memory)
    with pytest.raises(UnreadableImage, match="memory"):
        decode(encoded(picture(), "PNG"), 8, LIMIT)
    with pytest.raises(UnreadableImage, match="memory"):
        square(picture(), 8, LIMIT)


def test_decoding_in_threads_leaves_the_warning_filters_as_they_were() -> None:
    raw = encoded(picture(), "JPEG")
    before = list(warnings.filters)
    threads = [
        threading.Thread(target=lambda: [decode(raw, 8, LIMIT) for _ in range(50)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert warnings.filters == before


# --- read_file


def test_read_file_does_not_wait_for_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    with pytest.raises(UnreadableImage, match="not a file"):
        read_file(tmp_path / "pipe.jpg", LIMIT)


def test_read_file_refuses_files_too_large_for_an_image(tmp_path: Path) -> None:
    with (tmp_path / "huge.png").open("wb") as file:
        file.truncate(2_000_000_000)  # sparse: takes no space
    with pytest.raises(UnreadableImage, match=r"2\.0 GB"):
        read_file(tmp_path / "huge.png", LIMIT)
