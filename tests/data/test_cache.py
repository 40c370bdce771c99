import errno
import fcntl
import gc
import hashlib
import io
import json
import logging
import os
import signal
import struct
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

import certvol.data.cache as cache_module
from certvol.config import DataConfig
from certvol.data.cache import PixelCache, UnreadableImage, cache_folder, cache_key, decode, open_cache, read_file
from certvol.data.folders import scan
from certvol.errors import RunFailed, UserError

LIMIT = 179.0


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def picture(width: int = 40, height: int = 24) -> Image.Image:
    """Red, green, blue and grey quarters: no two of its eight orientations look alike."""
    pixels = np.empty((height, width, 3), dtype=np.uint8)
    pixels[: height // 2, : width // 2] = (250, 10, 10)
    pixels[: height // 2, width // 2 :] = (10, 250, 10)
    pixels[height // 2 :, : width // 2] = (10, 10, 250)
    pixels[height // 2 :, width // 2 :] = (128, 128, 128)
    return Image.fromarray(pixels)


def close(a: np.ndarray, b: np.ndarray, by: float = 3.0) -> bool:
    return a.shape == b.shape and float(np.abs(a.astype(float) - b.astype(float)).mean()) <= by


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
def test_formats(kind: str, options: dict[str, Any]) -> None:
    pixels = decode(encoded(picture(), kind, **options), None, LIMIT)
    assert pixels.dtype == np.uint8
    assert close(pixels, np.asarray(picture()), by=3 if kind == "JPEG" else 0.5)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [None, 16])
def test_exif_orientation(kind: str, orientation: int, size: int | None) -> None:
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # number of the transpose that turns upright into as-stored
    upright = picture()
    stored = upright if orientation == 1 else upright.transpose(Image.Transpose(undo[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    raw = encoded(stored, kind, exif=exif, **({"quality": 95} if kind in ("JPEG", "WEBP") else {}))
    expected = np.asarray(upright if size is None else upright.resize((size, size), Image.Resampling.BILINEAR))
    assert close(decode(raw, size, LIMIT), expected, by=6)


def test_compressed_tiff_is_turned_once() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    raw = encoded(picture().transpose(Image.Transpose.ROTATE_90), "TIFF", exif=exif, compression="tiff_lzw")
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


def test_grey_and_one_bit() -> None:
    grey = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16))
    assert np.array_equal(decode(encoded(grey, "PNG"), None, LIMIT), np.repeat(np.asarray(grey)[..., None], 3, axis=2))
    bits = decode(encoded(grey.convert("1", dither=Image.Dither.NONE), "PNG"), None, LIMIT)
    assert set(np.unique(bits)) == {0, 255}
    assert (bits[0] == 0).all()
    assert (bits[-1] == 255).all()


@pytest.mark.parametrize(
    ("mode", "kind"), [("LA", "PNG"), ("LA", "TIFF"), ("RGBA", "PNG"), ("RGBA", "TIFF"), ("PA", "TIFF")]
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
def test_cmyk(kind: str) -> None:
    raw = encoded(picture().convert("CMYK"), kind, **({"quality": 95} if kind == "JPEG" else {}))
    assert close(decode(raw, None, LIMIT), np.asarray(picture()), by=8)


def test_ycbcr_tiff() -> None:
    assert close(decode(encoded(picture().convert("YCbCr"), "TIFF"), None, LIMIT), np.asarray(picture()), by=3)


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_grey_keeps_its_high_byte(kind: str) -> None:
    values = np.array([[0, 255, 256, 32768, 65535]], dtype=np.uint16)
    pixels = decode(encoded(Image.fromarray(values), kind), None, LIMIT)
    assert pixels[0, :, 0].tolist() == [0, 0, 1, 128, 255]


def test_big_endian_16_bit_tiff() -> None:
    header = b"MM\0*\0\0\0\x08"
    tags = [(256, 4, 2), (257, 4, 1), (258, 3, 16), (259, 3, 1), (262, 3, 1), (273, 4, 200), (277, 3, 1), (279, 4, 4)]
    entries = b"".join(
        struct.pack(">HHI", tag, kind, 1) + (struct.pack(">I", v) if kind == 4 else struct.pack(">HH", v, 0))
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
    assert decode(encoded(Image.fromarray(values), "TIFF"), None, LIMIT)[0, :, 0].tolist() == expected


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "TIFF", "PNG"])
def test_first_frame(kind: str) -> None:
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
def test_extreme_shapes(shape: tuple[int, int]) -> None:
    for kind in ("PNG", "JPEG"):
        raw = encoded(Image.new("RGB", shape, (9, 99, 199)), kind)
        assert close(decode(raw, 16, LIMIT), np.full((16, 16, 3), (9, 99, 199)))


@pytest.mark.parametrize("side", [256, 1600])
def test_a_jpeg_decoded_at_reduced_size_is_near_the_full_decoding(side: int) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (48, 48, 3), dtype=np.uint8)
    large = Image.fromarray(noise).resize((side, side), Image.Resampling.BICUBIC)
    expected = np.asarray(large.resize((64, 64), Image.Resampling.BILINEAR))
    assert close(decode(encoded(large, "JPEG", quality=95, subsampling=0), 64, LIMIT), expected, by=4)


# --- decode: what is no image


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
def test_what_is_no_image(raw: bytes, reason: str) -> None:
    with pytest.raises(UnreadableImage, match=reason):
        decode(raw, 16, LIMIT)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "WEBP", "GIF", "TIFF"])
@pytest.mark.parametrize("size", [None, 8])
def test_truncated_images(kind: str, size: int | None) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))
    raw = encoded(noise, kind)
    with pytest.raises(UnreadableImage, match=r"truncated or damaged|not an image"):
        decode(raw[: len(raw) // 2], size, LIMIT)


def test_a_large_truncated_jpeg_is_noticed_in_draft_mode() -> None:
    raw = encoded(picture(1600, 1200), "JPEG")
    with pytest.raises(UnreadableImage, match="truncated"):
        decode(raw[: len(raw) * 3 // 4], 32, LIMIT)


def test_pixel_limit() -> None:
    raw = encoded(Image.new("L", (2000, 1000)), "PNG")
    with pytest.raises(UnreadableImage, match=r"2 megapixels \(data\.max_megapixels is 1\.5\)"):
        decode(raw, 16, 1.5)
    assert decode(raw, 16, 2.0).shape == (16, 16, 3)


def png_header(width: int, height: int) -> bytes:
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
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


def test_random_damage_gives_pixels_or_a_reason_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
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


def test_memory_error_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(cache_module, "_decode", no_memory)
    with pytest.raises(UnreadableImage, match="memory"):
        decode(b"x", 8, LIMIT)


def test_decoding_in_threads_leaves_the_warning_filters_as_they_were() -> None:
    raw = encoded(picture(), "JPEG")
    before = list(warnings.filters)
    threads = [threading.Thread(target=lambda: [decode(raw, 8, LIMIT) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert warnings.filters == before


def test_truncated_images_stay_off_in_pillow() -> None:
    assert ImageFile.LOAD_TRUNCATED_IMAGES is False


def test_read_file_does_not_wait_for_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    with pytest.raises(UnreadableImage, match="not a file"):
        read_file(tmp_path / "pipe.jpg", LIMIT)


def test_read_file_refuses_what_no_image_can_be(tmp_path: Path) -> None:
    with (tmp_path / "huge.png").open("wb") as file:
        file.truncate(2_000_000_000)  # sparse: takes no space
    with pytest.raises(UnreadableImage, match=r"2\.0 GB"):
        read_file(tmp_path / "huge.png", LIMIT)


# --- the cache


class Recorder:
    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.advanced = 0

    def start(self, what: str, total: int) -> None:
        self.events.append((what, total))

    def advance(self, n: int) -> None:
        self.advanced += n

    def finish(self) -> None:
        self.events.append(("finish", self.advanced))


@pytest.fixture
def images(tmp_path: Path) -> Path:
    root = tmp_path / "images"
    rng = np.random.default_rng(0)
    for i in range(40):
        path = root / "ab"[i % 2] / f"{i:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(path)
    return root


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    return DataConfig(cache_dir=str(tmp_path / "cache"), workers=2)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of 4 images of 8 x 8, read 2 at a time."""
    monkeypatch.setattr(cache_module, "BLOCK_BYTES", 4 * 192)
    monkeypatch.setattr(cache_module, "_TASK_BYTES", 2 * 192)


def opened(root: Path, config: DataConfig, size: int = 8, progress: Recorder | None = None) -> PixelCache:
    return open_cache(scan(root), size, config, progress)


def forbid_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(cache_module, "decode", fail)


def test_cache_holds_what_decode_gives(images: Path, config: DataConfig) -> None:
    (images / "a/bad.jpg").write_bytes(b"text")
    (images / "b/zero.png").write_bytes(b"")
    progress = Recorder()
    cache = opened(images, config, progress=progress)
    listing = scan(images)
    good = [path for path in listing.paths if path not in ("a/bad.jpg", "b/zero.png")]
    assert cache.paths == good
    assert cache.failures == [
        ("a/bad.jpg", "not an image (JPEG, PNG, BMP, WebP, GIF or TIFF)"),
        ("b/zero.png", "empty file (0 bytes)"),
    ]
    assert [listing.paths[i] for i in cache.positions] == good
    assert cache.pixels.shape == (40, 8, 8, 3)
    for row, path in enumerate(good):
        raw = (images / path).read_bytes()
        assert np.array_equal(cache.pixels[row], decode(raw, 8, LIMIT))
        assert cache.hashes[row].tobytes() == hashlib.blake2b(raw, digest_size=16).digest()
    assert not cache.pixels.flags.writeable
    assert progress.events == [("decoding images", 42), ("finish", 42)]


def test_a_second_opening_decodes_nothing(images: Path, config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    (images / "a/bad.jpg").write_bytes(b"text")
    first = opened(images, config)
    forbid_decoding(monkeypatch)
    second = opened(images, config)
    assert np.array_equal(first.pixels, second.pixels)
    assert (first.paths, first.failures) == (second.paths, second.failures)
    assert np.array_equal(first.hashes, second.hashes)


def test_nothing_of_the_cache_is_a_pickle(images: Path, config: DataConfig) -> None:
    opened(images, config)
    folder = cache_folder(config)
    assert sorted(p.name for p in folder.rglob("*") if p.is_file() and p.stat().st_size) == [
        "hashes.bin",
        "index.json",
        "pixels.bin",
    ]
    (index,) = folder.rglob("index.json")
    json.loads(index.read_text())


def test_key_follows_content_and_settings_but_not_place(images: Path, config: DataConfig, tmp_path: Path) -> None:
    key = cache_key(scan(images), 8, config)
    assert cache_key(scan(images), 9, config) != key
    assert cache_key(scan(images), 8, DataConfig(max_megapixels=1.0)) != key
    assert cache_key(scan(images), 8, DataConfig(cache_limit_gb=1.0)) == key
    moved = images.rename(tmp_path / "moved")
    assert cache_key(scan(moved), 8, config) == key
    os.utime(moved / "a/00.png", ns=(1, 1))
    assert cache_key(scan(moved), 8, config) != key


def test_key_tells_sets_apart_whose_names_sizes_and_times_agree(tmp_path: Path, config: DataConfig) -> None:
    keys = []
    for fill in (10, 20):
        root = tmp_path / str(fill)
        root.mkdir()
        for i in range(3):
            Image.new("RGB", (5, 5), (fill, 0, i)).save(root / f"{i}.bmp")
            os.utime(root / f"{i}.bmp", ns=(1, 1))
        keys.append(cache_key(scan(root), 8, config))
    assert keys[0] != keys[1]


def test_place_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("CERTVOL_CACHE", raising=False)
    assert cache_folder(DataConfig()) == tmp_path / "xdg/certvol"
    monkeypatch.setenv("CERTVOL_CACHE", str(tmp_path / "env"))
    assert cache_folder(DataConfig()) == tmp_path / "env"
    assert cache_folder(DataConfig(cache_dir=str(tmp_path / "set"))) == tmp_path / "set"


def test_names_of_every_kind(tmp_path: Path, config: DataConfig) -> None:
    raw = encoded(picture(), "PNG")
    names = [b"caf\xe9.png", b"new\nline.png", "日本 '\".png".encode(), b"x" * 251 + b".png"]
    (tmp_path / "odd").mkdir()
    for name in names:
        Path(os.fsdecode(os.fsencode(tmp_path / "odd") + b"/" + name)).write_bytes(raw)
    Path(os.fsdecode(os.fsencode(tmp_path / "odd") + b"/b\xe9d.png")).write_bytes(b"bad")
    for _ in range(2):
        cache = opened(tmp_path / "odd", config)
        assert sorted(os.fsencode(path) for path in cache.paths) == sorted(names)
        assert [os.fsencode(path) for path, _ in cache.failures] == [b"b\xe9d.png"]


def test_empty_listing_and_nothing_readable(tmp_path: Path, config: DataConfig) -> None:
    (tmp_path / "none").mkdir()
    assert opened(tmp_path / "none", config).pixels.shape == (0, 8, 8, 3)
    (tmp_path / "none/bad.jpg").write_bytes(b"bad")
    for _ in range(2):
        cache = opened(tmp_path / "none", config)
        assert cache.pixels.shape == (0, 8, 8, 3)
        assert len(cache.failures) == 1


# --- interrupted builds


def die_at(monkeypatch: pytest.MonkeyPatch, call: int, error: BaseException) -> None:
    real, calls, lock = decode, [0], threading.Lock()

    def dying(raw: bytes, size: int, limit: float) -> np.ndarray:
        with lock:
            calls[0] += 1
        if calls[0] == call:
            raise error
        return real(raw, size, limit)

    monkeypatch.setattr(cache_module, "decode", dying)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("call", [1, 7, 23, 40])
def test_an_interrupted_build_goes_on(
    images: Path, config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    (images / "a/03bad.jpg").write_bytes(b"text")
    whole = opened(images, DataConfig(cache_dir=str(tmp_path / "other")))
    with monkeypatch.context() as patch:
        die_at(patch, call, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            opened(images, DataConfig(cache_dir=config.cache_dir, workers=1))
    calls: list[int] = []
    real = decode
    monkeypatch.setattr(cache_module, "decode", lambda *a: calls.append(1) or real(*a))
    progress = Recorder()
    resumed = opened(images, config, progress=progress)
    if call == 40:
        assert len(calls) < 20  # most of it was kept
    assert progress.events == [("decoding images", 41), ("finish", 41)]
    assert np.array_equal(resumed.pixels, whole.pixels)
    assert np.array_equal(resumed.hashes, whole.hashes)
    assert (resumed.paths, resumed.failures) == (whole.paths, whole.failures)
    assert not list(cache_folder(config).glob("*.building"))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", ["journal.jsonl", "pixels.bin", "hashes.bin"])
@pytest.mark.parametrize("cut", [0, 1, 100, 1000])
def test_a_torn_build_goes_on_from_what_is_whole(
    images: Path, config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, cut: int
) -> None:
    whole = opened(images, DataConfig(cache_dir=str(tmp_path / "other")))
    with monkeypatch.context() as patch:
        die_at(patch, 30, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            opened(images, DataConfig(cache_dir=config.cache_dir, workers=1))
    (building,) = cache_folder(config).glob("*.building")
    data = (building / name).read_bytes()
    (building / name).write_bytes(data[: max(0, len(data) - cut)] + (b"\xffgarbage" if cut == 100 else b""))
    resumed = opened(images, config)
    assert np.array_equal(resumed.pixels, whole.pixels)
    assert np.array_equal(resumed.hashes, whole.hashes)


KILLED = """
import sys, time
import certvol.data.cache as cache
from certvol.config import DataConfig
from certvol.data.folders import scan
cache.BLOCK_BYTES, cache._TASK_BYTES = 4 * 192, 192
real = cache.decode
cache.decode = lambda *a: (time.sleep(0.01), real(*a))[1]
print("ready", flush=True)
opened = cache.open_cache(scan(sys.argv[1]), 8, DataConfig(cache_dir=sys.argv[2], workers=1), None)
print("built", len(opened.paths), flush=True)
sys.stdin.read()
"""


def test_killed_builds_go_on_and_end_the_same(images: Path, config: DataConfig, tmp_path: Path) -> None:
    whole = opened(images, DataConfig(cache_dir=str(tmp_path / "other")))
    for lines in (2, 5):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(images), str(config.cache_dir)],
            stdout=subprocess.PIPE,
            stdin=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        while len(journal_lines(config)) < lines:
            assert process.poll() is None
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert lines <= len(journal_lines(config)) < 10
    resumed = opened(images, config)
    assert np.array_equal(resumed.pixels, whole.pixels)
    assert np.array_equal(resumed.hashes, whole.hashes)


def journal_lines(config: DataConfig) -> list[bytes]:
    return b"".join(path.read_bytes() for path in cache_folder(config).glob("*.building/journal.jsonl")).splitlines()


def test_two_processes_build_once_and_a_set_in_use_is_kept(images: Path, config: DataConfig, tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(images), str(config.cache_dir)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) for _ in range(2)]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            assert process.stdout.readline() == b"built 40\n"
        folder = cache_folder(config)
        (done,) = (p for p in folder.iterdir() if p.is_dir())
        other = DataConfig(cache_dir=config.cache_dir, cache_limit_gb=9000 / 1e9)  # room for one set, not for two
        (images / "a/00.png").unlink()
        with pytest.raises(UserError, match=r"in use .*raise data\.cache_limit_gb"):
            opened(images, other)
        assert done.is_dir()
    finally:
        for process in processes:
            process.communicate(b"")
    assert len(opened(images, other).paths) == 39
    assert not done.exists()


def test_a_kill_between_index_and_rename_costs_nothing(
    images: Path, config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", die)
        with pytest.raises(KeyboardInterrupt):
            opened(images, config)
    forbid_decoding(monkeypatch)
    assert len(opened(images, config).paths) == 40


# --- damaged caches


def spoil_truncate(done: Path) -> None:
    with (done / "pixels.bin").open("r+b") as file:
        file.truncate(100)


def spoil_index(done: Path) -> None:
    text = (done / "index.json").read_text()
    (done / "index.json").write_text(text.replace('"rows": 40', '"rows": 39'))


def spoil_hashes(done: Path) -> None:
    data = bytearray((done / "hashes.bin").read_bytes())
    data[5] ^= 255
    (done / "hashes.bin").write_bytes(data)


def spoil_pickle(done: Path) -> None:
    (done / "index.json").write_text(f"cos\nsystem\n(S'touch {done.parent}/payload-ran'\ntR.")


def spoil_missing(done: Path) -> None:
    (done / "hashes.bin").unlink()


def spoil_half_removed(done: Path) -> None:
    (done / "index.json").unlink()


def spoil_json(done: Path) -> None:
    (done / "index.json").write_text("[1, 2]")


@pytest.mark.parametrize(
    "spoil",
    [spoil_truncate, spoil_index, spoil_hashes, spoil_pickle, spoil_missing, spoil_half_removed, spoil_json],
)
def test_a_damaged_cache_is_noticed_and_built_again(images: Path, config: DataConfig, spoil: Any) -> None:
    before = np.array(opened(images, config).pixels)
    (done,) = (p for p in cache_folder(config).iterdir() if p.is_dir())
    spoil(done)
    with pytest.warns(UserWarning, match="damaged .*decoding them again"):
        again = opened(images, config)
    assert np.array_equal(again.pixels, before)
    assert len(opened(images, config).paths) == 40
    assert not (done.parent / "payload-ran").exists()


def test_a_damaged_cache_that_is_open_is_built_again_beside_it(images: Path, config: DataConfig) -> None:
    first = opened(images, config)
    (done,) = (p for p in cache_folder(config).iterdir() if p.is_dir())
    spoil_index(done)
    with pytest.warns(UserWarning, match="damaged"):
        second = opened(images, config)
    assert np.array_equal(first.pixels, second.pixels)


# --- files that change


def test_a_file_that_changes_is_a_failure(images: Path, config: DataConfig) -> None:
    listing = scan(images)
    (images / "a/00.png").write_bytes(b"another content, longer or shorter")
    (images / "a/02.png").unlink()
    os.utime(images / "a/04.png", ns=(1, 1))
    cache = open_cache(listing, 8, config, None)
    assert dict(cache.failures) == {
        "a/00.png": "changed while being read",
        "a/02.png": "cannot be read: no such file or directory",
        "a/04.png": "changed while being read",
    }
    assert len(cache.paths) == 37


def test_a_file_that_was_unreadable_is_tried_again(
    images: Path, config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).endswith("b/05.png"):
            raise PermissionError(13, "Permission denied")
        return real(path, *args, **kwargs)

    (images / "a/bad.jpg").write_bytes(b"text")
    key = cache_key(scan(images), 8, config)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        for _ in range(2):
            cache = opened(images, config)
            assert cache.failures[1] == ("b/05.png", "cannot be read: permission denied")
    assert cache_key(scan(images), 8, config) == key
    assert [path for path, _ in opened(images, config).failures] == ["a/bad.jpg"]
    forbid_decoding(monkeypatch)  # what is no image stays no image
    assert len(opened(images, config).paths) == 40


@pytest.mark.usefixtures("small_blocks")
def test_a_folder_that_vanishes_stops_the_build_and_resumes(
    images: Path, config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = opened(images, DataConfig(cache_dir=str(tmp_path / "other")))
    real, calls = decode, [0]

    def unmount(raw: bytes, size: int, limit: float) -> np.ndarray:
        calls[0] += 1
        if calls[0] == 20:
            images.rename(tmp_path / "away")
        return real(raw, size, limit)

    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "decode", unmount)
        with pytest.raises(RunFailed, match="became unreadable"):
            opened(images, DataConfig(cache_dir=config.cache_dir, workers=1))
    (tmp_path / "away").rename(images)
    resumed = opened(images, config)
    assert resumed.failures == []
    assert np.array_equal(resumed.pixels, whole.pixels)


# --- room, and places that cannot be written


def test_a_set_above_the_limit_is_refused(images: Path, config: DataConfig) -> None:
    small = DataConfig(cache_dir=config.cache_dir, cache_limit_gb=1e-6)
    with pytest.raises(UserError, match=r"need 0\.008 MB .*limit of 0\.001 MB.*data\.cache_limit_gb.*data\.cache_dir"):
        opened(images, small)
    assert len(opened(images, config).paths) == 40


def test_the_longest_unused_set_is_evicted(images: Path, config: DataConfig, tmp_path: Path) -> None:
    folder = cache_folder(config)
    mine = folder / "notes"
    mine.mkdir(parents=True)
    (mine / "precious.txt").write_text("not a cache" * 1000)
    keys = {}
    for size in (8, 9, 10):
        opened(images, config, size)
        keys[size] = cache_key(scan(images), size, config)
    gc.collect()
    for size, used in ((8, 300), (9, 100), (10, 200)):
        os.utime(folder / f"{keys[size]}.use", (used, used))
    limit = 40 * 3 * (8 * 8 + 10 * 10 + 11 * 11) + 5000  # one of the three must go for the fourth; 5000 for the indexes
    opened(images, DataConfig(cache_dir=config.cache_dir, cache_limit_gb=limit / 1e9), 11)
    assert not (folder / keys[9]).exists()
    assert not (folder / f"{keys[9]}.use").exists()
    assert (folder / keys[8]).exists()
    assert (folder / keys[10]).exists()
    assert (mine / "precious.txt").exists()


def test_opening_a_set_makes_it_recently_used(images: Path, config: DataConfig) -> None:
    opened(images, config)
    (use,) = cache_folder(config).glob("*.use")
    os.utime(use, (100, 100))
    opened(images, config)
    assert use.stat().st_mtime > 1e9


def test_the_lock_lasts_as_long_as_any_view(images: Path, config: DataConfig) -> None:
    view = opened(images, config).pixels[3:5]
    gc.collect()
    (use,) = cache_folder(config).glob("*.use")
    with use.open() as file:
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        del view
        gc.collect()
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_lock_on_a_file_that_was_evicted_meanwhile_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "k.use"
    evicting = cache_module._locked(path, fcntl.LOCK_EX)
    got: list[int] = []
    waiting = threading.Thread(target=lambda: got.append(cache_module._locked(path, fcntl.LOCK_SH)))
    waiting.start()
    time.sleep(0.1)  # so that it has opened the old file
    path.unlink()
    os.close(evicting)
    waiting.join(10)
    (held,) = got
    assert os.fstat(held).st_ino == path.stat().st_ino
    os.close(held)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("number", "words"), [(errno.ENOSPC, "no space left"), (errno.EDQUOT, "quota")])
@pytest.mark.parametrize("after", [0, 1500, 6000])
def test_a_full_disk_is_told_and_the_next_run_goes_on(
    images: Path,
    config: DataConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    words: str,
    after: int,
) -> None:
    whole = opened(images, DataConfig(cache_dir=str(tmp_path / "other")))
    written = [0]
    real = cache_module._write_all

    def fill(file: io.FileIO, data: bytes) -> None:
        written[0] += len(data)
        if written[0] > after:
            file.write(data[: len(data) // 2])  # a disk fills in the middle of a write
            raise OSError(number, os.strerror(number))
        real(file, data)

    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "_write_all", fill)
        with pytest.raises(UserError, match=rf"{words}.*data\.cache_dir"):
            opened(images, config)
    resumed = opened(images, config)
    assert np.array_equal(resumed.pixels, whole.pixels)
    assert np.array_equal(resumed.hashes, whole.hashes)


def test_too_little_free_space_is_told_beforehand(
    images: Path, config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_decoding(monkeypatch)
    usage = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr(cache_module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"needs 0\.008 MB .*0\.001 MB are free"):
        opened(images, config)


def test_a_file_in_the_place_of_the_cache(images: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below"):
        with pytest.raises(UserError, match=r"is not a folder; set data\.cache_dir"):
            opened(images, DataConfig(cache_dir=str(tmp_path / place)))


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_place_that_cannot_be_written(
    images: Path, config: DataConfig, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", refuse)
        with pytest.raises(UserError, match=r"cannot write decoded images .*data\.cache_dir"):
            opened(images, config)
    assert len(opened(images, config).paths) == 40
    monkeypatch.setattr(Path, "mkdir", refuse)
    assert len(opened(images, config).paths) == 40  # what is decoded can be read where nothing can be written


def test_a_read_only_disk(images: Path, config: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(images, config)
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & (os.O_CREAT | os.O_RDWR) and not Path(path).exists():
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    assert len(opened(images, config).paths) == 40
    with pytest.raises(UserError, match=r"cannot write decoded images .*read-only"):
        opened(images, config, size=9)


def test_an_io_error_of_the_cache_is_a_failed_run(
    images: Path, config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "_write_all", broken)
        with pytest.raises(RunFailed, match="input/output error"):
            opened(images, config)
    assert len(opened(images, config).paths) == 40
