"""Every discovered method keeps the protocol's promises."""

import ast
import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from certvol.config import ModelConfig
from certvol.methods import discover
from certvol.methods.protocol import AdaptationMethod, Batch
from certvol.nn.network import Network, seeded_backbone

METHODS = discover()
CLASSES = 4


def make_method(name: str, seed: int = 0, **settings: object) -> AdaptationMethod:
    config = ModelConfig(backbone="small_cnn", norm="mixed")
    backbone, info = seeded_backbone(config, 16, seed)
    torch.manual_seed(seed)
    return METHODS[name](Network(backbone, info, CLASSES, config), METHODS[name].Config(**settings))


def make_batch(adapting: bool = True, seed: int = 0, n: int = 16) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        images_NCHW=torch.randn(n, 3, 16, 16, generator=generator),
        labels_N=torch.arange(n) % CLASSES,
        num_source=n // 2 if adapting else n,
        rows=torch.arange(n),
        total=n,
        generator=torch.Generator().manual_seed(seed),
        progress=torch.tensor(0.5),
        adapting=adapting,
    )


def test_the_core_methods_are_there() -> None:
    assert {"cvp", "basic", "source_only"} <= set(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_one_file_with_a_line_about_itself_and_frozen_settings(name: str) -> None:
    method = METHODS[name]
    assert method.summary
    assert "\n" not in method.summary
    assert dataclasses.is_dataclass(method.Config)
    method.Config()
    for field in dataclasses.fields(method.Config):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(method.Config(), field.name, None)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("adapting", [False, True])
def test_loss_terms_are_finite_scalars_with_gradients(name: str, adapting: bool) -> None:
    method = make_method(name).train()
    terms = method.loss_terms(make_batch(adapting))
    assert terms
    for value in terms.values():
        assert value.shape == ()
        assert torch.isfinite(value)
    method.loss(terms).backward()
    for parameter_name, parameter in method.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert torch.isfinite(parameter.grad).all()


@pytest.mark.parametrize("name", METHODS)
def test_the_same_seeds_give_the_same_loss(name: str) -> None:
    values = []
    for _ in range(2):
        method = make_method(name).train()
        torch.manual_seed(3)
        values.append({k: v.item() for k, v in method.loss_terms(make_batch()).items()})
    assert values[0] == values[1]


class _TensorsAlone(TorchDispatchMode):
    """Refuses what waits for the device or makes a shape of values: such a step cannot be recorded and replayed."""

    REFUSED = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal", "bincount")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        assert not name.startswith(self.REFUSED), f"aten::{name} in a step"
        if name in ("index", "index_put", "index_put_"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "a boolean mask as an index in a step"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("adapting", [False, True])
def test_a_step_works_on_tensors_alone(name: str, adapting: bool) -> None:
    method = make_method(name).train()
    batch = make_batch(adapting)
    with _TensorsAlone():
        method.loss(method.loss_terms(batch)).backward()
        method.after_step()


def test_the_check_for_tensors_alone_can_fail() -> None:
    values = torch.arange(4.0)
    steps: list[Callable[[], Any]] = [lambda: values[values > 1], lambda: values.sum().item(), values.nonzero]
    for step in steps:
        with _TensorsAlone(), pytest.raises(AssertionError, match="in a step"):
            step()


@pytest.mark.parametrize("name", METHODS)
def test_one_label_only_gives_finite_losses(name: str) -> None:
    method = make_method(name).train()
    batch = dataclasses.replace(make_batch(), labels_N=torch.zeros(16, dtype=torch.int64))
    assert all(torch.isfinite(value) for value in method.loss_terms(batch).values())


@pytest.mark.parametrize("name", METHODS)
def test_sigma_is_one_positive_value_per_image_or_absent(name: str) -> None:
    method = make_method(name).eval()
    sigma_N = method.sigma(torch.randn(5, method.network.info.dim))
    if sigma_N is not None:
        assert sigma_N.shape == (5,)
        assert (sigma_N >= 0).all()


@pytest.mark.parametrize("name", METHODS)
def test_a_method_leaves_optimiser_device_and_logging_to_the_trainer(name: str) -> None:
    source = Path(inspect.getfile(METHODS[name])).read_text()
    nodes = list(ast.walk(ast.parse(source)))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name)}
    assert not names & {"optim", "cuda", "backward", "print", "zero_grad"}


def test_noise_depends_on_an_images_place_in_the_whole_batch_alone() -> None:
    features = torch.zeros(16, 5)
    whole = make_batch().noise(features, 3)
    assert whole.shape == (16, 3, 5)
    rows = torch.tensor([0, 1, 8, 9])
    part = dataclasses.replace(make_batch(), rows=rows).noise(features[rows], 3)
    assert torch.equal(part, whole[rows])
