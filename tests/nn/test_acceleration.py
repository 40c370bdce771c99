"""Precision by device, network and processor; the faster layout computes the same."""

import pytest
import torch

from certvol import device
from certvol.nn import acceleration
from certvol.nn.network import Network, seeded_backbone
from certvol.settings import ModelConfig, TrainingConfig

CPU = torch.device("cpu")


def make(image_size: int = 64, train: str = "all") -> Network:
    config = ModelConfig(backbone="small_cnn", train=train)  # type: ignore[arg-type]
    backbone, info = seeded_backbone(config, image_size, 0)
    return Network(backbone, info, 3, config)


@pytest.mark.parametrize(
    ("precision", "image_size", "train", "in_hardware", "expected"),
    [
        ("auto", 64, "all", True, True),
        ("auto", 64, "last_block", True, True),
        ("auto", 64, "all", False, False),
        ("auto", 63, "all", True, False),
        ("auto", 64, "head", True, False),
        ("fp32", 64, "all", True, False),
        ("bf16", 16, "head", False, True),
    ],
)
def test_precision_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    image_size: int,
    train: str,
    in_hardware: bool,
    expected: bool,
) -> None:
    monkeypatch.setattr(device, "cpu_has_bf16", lambda: in_hardware)
    settings = TrainingConfig(precision=precision)  # type: ignore[arg-type]
    assert acceleration.uses_bf16(settings, make(image_size, train), CPU) is expected


def test_bf16_support_of_a_processor_is_checked_by_instruction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False, raising=False)
    assert not device.cpu_has_bf16()
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    assert device.cpu_has_bf16()
    monkeypatch.delattr(torch.cpu, "_is_avx512_bf16_supported")  # an older torch
    assert device.cpu_has_bf16()


def test_the_layout_changes_nothing_but_the_order_of_sums() -> None:
    network, images = make(32).eval(), torch.randn(4, 3, 32, 32)
    assert all(
        weight.is_contiguous(memory_format=torch.channels_last)
        for weight in network.backbone.parameters()
        if weight.ndim == 4
    )
    found = network.features(images)
    usual = network.backbone.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    torch.testing.assert_close(found, usual(images.contiguous()), rtol=1e-4, atol=1e-5)
