import inspect
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from certvol.data.domains import SourceImages, TargetImages, open_source, open_target
from certvol.errors import UserError
from certvol.settings import DataConfig
from support.images import write_noise


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    return DataConfig(cache_dir=str(tmp_path / "cache"), workers=2)


def contents(images: SourceImages | TargetImages) -> np.ndarray:
    return np.array(images.pixels[images.rows])


def test_the_source_is_ordered_by_class_then_content(tmp_path: Path, config: DataConfig) -> None:
    for i in range(12):
        write_noise(tmp_path / "s" / ("dog" if i % 3 else "cat") / f"{i}.png", i)
    source = open_source(tmp_path / "s", 8, config, None)
    assert source.classes == ["cat", "dog"]
    assert source.labels.tolist() == [0] * 4 + [1] * 8
    assert len(source) == 12
    for i, path in enumerate(source.paths):
        assert path.split("/")[0] == source.classes[source.labels[i]]
        assert np.array_equal(contents(source)[i], np.asarray(Image.open(tmp_path / "s" / path)))
    assert source.paths != sorted(source.paths)


def test_names_of_files_do_not_matter_to_the_source(tmp_path: Path, config: DataConfig) -> None:
    order = np.random.default_rng(3).permutation(12)
    for i in range(12):
        name = "cat" if i % 2 else "dog"
        write_noise(tmp_path / "s1" / name / f"{i:02d}.png", i)
        write_noise(tmp_path / "s2" / name / ("deeper" if i % 3 else "") / f"{order[i]:02d}.PNG", i)
        write_noise(tmp_path / "s3" / "images" / name / f"{order[i]:02d}.png", i)
    first, *others = (open_source(tmp_path / f"s{k}", 8, config, None) for k in (1, 2, 3))
    for other in others:
        assert np.array_equal(contents(first), contents(other))
        assert first.labels.tolist() == other.labels.tolist()
        assert first.classes == other.classes


def test_flat_nested_class_and_shuffled_targets_have_the_same_order(
    tmp_path: Path, config: DataConfig
) -> None:
    order = np.random.default_rng(4).permutation(20)
    for i in range(20):
        write_noise(tmp_path / "flat" / f"{order[i]}.png", i)
        write_noise(tmp_path / "classes" / f"c{i % 4}" / f"{i}.png", i)
        write_noise(tmp_path / "shuffled" / f"c{order[i] % 4}" / f"{order[-i]}_{i}.png", i)
        write_noise(tmp_path / "nested" / "images" / f"{order[i] % 7}" / "deep" / f"{i}.png", i)
    first, *others = (
        open_target(tmp_path / name, 8, config, None)
        for name in ("flat", "classes", "shuffled", "nested")
    )
    for other in others:
        assert np.array_equal(contents(first), contents(other))


def test_the_target_has_no_labels() -> None:
    assert set(inspect.signature(TargetImages).parameters) == {
        "pixels",
        "rows",
        "paths",
        "failures",
        "fingerprint",
        "hashes",
    }


def test_identical_files_are_kept(tmp_path: Path, config: DataConfig) -> None:
    for name in ("a/1.png", "a/2.png", "b/1.png", "b/3.png"):
        write_noise(tmp_path / "s" / name, 0 if name != "b/3.png" else 1)
    source = open_source(tmp_path / "s", 8, config, None)
    assert source.labels.tolist() == [0, 0, 1, 1]
    assert sorted(source.paths) == ["a/1.png", "a/2.png", "b/1.png", "b/3.png"]
    assert len(open_target(tmp_path / "s", 8, config, None)) == 4


def test_bad_files_are_left_out_and_listed(tmp_path: Path, config: DataConfig) -> None:
    for i in range(6):
        write_noise(tmp_path / "s" / "ab"[i % 2] / f"{i}.png", i)
    (tmp_path / "s/a/zero.jpg").write_bytes(b"")
    (tmp_path / "s/a/gone.jpg").symlink_to("nowhere")
    write_noise(tmp_path / "s" / "stray.png", 99)
    source = open_source(tmp_path / "s", 8, config, None)
    assert len(source) == 6
    assert source.failures == [
        ("a/gone.jpg", "a broken link: its target does not exist"),
        ("a/zero.jpg", "empty file (0 bytes)"),
        ("stray.png", "lies in no class folder"),
    ]
    target = open_target(tmp_path / "s", 8, config, None)
    assert len(target) == 7
    assert [path for path, _ in target.failures] == ["a/gone.jpg", "a/zero.jpg"]


def test_a_class_without_readable_images_is_dropped(tmp_path: Path, config: DataConfig) -> None:
    for i in range(4):
        write_noise(tmp_path / "s" / "ac"[i % 2] / f"{i}.png", i)
    (tmp_path / "s/b").mkdir()
    (tmp_path / "s/b/bad.png").write_bytes(b"bad")
    with pytest.warns(UserWarning, match="classes without a readable image in .* are left out: b"):
        source = open_source(tmp_path / "s", 8, config, None)
    assert source.classes == ["a", "c"]
    assert source.labels.tolist() == [0, 0, 1, 1]


def test_a_class_with_one_image_is_a_warning(tmp_path: Path, config: DataConfig) -> None:
    for i, name in enumerate(("a", "a", "b")):
        write_noise(tmp_path / "s" / name / f"{i}.png", i)
    with pytest.warns(UserWarning, match="classes with only one image in .*: b"):
        assert len(open_source(tmp_path / "s", 8, config, None)) == 3


@pytest.mark.filterwarnings("ignore:classes without")
def test_fewer_than_two_readable_classes_are_refused(tmp_path: Path, config: DataConfig) -> None:
    write_noise(tmp_path / "s/a/1.png", 1)
    write_noise(tmp_path / "s/a/2.png", 2)
    (tmp_path / "s/b").mkdir()
    (tmp_path / "s/b/bad.png").write_bytes(b"bad")
    with pytest.raises(UserError, match="only 1 of the 2 classes"):
        open_source(tmp_path / "s", 8, config, None)


def test_a_folder_without_readable_images_is_refused(tmp_path: Path, config: DataConfig) -> None:
    for name in ("a/1.png", "b/2.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"text")
    for opening in (open_source, open_target):
        with pytest.raises(
            UserError,
            match=r"none of the 2 image files .* can be read \(such as a/1\.png: not an image",
        ):
            opening(tmp_path, 8, config, None)


def test_empty_and_missing_folders_are_refused(tmp_path: Path, config: DataConfig) -> None:
    (tmp_path / "empty").mkdir()
    for opening in (open_source, open_target):
        with pytest.raises(UserError, match="holds no images"):
            opening(tmp_path / "empty", 8, config, None)
        with pytest.raises(UserError, match="there is no folder"):
            opening(tmp_path / "missing", 8, config, None)


def test_a_flat_source_is_refused(tmp_path: Path, config: DataConfig) -> None:
    write_noise(tmp_path / "s/1.png", 1)
    with pytest.raises(UserError, match="no class folders"):
        open_source(tmp_path / "s", 8, config, None)


def test_images_outlive_an_emptied_cache(tmp_path: Path, config: DataConfig) -> None:
    for i in range(3):
        write_noise(tmp_path / "t" / f"{i}.png", i)
    target = open_target(tmp_path / "t", 8, config, None)
    before = contents(target)
    shutil.rmtree(tmp_path / "cache")
    assert np.array_equal(contents(target), before)


def test_a_relative_folder_stays_right_after_a_change_of_directory(
    tmp_path: Path, config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_noise(tmp_path / "t/1.png", 1)
    monkeypatch.chdir(tmp_path)
    target = open_target("t", 8, config, None)
    monkeypatch.chdir(os.sep)
    assert contents(target).shape == (1, 8, 8, 3)
