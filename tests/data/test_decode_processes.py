import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from pictures import Recorder, encoded, opened, picture
from PIL import Image, ImageFile

from certvol.config import DataConfig
from certvol.data import cache, decode_processes, decoding, reading
from certvol.data.decoding import ReadImage
from certvol.data.folders import Listing, scan
from certvol.data.reading import read_images
from certvol.errors import RunFailed
from hostile.corpus import write_corpus

# A worker of the tests: an image that holds CRASH crashes it, and where a file `slow` lies beside the script, all take long.
WORKER = """
import os, signal, sys, time
from pathlib import Path
from certvol.data import decode_worker
real = decode_worker.decode
def decode(raw, **options):
    if b"CRASH" in raw:
        os.write(2, b"certvol test: crashing")
        os.kill(os.getpid(), signal.SIGKILL if b"CRASH9" in raw else signal.SIGSEGV)
    if Path(__file__).with_name("slow").exists():
        time.sleep(0.02)
    return real(raw, **options)
decode_worker.decode = decode
decode_worker.main()
"""


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes also for a few images, and on a machine with one core."""
    monkeypatch.setattr(reading, "_PROCESSES_FROM", 1)
    monkeypatch.setattr(reading, "cores", lambda: 2)


@pytest.fixture
def odd_worker(processes: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    script = tmp_path / "worker" / "worker.py"
    script.parent.mkdir()
    script.write_text(WORKER)
    monkeypatch.setattr(decode_processes, "_COMMAND", [sys.executable, "-P", str(script)])
    return script


def by_threads(listing: Listing, size: int, config: DataConfig, start: int = 0) -> list[ReadImage]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "_PROCESSES_FROM", 1 << 60)
        return [image for lot in read_images(listing, size, config, start) for image in lot]


def by_processes(listing: Listing, size: int, config: DataConfig, start: int = 0) -> list[ReadImage]:
    """With this process unable to decode by itself: what comes back was decoded by others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "decode", None)
        return [image for lot in read_images(listing, size, config, start) for image in lot]


def assert_same(found: list[ReadImage], expected: list[ReadImage]) -> None:
    assert [(i.digest, i.reason, i.lasting) for i in found] == [(i.digest, i.reason, i.lasting) for i in expected]
    for one, other in zip(found, expected, strict=True):
        assert (one.pixels is None) == (other.pixels is None)
        assert one.pixels is None or (one.pixels.dtype == np.uint8 and np.array_equal(one.pixels, other.pixels))


def children() -> set[int]:
    return {
        int(stat.parent.name)
        for stat in Path("/proc").glob("[0-9]*/stat")
        if (text := _text(stat)) and int(text.rpartition(")")[2].split()[1]) == os.getpid()
    }


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


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
def test_processes_begin_anywhere_and_read_a_size_that_fills_more_than_a_pipe(images: Path) -> None:
    listing = scan(images)
    for size, start in ((300, 5), (8, 39)):
        config = DataConfig(workers=3)
        assert_same(by_processes(listing, size, config, start), by_threads(listing, size, config, start))


@pytest.mark.usefixtures("processes")
def test_a_relative_root_and_closed_standard_streams(images: Path) -> None:
    script = f"""
import os, sys
sys.path[:0] = {sys.path!r}
for number in (0, 1, 2):
    os.close(number)
from pathlib import Path
from certvol.config import DataConfig
from certvol.data import reading
from certvol.data.folders import scan
from dataclasses import replace
reading._PROCESSES_FROM, reading.cores, reading.decode = 1, lambda: 2, None
listing = replace(scan("images"), root=Path("images"))
read = [image for lot in reading.read_images(listing, 8, DataConfig(workers=2)) for image in lot]
os._exit(42 if len(read) == 40 and all(image.pixels is not None for image in read) else 1)
"""
    assert subprocess.run([sys.executable, "-c", script], cwd=images.parent, timeout=60).returncode == 42


@pytest.mark.usefixtures("processes")
def test_a_script_without_a_guard_is_run_once_and_its_folder_does_no_harm(images: Path, tmp_path: Path) -> None:
    """And modules of the current folder are not taken for those a worker needs."""
    (tmp_path / "numpy.py").write_text("raise SystemExit(3)")
    script = tmp_path / "scripts" / "user.py"
    script.parent.mkdir()
    script.write_text(
        "print('begun')\n"
        f"import sys; sys.path[1:1] = {[place for place in sys.path if place]!r}\n"
        "from certvol.config import DataConfig\n"
        "from certvol.data import reading\n"
        "from certvol.data.folders import scan\n"
        "reading._PROCESSES_FROM, reading.cores, reading.decode = 1, lambda: 2, None\n"
        f"print(sum(len(lot) for lot in reading.read_images(scan({str(images)!r}), 8, DataConfig(workers=2))))\n"
    )
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("begun\n40\n", "")


def test_a_worker_imports_no_torch() -> None:
    words = (
        "import sys, certvol.data.decode_worker; print(sorted({'torch', 'timm', 'sklearn', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_few_images_or_one_worker_or_one_core_start_no_process(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("a process")

    monkeypatch.setattr(reading, "DecodeProcesses", fail)
    for workers, cores, least in ((2, 2, 41), (1, 2, 1), (0, 1, 1), (2, 1, 1)):
        monkeypatch.setattr(reading, "cores", lambda cores=cores: cores)
        monkeypatch.setattr(reading, "_PROCESSES_FROM", least)
        assert sum(len(lot) for lot in read_images(scan(images), 8, DataConfig(workers=workers))) == 40
    monkeypatch.setattr(reading, "cores", lambda: 2)
    with pytest.raises(AssertionError):
        next(read_images(scan(images), 8, DataConfig(workers=0)))


@pytest.mark.usefixtures("odd_worker")
def test_an_image_that_crashes_the_decoder_is_alone_at_fault(images: Path, capfd: pytest.CaptureFixture[str]) -> None:
    good = encoded(picture(), "PNG")
    (images / "a/05.png").write_bytes(good + b"CRASH")
    (images / "b/90.png").write_bytes(good + b"CRASH9")
    listing = scan(images)
    found = by_processes(listing, 8, DataConfig(workers=2))
    at_fault = {path: image for path, image in zip(listing.paths, found, strict=True) if image.pixels is None}
    assert {path: (image.reason, image.lasting) for path, image in at_fault.items()} == {
        "a/05.png": ("the decoder crashed on it", True),
        "b/90.png": ("the decoder crashed on it (killed; too little memory?)", True),
    }
    healthy = by_threads(listing, 8, DataConfig(workers=1))
    kept = [i for i, path in enumerate(listing.paths) if path not in at_fault]
    assert_same([found[i] for i in kept], [healthy[i] for i in kept])
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("command", [["/nonexistent/python"], [sys.executable, "-c", "1"], ["yes"]])
def test_where_no_process_starts_threads_decode(
    images: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setattr(decode_processes, "_COMMAND", command)
    before = children()
    config = DataConfig(workers=2)
    found = [image for lot in read_images(scan(images), 8, config) for image in lot]
    assert_same(found, by_threads(scan(images), 8, config))
    assert children() <= before


@pytest.mark.usefixtures("processes")
def test_large_files_and_large_images_are_decoded_here(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = encoded(Image.new("1", (6000, 5000), 1), "PNG")  # 30 megapixels
    (images / "a/05.png").write_bytes(large)
    (images / "a/07.png").write_bytes((images / "a/06.png").read_bytes() + bytes(9000))
    decoded: list[int] = []
    real = decoding.decode

    def recording(raw: bytes, size: int, limit: float) -> np.ndarray:
        decoded.append(len(raw))
        return real(raw, size, limit)

    listing = scan(images)
    heavy = (images / "a/07.png").stat().st_size
    monkeypatch.setattr(reading, "_LARGE_FILE", heavy - 1)
    monkeypatch.setattr(reading, "decode", recording)
    found = [image for lot in read_images(listing, 8, DataConfig(workers=2)) for image in lot]
    assert sorted(decoded) == sorted([len(large), heavy])
    assert_same(found, by_threads(listing, 8, DataConfig(workers=1)))


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
        "import errno, io\nfrom certvol.data import decode_worker, reading\n"
        "def refuse(path):\n    raise OSError(errno.EMFILE, 'Too many open files')\n"
        "reading.open_to_read = refuse\ndecode_worker.main()\n"
    )
    with monkeypatch.context() as patch:
        patch.setattr(decode_processes, "_COMMAND", [sys.executable, "-P", str(script)])
        with pytest.raises(RunFailed, match="too many open files"):
            by_processes(listing, 8, DataConfig(workers=2))
    images.rename(tmp_path / "away")
    with pytest.raises(RunFailed, match="became unreadable"):
        by_processes(listing, 8, DataConfig(workers=2))


@pytest.mark.usefixtures("processes")
def test_pillow_settings_of_the_user_count_in_the_processes(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = encoded(picture(64, 64), "JPEG")
    (images / "a/05.jpg").write_bytes(whole[: len(whole) - 60])
    listing = scan(images)
    (number,) = (i for i, path in enumerate(listing.paths) if path == "a/05.jpg")
    assert by_processes(listing, 8, DataConfig(workers=2))[number].pixels is None
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    assert by_processes(listing, 8, DataConfig(workers=2))[number].pixels is not None


def test_closing_early_leaves_no_process(images: Path, odd_worker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_TASK_BYTES", 192)
    odd_worker.with_name("slow").touch()
    before = children()
    lots = read_images(scan(images), 8, DataConfig(workers=2))
    next(lots)
    deadline = time.monotonic() + 60
    while len(children() - before) < 2:  # the second may come a moment after the first has answered
        assert time.monotonic() < deadline
        time.sleep(0.01)
    began = time.monotonic()
    lots.close()
    assert time.monotonic() - began < 30
    assert children() <= before


@pytest.mark.usefixtures("small_blocks")
def test_an_interrupted_build_leaves_no_process_and_goes_on(
    images: Path, config: DataConfig, odd_worker: Path, tmp_path: Path
) -> None:
    class Stopped(Recorder):
        def advance(self, n: int = 1) -> None:
            super().advance(n)
            if self.advanced >= 20:
                raise KeyboardInterrupt

    whole = opened(images, DataConfig(cache_dir=str(tmp_path / "other"), workers=1))
    before = children()
    with pytest.raises(KeyboardInterrupt):
        opened(images, config, progress=Stopped())
    assert children() <= before
    (journal,) = cache.cache_folder(config).glob("*.building/journal.jsonl")
    assert len(journal.read_bytes().splitlines()) >= 4
    progress = Recorder()
    resumed = opened(images, config, progress=progress)
    assert progress.events == [("decoding images", 40), ("finish", 40)]
    assert np.array_equal(resumed.pixels, whole.pixels)
    assert np.array_equal(resumed.hashes, whole.hashes)


ORPHANS = """
import os, sys, time
from certvol.config import DataConfig
from certvol.data import decode_processes, reading
from certvol.data.folders import scan
reading._PROCESSES_FROM, reading.cores, reading._TASK_BYTES = 1, lambda: 2, 192
decode_processes._COMMAND = [sys.executable, "-P", sys.argv[2]]
lots = reading.read_images(scan(sys.argv[1]), 8, DataConfig(workers=2))
next(lots)
if os.fork() == 0:  # a child of the user's, which keeps the pipes open
    time.sleep(20)
    os._exit(0)
print("under way", flush=True)
for lot in lots:
    time.sleep(0.1)
"""


def test_workers_end_with_a_killed_parent_and_not_by_ctrl_c(images: Path, odd_worker: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", ORPHANS, str(images), str(odd_worker)], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"under way\n"
        deadline = time.monotonic() + 60
        while not (len(workers := _running(str(odd_worker), parent=process.pid)) == 2 and all(map(_is_up, workers))):
            assert time.monotonic() < deadline  # the second may still be starting when the first has answered
            time.sleep(0.02)
        for worker in workers:
            os.kill(worker, signal.SIGINT)
        time.sleep(0.2)
        assert _running(str(odd_worker), parent=process.pid) == workers
        process.kill()
        process.wait()
        deadline = time.monotonic() + 60
        while _running(str(odd_worker)) & workers:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _is_up(worker: int) -> bool:
    """True once it leaves Ctrl-C to its parent."""
    ignored = [line for line in _text(Path(f"/proc/{worker}/status")).splitlines() if line.startswith("SigIgn:")]
    return bool(ignored) and bool(int(ignored[0].split()[1], 16) >> (signal.SIGINT - 1) & 1)


def _running(script: str, parent: int | None = None) -> set[int]:
    """Processes, zombies left out, whose command is a worker of that script."""
    found = set()
    for place in Path("/proc").glob("[0-9]*"):
        words = _text(place / "cmdline").split("\0")
        if len(words) > 3 and words[1:3] == ["-P", script] and (parent is None or words[3] == str(parent)):
            found.add(int(place.name))
    return found
