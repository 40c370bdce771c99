import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from pictures import LIMIT

from certvol.config import DataConfig
from certvol.data.decoding import UnreadableImage, decode
from certvol.data.folders import scan
from certvol.data.reading import read_file, read_images
from certvol.errors import RunFailed


def test_read_file_does_not_wait_for_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    with pytest.raises(UnreadableImage, match="not a file"):
        read_file(tmp_path / "pipe.jpg", LIMIT)


def test_read_file_refuses_what_no_image_can_be(tmp_path: Path) -> None:
    with (tmp_path / "huge.png").open("wb") as file:
        file.truncate(2_000_000_000)  # sparse: takes no space
    with pytest.raises(UnreadableImage, match=r"2\.0 GB"):
        read_file(tmp_path / "huge.png", LIMIT)


def test_images_come_in_order_from_any_number_on(images: Path, config: DataConfig) -> None:
    (images / "a/03bad.jpg").write_bytes(b"text")
    listing = scan(images)
    for start in (0, 7, 41):
        read = [image for lot in read_images(listing, 8, config, start) for image in lot]
        assert len(read) == 41 - start
        for path, image in zip(listing.paths[start:], read, strict=True):
            raw = (images / path).read_bytes()
            assert image.digest == hashlib.blake2b(raw, digest_size=16).digest()
            if path == "a/03bad.jpg":
                assert (image.pixels, image.lasting) == (None, True)
                assert image.reason.startswith("not an image")
            else:
                assert np.array_equal(image.pixels, decode(raw, 8, LIMIT))


def test_a_file_that_went_away_is_told_from_a_folder_that_did(images: Path, config: DataConfig, tmp_path: Path) -> None:
    listing = scan(images)
    (images / listing.paths[0]).unlink()
    (first, *_) = next(read_images(listing, 8, config))
    assert (first.pixels, first.digest, first.lasting) == (None, None, False)
    images.rename(tmp_path / "away")
    with pytest.raises(RunFailed, match="became unreadable"):
        list(read_images(listing, 8, config))
