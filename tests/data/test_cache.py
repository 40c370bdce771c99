import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from certvol.data import decoding
from certvol.data.cache import cache_folder, cache_key, open_cache, open_features
from certvol.data.decoding import decode
from certvol.data.folders import scan
from certvol.errors import RunFailed, UserError
from certvol.settings import DataConfig
from support.pictures import LIMIT, encoded, forbid_decoding, opened, picture
from support.reporter import RecordingReporter


def test_the_cache_holds_the_decoded_images(images: Path, config: DataConfig) -> None:
    (images / "a/bad.jpg").write_bytes(b"text")
    (images / "b/zero.png").write_bytes(b"")
    progress = RecordingReporter()
    cache = opened(images, config, progress=progress)
    listing = scan(images)
    good = [path for path in listing.paths if path not in ("a/bad.jpg", "b/zero.png")]
    assert cache.paths == good
    assert cache.failures == [
        ("a/bad.jpg", "not an image (JPEG, PNG, BMP, WebP, GIF, TIFF, AVIF or HEIC)"),
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


def test_a_second_opening_decodes_nothing(
    images: Path, config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_the_key_depends_on_content_and_settings_but_not_on_the_place(
    images: Path, config: DataConfig, tmp_path: Path
) -> None:
    key = cache_key(scan(images), 8, config)
    assert cache_key(scan(images), 9, config) != key
    assert cache_key(scan(images), 8, DataConfig(max_megapixels=1.0)) != key
    assert cache_key(scan(images), 8, DataConfig(cache_limit_gb=1.0)) == key
    moved = images.rename(tmp_path / "moved")
    assert cache_key(scan(moved), 8, config) == key
    os.utime(moved / "a/00.png", ns=(1, 1))
    assert cache_key(scan(moved), 8, config) != key


def test_the_key_differs_for_other_content_with_the_same_names_sizes_and_times(
    tmp_path: Path, config: DataConfig
) -> None:
    keys = []
    for fill in (10, 20):
        root = tmp_path / str(fill)
        root.mkdir()
        for i in range(3):
            Image.new("RGB", (5, 5), (fill, 0, i)).save(root / f"{i}.bmp")
            os.utime(root / f"{i}.bmp", ns=(1, 1))
        keys.append(cache_key(scan(root), 8, config))
    assert keys[0] != keys[1]


def test_files_changed_with_size_and_time_kept_are_decoded_again(
    tmp_path: Path, config: DataConfig
) -> None:
    root = tmp_path / "images"
    root.mkdir()
    for i in range(40):
        Image.new("RGB", (5, 5), (10, 0, i)).save(root / f"{i:02d}.bmp")
    before = open_cache(scan(root), 8, config)
    for i in range(1, 40, 2):  # every second file is not among those that the key reads
        file = root / f"{i:02d}.bmp"
        status = file.stat()
        Image.new("RGB", (5, 5), (200, 0, i)).save(file)
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert file.stat().st_size == status.st_size
    after = open_cache(scan(root), 8, config)
    assert before.pixels[:, 0, 0, 0].tolist() == [10] * 40
    assert after.pixels[:, 0, 0, 0].tolist() == [10, 200] * 20


def test_the_setting_chooses_the_cache_folder_before_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("CERTVOL_CACHE", raising=False)
    assert cache_folder(DataConfig()) == tmp_path / "xdg/certvol"
    monkeypatch.setenv("CERTVOL_CACHE", str(tmp_path / "env"))
    assert cache_folder(DataConfig()) == tmp_path / "env"
    assert cache_folder(DataConfig(cache_dir=str(tmp_path / "set"))) == tmp_path / "set"


def test_file_names_of_any_kind_are_kept(tmp_path: Path, config: DataConfig) -> None:
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


def test_a_folder_without_readable_images_gives_an_empty_cache(
    tmp_path: Path, config: DataConfig
) -> None:
    (tmp_path / "none").mkdir()
    assert opened(tmp_path / "none", config).pixels.shape == (0, 8, 8, 3)
    (tmp_path / "none/bad.jpg").write_bytes(b"bad")
    for _ in range(2):
        cache = opened(tmp_path / "none", config)
        assert cache.pixels.shape == (0, 8, 8, 3)
        assert len(cache.failures) == 1


# --- damaged caches


def flip_a_byte(data: bytes) -> bytes:
    return data[:5] + bytes([data[5] ^ 255]) + data[6:]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("pixels.bin", lambda data: data[:100]),
        ("hashes.bin", flip_a_byte),
        ("hashes.bin", None),
        ("index.json", lambda data: data.replace(b'"rows": 40', b'"rows": 39')),
        ("index.json", lambda data: b"cos\nsystem\n(S'touch payload-ran'\ntR."),
        ("index.json", lambda data: b"[1, 2]"),
        ("index.json", None),
    ],
)
def test_a_damaged_cache_is_noticed_and_built_again(
    images: Path, config: DataConfig, monkeypatch: pytest.MonkeyPatch, name: str, change: Any
) -> None:
    monkeypatch.chdir(images)
    before = np.array(opened(images, config).pixels)
    (done,) = (p for p in cache_folder(config).iterdir() if p.is_dir())
    data = (done / name).read_bytes()
    (done / name).unlink()
    if change:
        (done / name).write_bytes(change(data))
    with pytest.warns(UserWarning, match="damaged .*making them again"):
        again = opened(images, config)
    assert np.array_equal(again.pixels, before)
    assert len(opened(images, config).paths) == 40
    assert not Path("payload-ran").exists()


def test_a_damaged_cache_that_is_open_is_built_again_beside_it(
    images: Path, config: DataConfig
) -> None:
    first = opened(images, config)
    (done,) = (p for p in cache_folder(config).iterdir() if p.is_dir())
    (done / "index.json").write_text("[1, 2]")
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
    forbid_decoding(monkeypatch)  # a file that is not an image is not tried again
    assert len(opened(images, config).paths) == 40


@pytest.mark.usefixtures("small_blocks")
def test_a_build_stops_if_its_folder_vanishes_and_resumes_later(
    images: Path, config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = opened(images, DataConfig(cache_dir=str(tmp_path / "other")))
    real, calls = decode, [0]

    def unmount(*args: Any) -> np.ndarray:
        calls[0] += 1
        if calls[0] == 20:
            images.rename(tmp_path / "away")
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(decoding, "decode", unmount)
        with pytest.raises(RunFailed, match="became unreadable"):
            opened(images, DataConfig(cache_dir=config.cache_dir, workers=1))
    (tmp_path / "away").rename(images)
    resumed = opened(images, config)
    assert resumed.failures == []
    assert np.array_equal(resumed.pixels, whole.pixels)


# --- features

KEY, SHAPE = "0" * 32, (10, 2, 3)
FEATURES = np.arange(60, dtype=np.float32).reshape(SHAPE)


class Extractor:
    """Returns the rows of FEATURES and records what it was asked for."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.asked: list[tuple[int, int]] = []
        self.fail_at = fail_at

    def __call__(self, start: int, stop: int) -> np.ndarray:
        if start == self.fail_at:
            raise KeyboardInterrupt
        self.asked.append((start, stop))
        return FEATURES[start:stop]


def extracted(config: DataConfig) -> list[tuple[int, int]]:
    """Open the features, check them, and return which images were extracted for that."""
    extractor = Extractor()
    assert np.array_equal(open_features(KEY, SHAPE, extractor, 4, config), FEATURES)
    return extractor.asked


def test_features_are_extracted_once(config: DataConfig) -> None:
    assert extracted(config) == [(0, 4), (4, 8), (8, 10)]
    assert extracted(config) == []


@pytest.mark.parametrize(
    ("name", "change", "redone"),
    [
        ("features.bin", lambda data: data + b"half a row", [(8, 10)]),
        ("journal.jsonl", lambda data: data + b'{"rows"', [(8, 10)]),
        # The next line would be written behind one without its end; neither could be read.
        ("journal.jsonl", lambda data: data[:-1], [(4, 8), (8, 10)]),
        ("features.bin", lambda data: data[: 5 * 24], [(4, 8), (8, 10)]),
    ],
)
def test_an_extraction_resumes_after_its_last_complete_chunk(
    config: DataConfig, name: str, change: Any, redone: list[tuple[int, int]]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        open_features(KEY, SHAPE, Extractor(fail_at=8), 4, config)
    file = cache_folder(config) / f"{KEY}.building" / name
    file.write_bytes(change(file.read_bytes()))
    assert extracted(config) == redone


@pytest.mark.parametrize("name", ["features.bin", "index.json"])
def test_damaged_features_are_extracted_again(config: DataConfig, name: str) -> None:
    extracted(config)
    file = cache_folder(config) / KEY / name
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="damaged"):
        assert len(extracted(config)) == 3


def test_the_limit_of_the_cache_holds_for_features(config: DataConfig) -> None:
    small = DataConfig(cache_dir=config.cache_dir, cache_limit_gb=1e-7)
    with pytest.raises(UserError, match=r"data\.views"):
        open_features(KEY, SHAPE, Extractor(), 4, small)
