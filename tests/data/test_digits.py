import errno
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from certvol.data import digits
from certvol.data.digits import (
    block_counts,
    draw_digits,
    draw_domain,
    write_digit_domains,
    write_digits,
)
from certvol.data.folders import labels_of, scan
from certvol.errors import UserError


def read(root: Path) -> dict[str, np.ndarray]:
    return {path: np.asarray(Image.open(root / path)) for path in scan(root).paths}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_digits(tmp_path_factory.mktemp("digits"), seed=0, per_class=12)


def test_both_domains_are_ordinary_image_folders(written: tuple[Path, Path]) -> None:
    source, target = written
    assert (source.name, target.name) == ("source", "target")
    for root, count in ((source, 120), (target, 1797)):
        listing = scan(root)
        classes, labels = labels_of(listing)
        assert classes == [str(digit) for digit in range(10)]
        assert len(labels) == count
        assert listing.problems == []
    assert np.bincount(labels_of(scan(source))[1]).tolist() == [12] * 10


def test_images_are_8_by_8_grey_in_steps_of_a_sixteenth(written: tuple[Path, Path]) -> None:
    steps = set(np.rint(np.arange(17) * 255 / 16).astype(int))
    for root in written:
        images = np.stack(list(read(root).values()))
        assert images.shape[1:] == (8, 8)
        assert images.dtype == np.uint8
        assert set(np.unique(images)) <= steps
        assert {0, 255} <= set(np.unique(images))


def test_the_target_is_the_real_data(written: tuple[Path, Path]) -> None:
    from sklearn.datasets import load_digits

    data = load_digits()
    images = read(written[1])
    of_class = {digit: iter(np.flatnonzero(data.target == digit)) for digit in range(10)}
    for path, image in images.items():
        real = data.images[next(of_class[int(path[0])])]
        assert np.array_equal(image, np.rint(real * 255 / 16))


def test_block_counts_count_the_set_pixels() -> None:
    bitmap = np.zeros((32, 32), dtype=np.bool_)
    bitmap[0:4, 0:4] = True
    bitmap[31, 28:30] = True
    expected = np.zeros((8, 8), dtype=np.uint8)
    expected[0, 0], expected[7, 7] = 16, 2
    assert np.array_equal(block_counts(bitmap), expected)


def test_the_seed_decides_the_drawn_digits() -> None:
    first, again, other = (draw_digits(np.random.default_rng(seed), 3) for seed in (0, 0, 1))
    assert all(
        a[0] == b[0] and np.array_equal(a[1], b[1]) for a, b in zip(first, again, strict=True)
    )
    assert not all(np.array_equal(a[1], b[1]) for a, b in zip(first, other, strict=True))


def test_every_font_draws_ten_different_digits_that_fill_the_frame() -> None:
    fonts = digits.load_fonts()
    assert len(fonts) == len(digits.THIN_FONTS) + len(digits.BOLD_FONTS) >= 15
    for font in fonts:
        drawn = {bytes(font.getmask(str(digit))) for digit in range(10)}
        assert len(drawn) == 10
    for _, image in draw_digits(np.random.default_rng(5), 20):
        assert 40 < image.sum() < 800  # of 1024: neither empty nor a blot
        assert image[:2].any()
        assert image[-2:].any()


def test_drawn_digits_can_be_told_apart() -> None:
    drawn = draw_digits(np.random.default_rng(7), 60)
    labels = np.array([digit for digit, _ in drawn])
    values = np.array([image.ravel() for _, image in drawn], dtype=float)
    half = np.arange(len(labels)) % 2 == 0
    means = np.stack([values[half & (labels == digit)].mean(axis=0) for digit in range(10)])
    nearest = ((values[~half, None] - means) ** 2).sum(axis=2).argmin(axis=1)
    assert (nearest == labels[~half]).mean() > 0.75


def test_a_complete_folder_is_kept_and_a_damaged_one_written_again(tmp_path: Path) -> None:
    source, target = write_digits(tmp_path, seed=0, per_class=2)
    before = read(source)
    times = {path: (source / path).stat().st_mtime_ns for path in before}
    write_digits(tmp_path, seed=0, per_class=2)
    assert {path: (source / path).stat().st_mtime_ns for path in before} == times
    (source / "3/0001.png").unlink()
    (target / "5/0000.png").write_bytes(b"")
    write_digits(tmp_path, seed=0, per_class=2)
    after = read(source)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[path], after[path]) for path in before)
    assert len(read(target)) == 1797


def test_another_seed_or_number_is_written_again(tmp_path: Path) -> None:
    first = read(write_digits(tmp_path, seed=0, per_class=2)[0])
    second = read(write_digits(tmp_path, seed=1, per_class=2)[0])
    assert not all(np.array_equal(first[path], second[path]) for path in first)
    assert len(read(write_digits(tmp_path, seed=1, per_class=3)[0])) == 30


def test_an_interrupted_folder_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Image.Image.save, [0]

    def die(self: Image.Image, path: Path) -> None:
        calls[0] += 1
        if calls[0] == 10:
            raise KeyboardInterrupt
        real(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "save", die)
        with pytest.raises(KeyboardInterrupt):
            write_digits(tmp_path, per_class=2)
    assert list(tmp_path.iterdir()) == []
    assert len(read(write_digits(tmp_path, per_class=2)[0])) == 20


def test_an_error_of_the_disk_names_the_folder_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Image.Image, path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")  # Pillow does not name the file

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_digits(tmp_path / "digits", seed=0, per_class=1)
    assert str(caught.value.filename).startswith(str(tmp_path))
    assert not list((tmp_path / "digits").iterdir())


def test_a_folder_of_the_user_is_not_replaced(tmp_path: Path) -> None:
    mine = tmp_path / "target" / "thesis.txt"
    mine.parent.mkdir()
    mine.write_text("three years")
    with pytest.raises(UserError, match=r"target.*not a folder of digits.*move it away"):
        write_digits(tmp_path, per_class=1)
    assert mine.read_text() == "three years"
    assert [path.name for path in tmp_path.iterdir()] == ["target"]

    (tmp_path / "target" / "digits.json").write_text('{"my own": "file"}')
    with pytest.raises(UserError, match="move it away"):
        digits.check_replaceable(tmp_path / "target")
    assert mine.exists()


def test_files_added_to_a_folder_of_digits_stay(tmp_path: Path) -> None:
    source, _ = write_digits(tmp_path, per_class=1)
    (source / "notes").mkdir()
    (source / "notes" / "a.txt").write_text("mine")
    write_digits(tmp_path, per_class=1)
    with pytest.raises(UserError, match="source"):
        write_digits(tmp_path, per_class=2)
    assert (source / "notes" / "a.txt").read_text() == "mine"


def test_an_empty_folder_and_one_of_certvol_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    source, _ = write_digits(tmp_path, per_class=1)
    assert len(scan(source).paths) == 10
    write_digits(tmp_path, per_class=2)
    assert len(scan(source).paths) == 20
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


@pytest.mark.parametrize("name", ["thin", "lit"])
def test_a_domain_is_the_same_every_time_and_written_once(name: str, tmp_path: Path) -> None:
    (first,) = write_digit_domains(tmp_path / "a", [name])
    images = {path.relative_to(first): path.read_bytes() for path in first.rglob("*.png")}
    assert len(images) == (1000 if name == "thin" else 1797)
    assert {path.parts[0] for path in images} == set("0123456789")
    assert Image.open(first / "3" / "0000.png").size == (8, 8)
    stamp = (first / "3" / "0000.png").stat().st_mtime_ns
    assert write_digit_domains(tmp_path / "a", [name]) == [first]
    assert (first / "3" / "0000.png").stat().st_mtime_ns == stamp
    (first / "3" / "0001.png").unlink()
    (second,) = write_digit_domains(tmp_path / "a", [name])
    assert {path.relative_to(second): path.read_bytes() for path in second.rglob("*.png")} == images


def test_pens_differ_as_their_names_say() -> None:
    ink = {
        name: np.mean([picture for _, picture in draw_domain(name, per_class=5)])
        for name in ("thin", "fonts", "bold")
    }
    assert ink["thin"] < 0.8 * ink["fonts"]
    assert ink["bold"] > 1.2 * ink["fonts"]


@pytest.mark.parametrize("name", [name for name in digits.CHANGES if name != "real"])
def test_changed_handwriting_keeps_its_labels_and_range(name: str) -> None:
    plain, changed = draw_domain("real"), draw_domain(name)
    assert [digit for digit, _ in plain] == [digit for digit, _ in changed]
    values = np.stack([picture for _, picture in changed])
    assert values.min() >= 0
    assert values.max() <= 16
    assert np.abs(values - np.stack([picture for _, picture in plain])).mean() > 0.5
