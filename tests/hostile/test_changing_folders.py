"""Commands survive files that change, vanish or are too many while they are read."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from certvol.data import folders
from certvol.data.folders import labels_of, scan
from support.commands import Said, adapt_words, last_sentence, spoken
from support.corpus import Pictures
from support.images import write_domain
from support.tables import rows_of


def changing(
    monkeypatch: pytest.MonkeyPatch, module: str, root: Path, change: Callable[[], object]
) -> None:
    """Call `change` once, between the listing of `root` and the reading of its files."""
    done = threading.Event()

    def scan_and_change(folder: str | Path) -> folders.Listing:
        listing = scan(folder)
        if Path(folder) == root and not done.is_set():
            done.set()
            change()
        return listing

    monkeypatch.setattr(f"{module}.scan", scan_and_change)


def disturb(root: Path) -> None:
    """Delete, change, cut and replace one file each of twelve."""
    (root / "apple" / "0.png").unlink()
    (root / "apple" / "1.png").write_bytes(Pictures(9).png())
    (root / "leaf" / "2.png").write_bytes((root / "leaf" / "2.png").read_bytes()[:50])
    (root / "leaf" / "3.png").unlink()
    os.mkfifo(root / "leaf" / "3.png")


def test_check_while_files_change(
    clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_domain(tmp_path / "target", per_class=4)
    changing(monkeypatch, "certvol.data.check", target, lambda: disturb(target))
    said = spoken("check", "--source", str(clean), "--target", str(target))
    assert said.code == 0
    assert "target: unreadable files and folders are left out: 4 " in said.text


def test_adapt_while_files_change(
    clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = write_domain(tmp_path / "target", per_class=4)
    changing(monkeypatch, "certvol.data.domains", target, lambda: disturb(target))
    said = spoken(*adapt_words(clean, target, tmp_path / "run"))
    assert said.code == 0, said.err
    assert "4 unreadable target images were skipped" in said.err
    assert len(rows_of(tmp_path / "run" / "predictions.csv")) == 8


def test_predict_while_files_change(
    adapted: tuple[Path, Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = write_domain(tmp_path / "images", per_class=4)

    def vanish() -> None:
        (images / "apple" / "0.png").unlink()
        (images / "leaf" / "2.png").write_bytes((images / "leaf" / "2.png").read_bytes()[:50])

    changing(monkeypatch, "certvol.predict.new_images", images, vanish)
    said = spoken("predict", str(adapted[0]), str(images), "--out", str(tmp_path / "p.csv"))
    assert said.code == 0
    assert "2 unreadable skipped" in said.out
    assert len(rows_of(tmp_path / "p.csv")) == 10


def test_adapt_while_a_class_or_the_folder_disappears(
    clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_domain(tmp_path / "source", per_class=4)
    with monkeypatch.context() as patch:
        changing(
            patch, "certvol.data.sources", source, lambda: (source / "sky").rename(tmp_path / "sky")
        )
        said = spoken(*adapt_words(source, clean, tmp_path / "run"))
    assert said.code == 0, said.err
    assert "classes without a readable image" in said.err
    with monkeypatch.context() as patch:
        changing(patch, "certvol.data.sources", source, lambda: source.rename(tmp_path / "away"))
        said = spoken(*adapt_words(source, clean, tmp_path / "other"))
    assert said.code == 1
    assert "became unreadable" in last_sentence(said.err)
    assert not (tmp_path / "other").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_folders_and_files_without_permission(clean: Path, tmp_path: Path) -> None:
    target = write_domain(tmp_path / "target", per_class=4)
    (target / "sky").chmod(0)
    (target / "leaf" / "0.png").chmod(0)
    try:
        said = spoken(*adapt_words(clean, target, tmp_path / "run"))
        assert said.code == 0
        assert "2 unreadable target images were skipped" in said.err
        assert len(rows_of(tmp_path / "run" / "predictions.csv")) == 7
        target.chmod(0)
        assert "permission denied" in last_sentence(
            spoken(*adapt_words(clean, target, tmp_path / "none")).err
        )
    finally:
        target.chmod(0o700)
        (target / "sky").chmod(0o700)


class _Entry:
    """An entry of os.scandir for a plain file."""

    __slots__ = ("name",)
    status = os.stat_result(
        (0o100644, 1, 1, 1, 0, 0, 1000, 0, 0, 0), {"st_mtime_ns": 0, "st_ctime_ns": 0}
    )

    def __init__(self, name: str) -> None:
        self.name = name

    def is_dir(self) -> bool:
        return False

    def is_file(self) -> bool:
        return True

    def is_symlink(self) -> bool:
        return False

    def stat(self) -> os.stat_result:
        return self.status


@pytest.mark.slow
def test_a_million_files_are_listed_within_bounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 classes of 1,000 files; only their names exist."""
    for number in range(1000):
        (tmp_path / f"class {number:03d}").mkdir()
    real = os.scandir
    open_at_once = [0, 0]

    class Many:
        def __init__(self, path: Path) -> None:
            self.path = Path(path)

        def __enter__(self) -> Iterator[object]:
            open_at_once[0] += 1
            open_at_once[1] = max(open_at_once)
            if self.path == tmp_path:
                with real(self.path) as entries:
                    return iter(list(entries))
            return (_Entry(f"image-{number:06d}.jpg") for number in range(1000))

        def __exit__(self, *_: object) -> None:
            open_at_once[0] -= 1

    monkeypatch.setattr(os, "scandir", Many)
    listing = scan(tmp_path)
    assert len(listing.paths) == 1_000_000
    assert open_at_once[1] == 1  # so the limit of open files does not matter
    assert listing.paths == sorted(listing.paths)
    held = sum(map(sys.getsizeof, listing.paths)) + listing.status_N3.nbytes
    assert held < 200e6
    classes, labels = labels_of(listing)
    assert len(classes) == 1000
    assert np.bincount(labels).tolist() == [1000] * 1000
