import errno
import fcntl
import gc
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from certvol.data.cache import cache_folder, cache_key
from certvol.data.folders import scan
from certvol.errors import UserError
from certvol.files import lock_removable
from certvol.settings import DataConfig
from support.pictures import forbid_decoding, opened


def test_a_set_above_the_limit_is_refused(images: Path, config: DataConfig) -> None:
    small = DataConfig(cache_dir=config.cache_dir, cache_limit_gb=1e-6)
    with pytest.raises(
        UserError,
        match=r"need 0\.008 MB .*limit of 0\.001 MB.*data\.cache_limit_gb.*data\.cache_dir",
    ):
        opened(images, small)
    assert len(opened(images, config).paths) == 40


def test_the_longest_unused_set_is_evicted(
    images: Path, config: DataConfig, tmp_path: Path
) -> None:
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
    limit = (
        40 * 3 * (8 * 8 + 10 * 10 + 11 * 11) + 5000
    )  # one of the three must go for the fourth; 5000 for the indexes
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


def test_a_lock_is_not_taken_on_a_file_that_was_removed_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "k.use"
    evicting = lock_removable(path, fcntl.LOCK_EX)
    got: list[int] = []
    waiting = threading.Thread(target=lambda: got.append(lock_removable(path, fcntl.LOCK_SH)))
    waiting.start()
    time.sleep(0.1)  # so that it has opened the old file
    path.unlink()
    os.close(evicting)
    waiting.join(600)
    (held,) = got
    assert os.fstat(held).st_ino == path.stat().st_ino
    os.close(held)


def test_too_little_free_space_is_reported_before_decoding(
    images: Path, config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_decoding(monkeypatch)
    usage = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"need 0\.008 MB .*0\.001 MB are free"):
        opened(images, config)


def test_a_file_instead_of_the_cache_folder_is_refused(images: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below"):
        with pytest.raises(UserError, match=r"is not a folder; set data\.cache_dir"):
            opened(images, DataConfig(cache_dir=str(tmp_path / place)))


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written_serves_finished_sets_only(
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
    assert len(opened(images, config).paths) == 40  # finished sets need no write permission


def test_a_read_only_disk_serves_finished_sets_only(
    images: Path, config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
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
