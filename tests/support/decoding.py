"""Decode a listing by processes or by threads."""

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest

from certvol.data import decode_pool, decoding
from certvol.data.decode_pool import read_images
from certvol.data.decoding import ReadImage
from certvol.data.folders import Listing
from certvol.settings import DataConfig


def read_all(listing: Listing, size: int, config: DataConfig, start: int = 0) -> list[ReadImage]:
    return [image for group in read_images(listing, size, config, start) for image in group]


def by_threads(listing: Listing, size: int, config: DataConfig, start: int = 0) -> list[ReadImage]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_pool, "_PROCESSES_FROM", 1 << 60)
        return read_all(listing, size, config, start)


def by_processes(
    listing: Listing, size: int, config: DataConfig, start: int = 0
) -> list[ReadImage]:
    """Read images while this process cannot decode, so that workers must have done it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "decode", None)
        return read_all(listing, size, config, start)


def assert_same(found: list[ReadImage], expected: list[ReadImage]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.digest, one.reason, one.lasting) == (other.digest, other.reason, other.lasting)
        if one.pixels is None or other.pixels is None:
            assert one.pixels is other.pixels
        else:
            assert one.pixels.dtype == np.uint8
            assert np.array_equal(one.pixels, other.pixels)


def children() -> set[int]:
    return {
        int(stat.parent.name)
        for stat in Path("/proc").glob("[0-9]*/stat")
        if (text := text_of(stat)) and int(text.rpartition(")")[2].split()[1]) == os.getpid()
    }


def text_of(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""
