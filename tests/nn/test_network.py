"""The network on a frozen backbone."""

from typing import Any

import pytest
import torch

from certvol.nn.backbones import features_dim
from certvol.nn.heads import ResidualLayer
from certvol.nn.network import ADAPTER_WIDTH, Network, seeded_backbone
from certvol.settings import ModelConfig


def make(**settings: Any) -> Network:
    config = ModelConfig(**{"backbone": "small_cnn", "train": "head", **settings})
    return Network(*seeded_backbone(config, 16, 0), 3, config)


def test_a_residual_layer_starts_as_the_identity_and_can_learn() -> None:
    layer = ResidualLayer(5, 4)
    x = torch.randn(6, 5)
    assert torch.equal(layer(x), x)
    layer(x).square().sum().backward()
    assert layer.up.weight.grad is not None
    assert layer.up.weight.grad.abs().max() > 0


def test_features_skip_a_frozen_backbone() -> None:
    network = make().eval()
    images = torch.randn(4, 3, 16, 16)
    features = network.features(images)
    assert torch.equal(network.features(network.backbone(images)), features)


@pytest.mark.parametrize(
    ("settings", "layers", "adapter"),
    [
        ({}, 1, True),
        ({"adapter": False}, 1, False),
        ({"classifier_layers": 2}, 2, False),
        ({"classifier_layers": 2, "adapter": True}, 2, True),
        ({"train": "all"}, 2, False),
        ({"train": "all", "classifier_layers": 1, "adapter": True}, 1, False),
    ],
)
def test_the_parts_behind_the_backbone_follow_from_the_settings(
    settings: dict[str, object], layers: int, adapter: bool
) -> None:
    network = make(**settings)
    assert (network.classifier.hidden is None) == (layers == 1)
    assert (network.adapter is not None) == adapter
    frozen = settings.get("train", "head") == "head"
    assert network.small_width == (
        min(network.info.dim, ADAPTER_WIDTH) if frozen and layers == 1 else None
    )


def test_a_frozen_backbone_keeps_the_statistics_of_its_weights() -> None:
    network = make(norm="per_domain").train()
    assert network.domains.mode == "frozen"
    assert not network.has_batch_norm
    before = {name: value.clone() for name, value in network.backbone.state_dict().items()}
    network.features(torch.randn(4, 3, 16, 16))
    assert all(
        torch.equal(value, before[name]) for name, value in network.backbone.state_dict().items()
    )


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("features-7", 7),
        ("features-", None),
        ("features-0", None),
        ("features-x", None),
        ("7", None),
    ],
)
def test_the_name_of_extracted_features_holds_their_dimension(name: str, dim: int | None) -> None:
    assert features_dim(name) == dim
