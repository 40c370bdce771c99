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
