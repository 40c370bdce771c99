import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from certvol.errors import UserError
from certvol.nn import weights
from certvol.nn.backbones import BackboneInfo, create_backbone, describe, last_block, list_backbones
from certvol.nn.small_cnn import SmallCNN
from certvol.nn.torchvision_repair import import_timm


@pytest.fixture
def resnet() -> nn.Module:
    """A ResNet with its classifier, as weights are published."""
    module: nn.Module = import_timm().create_model("resnet18")
    return module


@pytest.fixture
def empty_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import_timm()
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return tmp_path / "hub"


def contiguous(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make tensors contiguous, as safetensors requires."""
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def test_small_cnn_needs_no_timm() -> None:
    code = (
        "import sys, torch; from certvol.nn.backbones import create_backbone\n"
        "module, info = create_backbone('small_cnn', None, None)\n"
        "assert module(torch.zeros(2, 3, 32, 32)).shape == (2, info.dim)\n"
        "assert 'timm' not in sys.modules and 'torchvision' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("size", [8, 16, 28, 32, 48])
def test_small_cnn_takes_tiny_images_of_any_size(size: int) -> None:
    module, info = create_backbone("small_cnn", None, size)
    assert info == BackboneInfo("small_cnn", 128, size, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert module(torch.rand(4, 3, size, size)).shape == (4, 128)
    assert describe("small_cnn", None).image_size == 32


def test_small_cnn_is_normalised_by_batch_norm_throughout() -> None:
    kinds = [type(m) for m in SmallCNN().modules()]
    assert kinds.count(nn.Conv2d) == kinds.count(nn.BatchNorm2d) == 4


def test_small_cnn_starts_from_the_seed() -> None:
    torch.manual_seed(5)
    first = create_backbone("small_cnn", "none", None)[0].state_dict()
    torch.manual_seed(5)
    second = create_backbone("small_cnn", None, None)[0].state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("name", "dim", "size", "mean"),
    [
        ("resnet18", 512, 224, 0.485),
        ("resnet50.tv_in1k", 2048, 224, 0.485),
        ("inception_v3", 2048, 299, 0.5),
        ("vit_tiny_patch16_224", 192, 224, 0.5),
        ("mobilenetv3_small_100", 1024, 224, 0.485),  # its num_features says 576
    ],
)
def test_timm_backbones_are_described_by_their_config(
    name: str, dim: int, size: int, mean: float
) -> None:
    info = describe(name, None)
    assert (info.name, info.dim, info.image_size, info.mean[0]) == (name, dim, size, mean)
    assert len(info.mean) == len(info.std) == 3


def test_describing_takes_no_random_numbers() -> None:
    torch.manual_seed(3)
    describe("resnet10t", 64)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))


@pytest.mark.parametrize(
    ("name", "size"),
    [("resnet18", 64), ("inception_v3", 224), ("vit_tiny_patch16_224", 64), ("convnext_atto", 64)],
)
def test_timm_backbones_give_pooled_features_at_the_requested_size(name: str, size: int) -> None:
    module, info = create_backbone(name, "none", size)
    assert info.image_size == size
    assert module.eval()(torch.zeros(1, 3, size, size)).shape == (1, info.dim)


@pytest.mark.parametrize(("name", "size"), [("inception_v3", 32), ("vit_tiny_patch16_224", 8)])
def test_an_image_size_that_a_backbone_cannot_take_is_an_error(name: str, size: int) -> None:
    with pytest.raises(UserError, match=f"does not take images of {size} pixels"):
        create_backbone(name, "none", size)


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("resnet500", "resnet50"),
        ("resnet50.tv_in2k", "resnet50.tv_in1k"),
        ("smal_cnn", "small_cnn"),
        ("vit_tny_patch16_224", "vit_tiny"),
    ],
)
def test_an_unknown_name_gets_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(UserError, match=f"unknown backbone `{wrong}`.*{near}"):
        describe(wrong, None)


@pytest.mark.parametrize("wrong", ["", "/", "hf-hub:timm/resnet18", "zzzzzzzzzzzzz", "../../etc"])
def test_invalid_names_are_errors(wrong: str) -> None:
    with pytest.raises(UserError, match="unknown backbone"):
        create_backbone(wrong, "none", None)


def test_all_names_are_listed() -> None:
    names = list_backbones()
    assert names[0] == "small_cnn"
    assert {"resnet50", "resnet50.tv_in1k", "inception_v3"} < set(names)
    assert len(names) == len(set(names))


def test_a_published_file_is_loaded_without_its_classifier(
    tmp_path: Path, resnet: nn.Module
) -> None:
    save_file(
        {k: v.half() if v.is_floating_point() else v for k, v in resnet.state_dict().items()},
        tmp_path / "w.safetensors",
    )
    module, _ = create_backbone("resnet18", str(tmp_path / "w.safetensors"), None)
    own = module.state_dict()
    assert "fc.weight" not in own
    for name, tensor in own.items():
        expected = resnet.state_dict()[name]
        assert torch.equal(
            tensor, expected.half().float() if expected.is_floating_point() else expected
        )


def test_a_training_checkpoint_is_loaded(tmp_path: Path, resnet: nn.Module) -> None:
    wrapped = {"epoch": 1, "state_dict": {f"module.{k}": v for k, v in resnet.state_dict().items()}}
    torch.save(wrapped, tmp_path / "w.pth")
    module, _ = create_backbone("resnet18", str(tmp_path / "w.pth"), None)
    assert torch.equal(
        module.state_dict()["layer4.1.conv2.weight"], resnet.state_dict()["layer4.1.conv2.weight"]
    )


def test_small_cnn_loads_its_own_weights(tmp_path: Path) -> None:
    saved = SmallCNN()
    save_file(saved.state_dict(), tmp_path / "w.safetensors")
    module, _ = create_backbone("small_cnn", str(tmp_path / "w.safetensors"), None)
    assert all(torch.equal(v, saved.state_dict()[k]) for k, v in module.state_dict().items())


def test_weights_for_another_image_size_are_resampled(tmp_path: Path) -> None:
    made_for_224 = contiguous(create_backbone("vit_tiny_patch16_224", "none", None)[0].state_dict())
    save_file(made_for_224, tmp_path / "w.safetensors")
    module, _ = create_backbone("vit_tiny_patch16_224", str(tmp_path / "w.safetensors"), 64)
    own = module.state_dict()
    assert own["pos_embed"].shape != made_for_224["pos_embed"].shape
    assert torch.equal(own["blocks.3.mlp.fc1.weight"], made_for_224["blocks.3.mlp.fc1.weight"])


def test_auxiliary_classifier_of_inception_is_left_out(tmp_path: Path) -> None:
    module, _ = create_backbone("inception_v3", "none", None)
    file = {
        **contiguous(module.state_dict()),
        "AuxLogits.fc.weight": torch.ones(2, 2),
        "fc.weight": torch.ones(5, 2048),
        "fc.bias": torch.ones(5),
    }
    save_file(file, tmp_path / "w.safetensors")
    loaded, _ = create_backbone("inception_v3", str(tmp_path / "w.safetensors"), None)
    assert torch.equal(next(loaded.parameters()), next(module.parameters()))


def test_weights_of_another_backbone_are_refused(tmp_path: Path, resnet: nn.Module) -> None:
    save_file(resnet.state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(
        UserError, match=r"do not fit the backbone `convnext_atto` .*missing: .*unexpected: "
    ):
        create_backbone("convnext_atto", str(tmp_path / "w.safetensors"), None)


def test_one_missing_extra_or_misshaped_tensor_is_named(tmp_path: Path, resnet: nn.Module) -> None:
    tensors = resnet.state_dict()
    for key, replacement, words in (
        ("bn1.weight", None, "1 missing: bn1.weight"),
        ("layer9.conv", torch.ones(1), "1 unexpected: layer9.conv"),
        (
            "conv1.weight",
            torch.ones(64, 1, 7, 7),
            r"1 of another shape: conv1.weight \(found \[64, 1, 7, 7\], expected \[64, 3, 7, 7\]\)",
        ),
    ):
        changed = {k: v for k, v in tensors.items() if k != key} | (
            {key: replacement} if replacement is not None else {}
        )
        save_file(changed, tmp_path / "w.safetensors")
        with pytest.raises(UserError, match=words):
            create_backbone("resnet18", str(tmp_path / "w.safetensors"), None)


def out_of_reach() -> str:
    with pytest.raises(UserError) as raised:
        create_backbone("resnet18.a1_in1k", None, None)
    return str(raised.value)


def test_an_unreachable_hub_is_reported_with_what_to_do(
    empty_hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def refuse(*_: object, **__: object) -> None:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", refuse)
    message = out_of_reach()
    for words in (
        "resnet18.a1_in1k",
        "Name or service not known",
        "--weights FILE",
        "--weights none",
        "from scratch",
    ):
        assert words in message


def test_a_hub_that_never_answers_ends_at_the_deadline(
    empty_hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    released = threading.Event()
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *_, **__: released.wait(60))
    monkeypatch.setattr(weights, "HUB_DEADLINE_SECONDS", 0.2)
    message = out_of_reach()
    assert "no answer" in message
    assert not released.is_set()
    released.set()


def test_offline_mode_sends_no_request(
    empty_hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub import constants

    asked: list[object] = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(
        huggingface_hub, "get_hf_file_metadata", lambda *args, **_: asked.append(args)
    )
    message = out_of_reach()
    assert "HF_HUB_OFFLINE" in message
    assert not asked


def test_cached_hub_weights_are_used_without_a_connection(
    empty_hub_cache: Path, monkeypatch: pytest.MonkeyPatch, resnet: nn.Module
) -> None:
    import huggingface_hub

    repo = empty_hub_cache / "models--timm--resnet18.a1_in1k"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc")
    (repo / "snapshots" / "abc").mkdir(parents=True)
    save_file(resnet.state_dict(), repo / "snapshots" / "abc" / "model.safetensors")
    monkeypatch.setattr(
        huggingface_hub, "get_hf_file_metadata", lambda *_, **__: pytest.fail("asked the hub")
    )
    module, info = create_backbone("resnet18.a1_in1k", None, None)
    assert info.dim == 512
    assert all(torch.equal(v, resnet.state_dict()[k]) for k, v in module.state_dict().items())


def test_a_backbone_without_published_weights_is_an_error() -> None:
    timm = import_timm()
    published = {name.partition(".")[0] for name in timm.list_models(pretrained=True)}
    without = next(name for name in timm.list_models("resnet*") if name not in published)
    with pytest.raises(UserError, match="the hub has no weights for"):
        create_backbone(without, None, None)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("resnet18", ["layer4"]),
        ("vit_tiny_patch16_224", ["blocks.11", "norm"]),
        ("convnext_atto", ["stages.3", "head"]),
        ("inception_v3", ["Mixed_7c"]),
        ("efficientnet_b0", ["blocks.6", "conv_head", "bn2"]),
        ("small_cnn", ["stages.3"]),
        ("nf_resnet26", ["stages.3"]),  # its feature_info ends with a bare layer
    ],
)
def test_last_block(name: str, parts: list[str]) -> None:
    module, _ = create_backbone(name, "none", None)
    expected = {id(p) for part in parts for p in module.get_submodule(part).parameters()}
    assert {id(p) for p in last_block(module).parameters()} == expected
    assert 0 < len(expected) < len(list(module.parameters()))


@pytest.mark.parametrize(
    ("name", "part"), [("resnet18", "layer4"), ("vit_tiny_patch16_224", "blocks.11")]
)
def test_last_block_is_found_without_feature_info_too(name: str, part: str) -> None:
    module, _ = create_backbone(name, "none", None)
    setattr(module, "feature_info", None)  # noqa: B010
    inside = {id(p) for p in module.get_submodule(part).parameters()}
    assert inside <= {id(p) for p in last_block(module).parameters()}


def test_last_block_of_a_module_without_weights_is_an_error() -> None:
    with pytest.raises(ValueError, match="no stages"):
        last_block(nn.Sequential(nn.ReLU()))


def test_downloads_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes before any network request."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr("certvol.nn.weights.within_deadline", never)
    with pytest.raises(UserError, match=r"`model\.hub` is false"):
        create_backbone("resnet18.a1_in1k", None, None, download=False)


def test_resnet50_v1_halves_the_resolution_in_the_first_convolution_of_a_stage() -> None:
    module, info = create_backbone("resnet50_v1", "none", None)
    assert (info.dim, info.image_size) == (2048, 224)
    ours, timms = (
        dict(module.named_modules()),
        dict(create_backbone("resnet50", "none", None)[0].named_modules()),
    )
    assert (
        module.state_dict().keys()
        == create_backbone("resnet50", "none", None)[0].state_dict().keys()
    )
    for stage in ("layer2", "layer3", "layer4"):
        strides = [[m[f"{stage}.0.conv{i}"].stride[0] for i in (1, 2, 3)] for m in (ours, timms)]
        assert strides == [[2, 1, 1], [1, 2, 1]]
    assert module.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 2048)


def test_resnet50_v1_has_no_weights_on_the_hub() -> None:
    with pytest.raises(UserError, match="give --weights FILE"):
        create_backbone("resnet50_v1", None, None)
