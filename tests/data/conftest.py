import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from certvol.data import cache, decode_pool
from certvol.settings import DataConfig


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
    """Make blocks of 4 images of 8 x 8, read 2 at a time."""
    monkeypatch.setattr(cache, "BLOCK_BYTES", 4 * 192)
    monkeypatch.setattr(decode_pool, "_GROUP_BYTES", 2 * 192)


# A worker that an image with CRASH in it crashes, and one with HANG keeps busy until it is killed.
# A file `slow` beside the script makes it slow.
WORKER = """
import os, signal, sys, time
from pathlib import Path
from certvol.data import decode_worker, decoding
real = decoding.decode
def decode(raw, *options):
    if b"CRASH" in raw:
        os.write(2, b"certvol test: crashing")
        os.kill(os.getpid(), signal.SIGKILL if b"CRASH9" in raw else signal.SIGSEGV)
    while b"HANG" in raw:
        pass
    if Path(__file__).with_name("slow").exists():
        time.sleep(0.02)
    return real(raw, *options)
decoding.decode = decode
decode_worker.main()
"""


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use processes for a few images too, and on a machine with one core."""
    monkeypatch.setattr(decode_pool, "_PROCESSES_FROM", 1)
    monkeypatch.setattr(decode_pool, "cores", lambda: 2)


@pytest.fixture
def odd_worker(processes: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    script = tmp_path / "worker" / "worker.py"
    script.parent.mkdir()
    script.write_text(WORKER)
    monkeypatch.setattr(decode_pool, "_COMMAND", [sys.executable, "-P", str(script)])
    return script
