"""Every cell of a sheet has the right picture, and sheets keep to their budget."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from certvol.progress import Silent
from certvol.report.thumbnails import COLUMNS, PER_SHEET, make_thumbnails


def _save(
    root: Path, name: str, colour: tuple[int, int, int], size: tuple[int, int] = (40, 40)
) -> str:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(root / name)
    return name


def _cell(sheets: list[bytes], cell: int, number: int) -> np.ndarray:
    with Image.open(io.BytesIO(sheets[number // PER_SHEET])) as sheet:
        pixels = np.asarray(sheet.convert("RGB")).astype(int)
    row, column = divmod(number % PER_SHEET, COLUMNS)
    return pixels[row * cell : (row + 1) * cell, column * cell : (column + 1) * cell]


def test_every_image_is_in_its_cell(tmp_path: Path) -> None:
    colours = [(5 * (i % 50), 255 - 5 * (i % 50), 20 * (i % 11)) for i in range(PER_SHEET + 5)]
    paths = [_save(tmp_path, f"{i}.png", colour) for i, colour in enumerate(colours)]
    made = make_thumbnails(tmp_path, paths, 100, 10_000_000, Silent())
    assert made.cell == 40  # no larger than the images are
    assert len(made.sheets) == 2
    assert made.missing == 0
    for number in (0, 1, COLUMNS, PER_SHEET - 1, PER_SHEET, PER_SHEET + 4):
        middle = _cell(made.sheets, made.cell, number)[10:30, 10:30].mean(axis=(0, 1))
        np.testing.assert_allclose(middle, colours[number], atol=14)


def test_the_true_shape_is_kept(tmp_path: Path) -> None:
    paths = [
        _save(tmp_path, "wide.png", (1, 2, 3), (90, 30)),
        _save(tmp_path, "high.png", (1, 2, 3), (30, 60)),
    ]
    upright = Image.new("RGB", (80, 40))
    exif = upright.getexif()
    exif[0x0112] = 6  # lies on its side
    upright.save(tmp_path / "turned.jpg", exif=exif)
    _save(tmp_path, "thin.png", (1, 2, 3), (1, 90))
    made = make_thumbnails(tmp_path, [*paths, "turned.jpg", "thin.png"], 100, 1_000_000, Silent())
    assert made.shapes == [300, 50, 50, 25]


def test_tiny_images_keep_every_pixel(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (20, 8, 8, 3), dtype=np.uint8)
    for i, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f"{i}.png")
    made = make_thumbnails(tmp_path, [f"{i}.png" for i in range(20)], 100, 1_000_000, Silent())
    assert made.cell == 8
    for i in range(20):
        np.testing.assert_array_equal(_cell(made.sheets, 8, i), pixels[i])


def test_a_missing_broken_or_outside_image_has_no_shape(tmp_path: Path) -> None:
    inside = tmp_path / "in"
    good = _save(inside, "good.png", (1, 2, 3))
    _save(tmp_path, "secret.png", (9, 9, 9))
    (inside / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n nothing")
    paths = [
        good,
        "gone.png",
        "broken.png",
        "../secret.png",
        str(tmp_path / "secret.png"),
        "a/../../secret.png",
        "nul\0.png",
    ]
    made = make_thumbnails(inside, paths, 100, 1_000_000, Silent())
    assert made.shapes == [100, 0, 0, 0, 0, 0, 0]
    assert made.missing == 6


@pytest.mark.slow
@pytest.mark.parametrize("budget", [400_000, 60_000, 9_000])
def test_noise_never_takes_more_than_the_budget(tmp_path: Path, budget: int) -> None:
    rng = np.random.default_rng(0)
    for i in range(4):
        Image.fromarray(rng.integers(0, 256, (96, 96, 3), dtype=np.uint8)).save(
            tmp_path / f"{i}.png"
        )
    made = make_thumbnails(
        tmp_path, [f"{i % 4}.png" for i in range(2 * PER_SHEET)], 100, budget, Silent()
    )
    assert sum(map(len, made.encoded())) <= budget
    assert len(made.sheets) == 2
