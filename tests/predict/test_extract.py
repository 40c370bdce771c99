"""Extracted features: several views of each image, the same in any folder layout."""

import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from certvol import api
from certvol.api import resolve_settings
from certvol.data.augment import cache_size, centre_view
from certvol.data.cache import open_features
from certvol.data.domains import SourceImages, TargetImages, open_source, open_target
from certvol.data.feature_files import write_features
from certvol.errors import UserError
from certvol.nn.backbones import create_backbone
from certvol.predict import extract as extraction
from certvol.predict.extract import extract_features
from certvol.runs.outputs import check_output
from certvol.settings import AugmentConfig, DataConfig
from support.images import write_domain

CPU = torch.device("cpu")


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    return DataConfig(cache_dir=str(tmp_path / "cache"))


def backbone() -> torch.nn.Module:
    torch.manual_seed(0)
    return create_backbone("small_cnn", None, 8)[0]


INFO = create_backbone("small_cnn", None, 8)[1]
SIZE = cache_size(8)


def extracted(
    module: torch.nn.Module,
    images: SourceImages | TargetImages,
    data: DataConfig,
    views: int,
    augment: AugmentConfig | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    config = replace(
        resolve_settings(), data=replace(data, views=views), augment=augment or AugmentConfig()
    )
    return extract_features(module, INFO, images, config, CPU)


def test_the_first_view_is_the_test_view_and_the_others_differ(
    tmp_path: Path, data: DataConfig
) -> None:
    images = open_target(write_domain(tmp_path / "a"), SIZE, data)
    module = backbone()
    features, rows = extracted(module, images, data, 3)
    assert features.shape == (36, 3, INFO.dim)
    pixels = torch.from_numpy(images.pixels[images.rows])
    with torch.inference_mode():
        expected = module.eval()(centre_view(pixels, INFO))
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
    forward = mock.Mock(wraps=extraction._forward)
    monkeypatch.setattr(extraction, "_forward", forward)
    source, target, flat = (
        open_source(folder, SIZE, data),
        open_target(folder, SIZE, data),
        open_target(tmp_path / "flat", SIZE, data),
    )
    found = {}
    for name, images in (("source", source), ("target", target), ("flat", flat)):
        features, rows = extracted(module, images, data, 2)
        found[name] = {
            images.hashes[i].tobytes(): features[rows[i]].tobytes() for i in range(len(images))
        }
    assert found["source"] == found["target"] == found["flat"]
    assert forward.call_count == 2  # two views of one chunk, once


def test_features_depend_on_weights_views_and_augmentation(
    tmp_path: Path, data: DataConfig
) -> None:
    images = open_target(write_domain(tmp_path / "a", per_class=2), SIZE, data)
    module, augment = backbone(), AugmentConfig()
    plain = np.array(extracted(module, images, data, 2)[0])
    jittered = extracted(module, images, data, 2, replace(augment, jitter=0.9))[0]
    assert np.array_equal(plain[:, 0], jittered[:, 0])
    assert not np.array_equal(plain[:, 1], jittered[:, 1])
    assert extracted(module, images, data, 2, replace(augment, enabled=False))[0].shape[1] == 1
    with torch.no_grad():
        next(module.parameters()).add_(0.5)
    assert not np.array_equal(plain, extracted(module, images, data, 2)[0])


def test_another_version_of_the_decoder_extracts_again(
    tmp_path: Path, data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = open_target(write_domain(tmp_path / "a"), SIZE, data)
    module = backbone()
    opened = mock.Mock(wraps=open_features)
    monkeypatch.setattr(extraction, "open_features", opened)
    for version in (1, 1, 2):
        monkeypatch.setattr(extraction, "DECODER_VERSION", version)
        extracted(module, images, data, 1)
    keys = [call.args[0] for call in opened.call_args_list]
    assert keys[0] == keys[1] != keys[2]


def test_an_extraction_does_not_change_the_module(tmp_path: Path, data: DataConfig) -> None:
    images = open_target(write_domain(tmp_path / "a", per_class=2), SIZE, data)
    module = backbone().train()
    before = extraction.weights_digest(module)
    extracted(module, images, data, 2)
    assert module.training
    assert extraction.weights_digest(module) == before


def _nothing_may_be_read(*args: object) -> None:
    raise AssertionError("the images were opened before the arguments were checked")


@pytest.mark.parametrize("size", [0, -3, 7])
def test_an_invalid_image_size_is_refused_at_once(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extraction, "seeded_backbone", _nothing_may_be_read)
    folder = write_domain(tmp_path / "a")
    with pytest.raises(UserError, match=f"`data.image_size` should be 8 or more, found {size}"):
        api.extract(folder, tmp_path / "f.npz", data={"image_size": size})


def test_a_place_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extraction, "seeded_backbone", _nothing_may_be_read)
    folder = write_domain(tmp_path / "a")
    (tmp_path / "file").touch()
    (tmp_path / "folder.npz").mkdir()
    before = sorted(tmp_path.rglob("*"))
    places = {
        "file/f.npz": "not a directory",
        "file/deeper/f.npz": "not a directory",
        "folder.npz": "is a folder",
        "/proc/none/f.npz": "no such file",
        "x" * 252 + ".npz": "file name too long",
        "f.csv": "written as .npz",
    }
    for place, reason in places.items():
        with pytest.raises(UserError, match=reason):
            api.extract(folder, tmp_path / place, model={"backbone": "small_cnn"})
    assert sorted(tmp_path.rglob("*")) == before


def test_the_folder_of_the_output_is_made_when_it_is_written(
    tmp_path: Path, data: DataConfig
) -> None:
    place = tmp_path / "new" / "deeper" / "f.npz"
    check_output(place)
    assert not (tmp_path / "new").exists()
    write_features(place, np.ones((2, 3), np.float32), ["a", "b"], None, "")
    check_output(place, replaces_features=True)
    assert place.exists()
