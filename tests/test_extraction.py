"""Features of several views of each image, whatever folders the images lie in."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from certvol import extraction
from certvol.config import AugmentConfig, DataConfig
from certvol.data.augment import cache_size, test_view
from certvol.data.domains import open_source, open_target
from certvol.data.feature_files import check_place, write_features
from certvol.errors import UserError
from certvol.extraction import extract_features
from certvol.nn.backbones import create_backbone
from images import write_domain

CPU = torch.device("cpu")


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    return DataConfig(cache_dir=str(tmp_path / "cache"))


def backbone() -> torch.nn.Module:
    torch.manual_seed(0)
    return create_backbone("small_cnn", None, 8)[0]


INFO = create_backbone("small_cnn", None, 8)[1]
SIZE = cache_size(8)


def test_the_first_view_is_the_test_view_and_the_others_differ(tmp_path: Path, data: DataConfig) -> None:
    images = open_target(write_domain(tmp_path / "a"), SIZE, data)
    module = backbone()
    features, rows = extract_features(module, INFO, images, 3, AugmentConfig(), data, CPU)
    assert features.shape == (36, 3, INFO.dim)
    pixels = torch.from_numpy(images.pixels[images.rows])
    with torch.inference_mode():
        expected = module.eval()(test_view(pixels, 8, INFO.mean, INFO.std))
    assert torch.allclose(torch.from_numpy(features[rows, 0]), expected, atol=1e-5)
    assert (np.abs(features[:, 1] - features[:, 0]).max(axis=1) > 1e-4).mean() > 0.9
    assert (np.abs(features[:, 2] - features[:, 1]).max(axis=1) > 1e-4).mean() > 0.9


def test_source_and_target_of_any_layout_share_one_extraction(
    tmp_path: Path, data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_domain(tmp_path / "a")
    (tmp_path / "flat").mkdir()
    for number, file in enumerate(sorted(folder.rglob("*.png"), reverse=True)):
        shutil.copy(file, tmp_path / "flat" / f"{number}.png")
    module = backbone()
    forward, calls = extraction._forward, []
    monkeypatch.setattr(extraction, "_forward", lambda *a: (calls.append(1), forward(*a))[1])
    source, target, flat = (
        open_source(folder, SIZE, data),
        open_target(folder, SIZE, data),
        open_target(tmp_path / "flat", SIZE, data),
    )
    found = {}
    for name, images in (("source", source), ("target", target), ("flat", flat)):
        features, rows = extract_features(module, INFO, images, 2, AugmentConfig(), data, CPU)
        found[name] = {images.hashes[i].tobytes(): features[rows[i]].tobytes() for i in range(len(images))}
    assert found["source"] == found["target"] == found["flat"]
    assert len(calls) == 2  # two views of one chunk, once


def test_other_weights_views_or_augmentation_are_other_features(tmp_path: Path, data: DataConfig) -> None:
    images = open_target(write_domain(tmp_path / "a", per_class=2), SIZE, data)
    module, augment = backbone(), AugmentConfig()
    plain = np.array(extract_features(module, INFO, images, 2, augment, data, CPU)[0])
    jittered = extract_features(module, INFO, images, 2, replace(augment, jitter=0.9), data, CPU)[0]
    assert np.array_equal(plain[:, 0], jittered[:, 0])
    assert not np.array_equal(plain[:, 1], jittered[:, 1])
    assert extract_features(module, INFO, images, 2, replace(augment, enabled=False), data, CPU)[0].shape[1] == 1
    with torch.no_grad():
        next(module.parameters()).add_(0.5)
    assert not np.array_equal(plain, extract_features(module, INFO, images, 2, augment, data, CPU)[0])


def test_features_of_another_decoder_are_others(
    tmp_path: Path, data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = open_target(write_domain(tmp_path / "a"), SIZE, data)
    module = backbone()
    keys: list[str] = []
    honest = extraction.open_features
    monkeypatch.setattr(extraction, "open_features", lambda key, *rest: (keys.append(key), honest(key, *rest))[1])
    for version in (1, 1, 2):
        monkeypatch.setattr(extraction, "DECODER_VERSION", version)
        extract_features(module, INFO, images, 1, AugmentConfig(), data, CPU)
    assert keys[0] == keys[1] != keys[2]


def test_an_extraction_leaves_the_module_as_it_was(tmp_path: Path, data: DataConfig) -> None:
    images = open_target(write_domain(tmp_path / "a", per_class=2), SIZE, data)
    module = backbone().train()
    before = extraction.weights_digest(module)
    extract_features(module, INFO, images, 2, AugmentConfig(), data, CPU)
    assert module.training
    assert extraction.weights_digest(module) == before


def _nothing_may_be_read(*args: object) -> None:
    raise AssertionError("the images were opened before the arguments were checked")


@pytest.mark.parametrize("size", [0, -3, 7])
def test_an_image_size_of_no_use_is_refused_at_once(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "seeded_backbone", _nothing_may_be_read)
    folder = write_domain(tmp_path / "a")
    with pytest.raises(UserError, match=f"image size should be 8 pixels or more, found {size}"):
        extraction.extract(folder, tmp_path / "f.npz", "small_cnn", image_size=size)


def test_a_place_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extraction, "seeded_backbone", _nothing_may_be_read)
    folder = write_domain(tmp_path / "a")
    (tmp_path / "file").touch()
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "away").symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.rglob("*"))
    places = {
        "file/f.npz": "not a directory",
        "file/deeper/f.npz": "not a directory",
        "folder.npz": "it is a folder",
        "away/f.npz": "no such file",
        "/proc/none/f.npz": "no such file",
        "x" * 251 + ".npz": "file name too long",
        "f.csv": "written as a .npz file",
    }
    for place, reason in places.items():
        with pytest.raises(UserError, match=reason):
            extraction.extract(folder, tmp_path / place, "small_cnn")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_new_folder_for_the_features_is_made_when_they_are_written(tmp_path: Path, data: DataConfig) -> None:
    place = tmp_path / "new" / "deeper" / "f.npz"
    check_place(place)
    assert not (tmp_path / "new").exists()
    write_features(place, np.ones((2, 3), np.float32), ["a", "b"], None, "")
    check_place(place)
    assert place.exists()
