"""Fixtures for the tests of training."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import certvol
from certvol import api


@pytest.fixture(scope="module")
def files(
    folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("files")
    torch.manual_seed(0)
    backbone = certvol.nn.small_cnn.SmallCNN()
    save_file(backbone.state_dict(), root / "weights.safetensors")
    for name, folder in zip(("source", "target"), folders, strict=True):
        api.extract(
            folder,
            root / f"{name}.npz",
            model={"backbone": "small_cnn", "weights": str(root / "weights.safetensors")},
            data={"image_size": 8},
            training={"device": "cpu"},
        )
    return root / "source.npz", root / "target.npz"
