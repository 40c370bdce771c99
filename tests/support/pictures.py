"""Pictures to decode, and shared code for tests of the cache."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from certvol.data import decoding
from certvol.data.cache import PixelCache, open_cache
from certvol.data.folders import scan
from certvol.progress import Progress
from certvol.settings import DataConfig

LIMIT = 179.0


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def picture(width: int = 40, height: int = 24) -> Image.Image:
    """Return red, green, blue and grey quarters, which differ in all eight orientations."""
    pixels = np.empty((height, width, 3), dtype=np.uint8)
    pixels[: height // 2, : width // 2] = (250, 10, 10)
    pixels[: height // 2, width // 2 :] = (10, 250, 10)
    pixels[height // 2 :, : width // 2] = (10, 10, 250)
    pixels[height // 2 :, width // 2 :] = (128, 128, 128)
    return Image.fromarray(pixels)


def close(a: np.ndarray, b: np.ndarray, by: float = 3.0) -> bool:
    return a.shape == b.shape and float(np.abs(a.astype(float) - b.astype(float)).mean()) <= by


def opened(
    root: Path, config: DataConfig, size: int = 8, progress: Progress | None = None
) -> PixelCache:
    return open_cache(scan(root), size, config, progress)


def forbid_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(decoding, "decode", fail)
