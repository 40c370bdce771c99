import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFile

from certvol.data import decode_pool
from certvol.data.decode_pool import read_images
from certvol.data.decoding import ReadImage, decode
from certvol.data.folders import ListedFile, scan
from certvol.errors import RunFailed
from certvol.settings import DataConfig
from support.corpus import write_corpus
from support.decoding import assert_same, by_processes, by_threads, children, read_all
from support.pictures import LIMIT, encoded, picture


def test_images_come_in_order_from_any_start(images: Path, config: DataConfig) -> None:
    (images / "a/03bad.jpg").write_bytes(b"text")
    listing = scan(images)
    for start in (0, 7, 41):
        read = read_all(listing, 8, config, start)
        assert len(read) == 41 - start
        for path, image in zip(listing.paths[start:], read, strict=True):
            raw = (images / path).read_bytes()
            assert image.digest == hashlib.blake2b(raw, digest_size=16).digest()
            if path == "a/03bad.jpg":
                assert (image.pixels, image.lasting) == (None, True)
                assert image.reason.startswith("not an image")
            else:
                assert image.pixels is not None
                assert np.array_equal(image.pixels, decode(raw, 8, LIMIT))


@pytest.mark.usefixtures("processes")
def test_processes_and_threads_agree_on_everything_a_folder_can_hold(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    listing = scan(corpus.root)
    before = children()
    expected = by_threads(listing, 16, DataConfig(workers=1))
    assert 0 < sum(image.pixels is None for image in expected) < len(expected)
    assert_same(by_processes(listing, 16, DataConfig(workers=2)), expected)
    assert children() <= before


@pytest.mark.usefixtures("processes")
def test_processes_start_anywhere_and_return_images_larger_than_a_pipe(images: Path) -> None:
    listing = scan(images)
    for size, start in ((300, 5), (8, 39)):
        config = DataConfig(workers=3)
        assert_same(
            by_processes(listing, size, config, start), by_threads(listing, size, config, start)
        )


@pytest.mark.usefixtures("processes")
def test_processes_work_with_a_relative_root_and_closed_standard_streams(images: Path) -> None:
    script = f"""
import os, sys
sys.path[:0] = {sys.path!r}
for number in (0, 1, 2):
    os.close(number)
from pathlib import Path
from certvol.settings import DataConfig
from certvol.data import decode_pool, decoding
from certvol.data.folders import scan
from dataclasses import replace
decode_pool._PROCESSES_FROM, decode_pool.cores, decoding.decode = 1, lambda: 2, None
listing = replace(scan("images"), root=Path("images"))
config = DataConfig(workers=2)
read = [image for group in decode_pool.read_images(listing, 8, config) for image in group]
os._exit(42 if len(read) == 40 and all(image.pixels is not None for image in read) else 1)
"""
    command = [sys.executable, "-c", script]
    assert subprocess.run(command, cwd=images.parent, timeout=600).returncode == 42


@pytest.mark.usefixtures("processes")
def test_a_script_without_a_main_guard_runs_once(images: Path, tmp_path: Path) -> None:
    """A worker does not import a module of the current folder either."""
    (tmp_path / "numpy.py").write_text("raise SystemExit(3)")
    script = tmp_path / "scripts" / "user.py"
    script.parent.mkdir()
    script.write_text(
        "print('begun')\n"
        f"import sys; sys.path[1:1] = {[place for place in sys.path if place]!r}\n"
        "from certvol.settings import DataConfig\n"
        "from certvol.data import decode_pool, decoding\n"
        "from certvol.data.folders import scan\n"
        "decode_pool._PROCESSES_FROM, decode_pool.cores, decoding.decode = 1, lambda: 2, None\n"
        f"listing, config = scan({str(images)!r}), DataConfig(workers=2)\n"
        "print(sum(map(len, decode_pool.read_images(listing, 8, config))))\n"
    )
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert (done.stdout, done.stderr) == ("begun\n40\n", "")


def test_a_worker_imports_no_torch() -> None:
    script = "import sys, certvol.data.decode_worker; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert not {"torch", "timm", "sklearn", "rich"} & set(done.stdout.split())


def test_few_images_or_one_worker_or_one_core_start_no_process(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a process")

    monkeypatch.setattr(decode_pool, "_Worker", fail)
    for workers, cores, least in ((2, 2, 41), (1, 2, 1), (0, 1, 1), (2, 1, 1)):
        monkeypatch.setattr(decode_pool, "cores", lambda cores=cores: cores)
        monkeypatch.setattr(decode_pool, "_PROCESSES_FROM", least)
        assert len(read_all(scan(images), 8, DataConfig(workers=workers))) == 40
    monkeypatch.setattr(decode_pool, "cores", lambda: 2)
    with pytest.raises(AssertionError):
        next(read_images(scan(images), 8, DataConfig(workers=0)))


@pytest.mark.usefixtures("odd_worker")
def test_only_the_image_that_crashes_the_decoder_fails(
    images: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    good = encoded(picture(), "PNG")
    (images / "a/05.png").write_bytes(good + b"CRASH")
    (images / "b/90.png").write_bytes(good + b"CRASH9")
    listing = scan(images)
    found = by_processes(listing, 8, DataConfig(workers=2))
    at_fault = {listing.paths[i]: image for i, image in enumerate(found) if image.pixels is None}
    crashed = ("the decoder crashed on it, or was out of memory", True)
    reasons = {path: (image.reason, image.lasting) for path, image in at_fault.items()}
    assert reasons == {"a/05.png": crashed, "b/90.png": crashed}
    healthy = by_threads(listing, 8, DataConfig(workers=1))
    kept = [i for i, path in enumerate(listing.paths) if path not in at_fault]
    assert_same([found[i] for i in kept], [healthy[i] for i in kept])
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("command", [["/nonexistent/python"], [sys.executable, "-c", "1"], ["yes"]])
def test_threads_decode_if_no_process_starts(
    images: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setattr(decode_pool, "_COMMAND", command)
    before = children()
    config = DataConfig(workers=2)
    found = read_all(scan(images), 8, config)
    assert_same(found, by_threads(scan(images), 8, config))
    assert children() <= before


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("threads", [False, True])
def test_large_files_and_images_are_decoded_one_at_a_time_by_a_process(
    images: Path, monkeypatch: pytest.MonkeyPatch, threads: bool
) -> None:
    (images / "a/05.png").write_bytes(encoded(Image.new("1", (6000, 5000), 1), "PNG"))
    (images / "a/07.png").write_bytes((images / "a/06.png").read_bytes() + bytes(9000))
    alone: list[str] = []
    real = decode_pool._Worker.read

    def recording(worker: Any, file: ListedFile, is_alone: bool) -> ReadImage:
        if is_alone:
            alone.append(Path(file.path).name)
        return real(worker, file, is_alone)

    listing = scan(images)
    monkeypatch.setattr(decode_pool, "_LARGE_FILE", (images / "a/07.png").stat().st_size - 1)
    monkeypatch.setattr(decode_pool._Worker, "read", recording)
    read = by_threads if threads else by_processes
    found = read(listing, 8, DataConfig(workers=2))
    assert sorted(alone) == ["05.png", "07.png"]
    monkeypatch.setattr(decode_pool, "_COMMAND", ["/nonexistent/python"])
    assert_same(found, by_threads(listing, 8, DataConfig(workers=1)))


@pytest.mark.usefixtures("odd_worker")
@pytest.mark.parametrize("threads", [False, True])
def test_an_image_that_takes_too_long_is_left_out(
    images: Path, monkeypatch: pytest.MonkeyPatch, threads: bool
) -> None:
    (images / "a/05.png").write_bytes(encoded(picture(), "PNG") + b"HANG" + bytes(9000))
    listing, config = scan(images), DataConfig(workers=2, decode_seconds=0.2)
    expected = by_threads(listing, 8, config)
    monkeypatch.setattr(decode_pool, "_LARGE_FILE", 9000)
    found = (by_threads if threads else by_processes)(listing, 8, config)
    number = listing.paths.index("a/05.png")
    slow = found.pop(number)
    assert (slow.pixels, slow.lasting) == (None, True)
    assert slow.reason == "takes too long to decode (data.decode_seconds is 0.2)"
    assert_same(found, expected[:number] + expected[number + 1 :])


@pytest.mark.usefixtures("processes")
def test_a_vanished_folder_and_too_many_open_files_fail_the_run(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = scan(images)
    (images / "a/00.png").unlink()
    first = by_processes(listing, 8, DataConfig(workers=2))[0]
    assert (first.reason, first.lasting) == ("cannot be read: no such file or directory", False)
    script = tmp_path / "worker.py"
    script.write_text(
        "import errno, os\nfrom certvol.data import decode_worker\n"
        "def refuse(*_):\n    raise OSError(errno.EMFILE, 'Too many open files')\n"
        "os.open = refuse\ndecode_worker.main()\n"
    )
    with monkeypatch.context() as patch:
        patch.setattr(decode_pool, "_COMMAND", [sys.executable, "-P", str(script)])
        with pytest.raises(RunFailed, match="too many open files"):
            by_processes(listing, 8, DataConfig(workers=2))
    images.rename(tmp_path / "away")
    with pytest.raises(RunFailed, match="became unreadable"):
        by_processes(listing, 8, DataConfig(workers=2))


@pytest.mark.usefixtures("processes")
def test_processes_follow_the_users_setting_for_truncated_images(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = encoded(picture(64, 64), "JPEG")
    (images / "a/05.jpg").write_bytes(whole[: len(whole) - 60])
    listing = scan(images)
    (number,) = (i for i, path in enumerate(listing.paths) if path == "a/05.jpg")
    assert by_processes(listing, 8, DataConfig(workers=2))[number].pixels is None
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    assert by_processes(listing, 8, DataConfig(workers=2))[number].pixels is not None
