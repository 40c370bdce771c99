"""What `certvol check` says of a target: few images, copies, folder names that nearly match."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from certvol.data.check import check
from certvol.data.check_target import (
    MOST_COMPARED,
    about_copies,
    about_folders,
    about_size,
    compared,
    distinct,
    similar,
    thumbnail,
)
from support.findings import CONFIG, texts
from support.images import write_noise

CLASSES = ["back_pack", "bike", "Mug", "pen"]


def noise(seed: int, side: int = 32) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


def test_a_thumbnail_averages_grey_values() -> None:
    pixels = noise(0)
    found = thumbnail(pixels)
    assert found.shape == (256,)
    block = pixels[2:4, 30:32].astype(float)  # row 1, column 15
    assert found[16 + 15] == round(block.mean())


def test_distinct_images_are_counted_by_a_loop() -> None:
    bases = [thumbnail(noise(i)) for i in range(6)]
    shaken = [base.astype(int) + (-1) ** i * 2 for i, base in enumerate(bases)]
    images = [np.clip(x, 0, 255).astype(np.uint8) for x in (*bases, *shaken, *bases)]
    assert distinct(images, 100) == 6
    assert distinct(images, 4) == 4
    far = [np.clip(base.astype(int) // 2, 0, 255).astype(np.uint8) for base in bases]
    assert distinct([*images, *far], 100) == 12


def test_compared_images_are_spread_over_all() -> None:
    assert compared(3).tolist() == [0, 1, 2]
    chosen = compared(3 * MOST_COMPARED)
    assert len(set(chosen)) == MOST_COMPARED
    assert chosen[0] == 0
    assert chosen[-1] == 3 * MOST_COMPARED - 1


def test_frames_of_a_video_are_few_images() -> None:
    frames = [thumbnail(noise(i % 6)) for i in range(60)]
    text = about_copies(frames)
    assert text is not None
    assert text.startswith("60 images look like 6 distinct ones")
    assert about_copies([thumbnail(noise(i)) for i in range(60)]) is None
    assert about_copies([]) is None


@pytest.mark.parametrize(
    ("images", "classes", "words"),
    [
        (0, 3, None),
        (8, 3, "8 images are too few to adapt to"),
        (40, 31, "40 images for 31 source classes"),
        (40, 3, None),
        (200, 31, None),
    ],
)
def test_a_handful_of_images_is_remarked_on(images: int, classes: int, words: str | None) -> None:
    text = about_size(images, classes)
    assert (text is None) if words is None else (text is not None and text.startswith(words))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("mug", "Mug"),
        ("mugs", "Mug"),
        ("backpack", "back_pack"),
        ("01.Back-Pack", "back_pack"),
        ("trash_can", None),
        ("7", None),
    ],
)
def test_a_folder_name_suggests_the_class_that_it_resembles(name: str, meant: str | None) -> None:
    assert similar(name, CLASSES) == meant


def test_folders_that_match_in_part_are_named() -> None:
    paths = [f"{name}/{i}.png" for name in ("bike", "pen", "mugs", "trash") for i in range(2)]
    text = about_folders(paths, CLASSES)
    assert text is not None
    assert text.startswith(
        "2 of 4 folders are named like source classes; did you mean Mug for mugs?"
    )
    assert "no source class is like trash" in text


def test_other_folder_names_are_no_finding() -> None:
    assert about_folders(["day/1.png", "night/2.png"], CLASSES) is None
    assert about_folders(["bike/1.png", "Mug/2.png"], CLASSES) is None
    assert about_folders(["1.png"], CLASSES) is None


def test_check_reports_all_of_it(tmp_path: Path) -> None:
    for i in range(8):
        write_noise(tmp_path / "source" / ("cat" if i < 5 else "dog") / f"{i}.png", i, side=32)
        for copy, name in enumerate(("cat", "cat", "dogs")):
            file = tmp_path / "target" / name / f"{i}-{copy}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.clip(noise(i).astype(int) + copy, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(file)
    report = check(tmp_path / "source", tmp_path / "target", CONFIG)
    warnings = texts(report, "warning")
    for words in (
        "24 images look like 8 distinct",
        "did you mean dog for dogs?",
        "24 images are too few",
    ):
        assert any(words in text for text in warnings), words
    assert report.can_adapt
