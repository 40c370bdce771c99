"""The contract of the protocol, checked for every discovered method."""

import ast
import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from certvol.data.augment import cache_size, centre_view
from certvol.errors import UserError
from certvol.nn.norm import TARGET
from certvol.predict.export import Exported
from certvol.predict.measures import run_with_measures
from certvol.settings import TrainingConfig, resolve, settings_of
from support.methods import CLASSES, METHODS, fitted, make_batch, make_method

# Prefixes of weights that only pretraining trains: a method's adaptation gives them no gradient.
FIXED_IN_ADAPTATION = {"shot": ("network.classifier.output.",)}


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
def test_every_setting_has_help_and_every_number_a_range_that_holds_its_default(name: str) -> None:
    for each in settings_of(METHODS[name].Config):
        assert each.help, each.name
        if each.kind in (int, float):
            assert each.fault(-1.0) is not None, each.name
            assert each.fault(each.default) is None, each.name


@pytest.mark.parametrize("name", METHODS)
def test_numbers_out_of_range_are_refused_by_name(name: str) -> None:
    configs = {name: METHODS[name].Config}
    for field in dataclasses.fields(METHODS[name].Config):
        if field.type in (int, float):
            with pytest.raises(UserError, match=rf"`method\.{field.name}` should"):
                resolve(configs, overrides={"method.name": name, f"method.{field.name}": -1})


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("adapting", [False, True])
def test_loss_terms_are_finite_scalars_with_gradients(name: str, adapting: bool) -> None:
    method = make_method(name).train()
    terms = method.loss_terms(fitted(method, make_batch(adapting)))
    assert terms
    for value in terms.values():
        assert value.shape == ()
        assert torch.isfinite(value)
    method.loss(terms).backward()
    # Only the networks that predict learn in pretraining.
    learning = method if adapting else method.network
    for parameter_name, parameter in learning.named_parameters():
        fixed = adapting and parameter_name.startswith(FIXED_IN_ADAPTATION.get(name, ()))
        assert (parameter.grad is None) is fixed, parameter_name
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in method.parameters())


@pytest.mark.parametrize("name", METHODS)
def test_logits_are_one_per_class_and_dropout_is_on_demand_in_evaluation(name: str) -> None:
    method = make_method(name).eval()
    features_ND = torch.randn(5, method.network.info.dim)
    logits_NC = method.logits(features_ND)
    assert logits_NC.shape == (5, CLASSES)
    assert torch.equal(method.logits(features_ND), logits_NC)
    assert not torch.equal(method.logits(features_ND, partial(F.dropout, p=0.5)), logits_NC)


@pytest.mark.parametrize("name", METHODS)
def test_the_same_seeds_give_the_same_loss(name: str) -> None:
    values = []
    for _ in range(2):
        method = make_method(name).train()
        batch = fitted(method, make_batch())
        torch.manual_seed(3)
        values.append({k: v.item() for k, v in method.loss_terms(batch).items()})
    assert values[0] == values[1]


class _TensorsAlone(TorchDispatchMode):
    """Refuse operations that wait for the device or whose shapes depend on values.

    A step with these cannot be recorded and replayed.
    """

    REFUSED = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "unique",
        "is_nonzero",
        "equal",
        "bincount",
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        assert not name.startswith(self.REFUSED), f"aten::{name} in a step"
        if name in ("index", "index_put", "index_put_"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), (
                "a boolean mask as an index in a step"
            )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("adapting", [False, True])
def test_a_step_works_on_tensors_alone(name: str, adapting: bool) -> None:
    method = make_method(name).train()
    batch = fitted(method, make_batch(adapting))
    with _TensorsAlone():
        method.loss(method.loss_terms(batch)).backward()
        if method.teacher is not None:
            method.teacher.follow()


def test_the_check_for_tensors_alone_can_fail() -> None:
    values = torch.arange(4.0)
    steps: list[Callable[[], Any]] = [
        lambda: values[values > 1],
        lambda: values.sum().item(),
        values.nonzero,
    ]
    for step in steps:
        with _TensorsAlone(), pytest.raises(AssertionError, match="in a step"):
            step()


@pytest.mark.parametrize(
    "name", [name for name, method in METHODS.items() if not method.uses_split]
)
def test_a_method_without_uses_split_ignores_the_number_of_source_rows(name: str) -> None:
    found = []
    for num_source in (8, 11):
        torch.manual_seed(0)
        terms = (
            make_method(name)
            .train()
            .loss_terms(dataclasses.replace(make_batch(), num_source=num_source))
        )
        found.append({key: value.item() for key, value in terms.items()})
    assert found[0] == found[1]


@pytest.mark.parametrize("name", METHODS)
def test_one_label_only_gives_finite_losses(name: str) -> None:
    method = make_method(name).train()
    batch = fitted(
        method, dataclasses.replace(make_batch(), labels_N=torch.zeros(16, dtype=torch.int64))
    )
    assert all(torch.isfinite(value) for value in method.loss_terms(batch).values())


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("adapting", [False, True])
def test_losses_are_float32_and_near_those_of_full_precision_under_autocast(
    name: str, adapting: bool
) -> None:
    values = []
    for bf16 in (False, True):
        method = make_method(name).train()
        batch = fitted(method, make_batch(adapting))
        torch.manual_seed(0)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            terms = method.loss_terms(batch)
        assert all(value.dtype == torch.float32 for value in terms.values())
        method.loss(terms).backward()
        assert all(p.grad is None or torch.isfinite(p.grad).all() for p in method.parameters())
        values.append({key: value.item() for key, value in terms.items()})
    assert values[1] == pytest.approx(values[0], rel=0.15, abs=0.05)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("num_source", [16, 15, 1, 0])
def test_batches_of_one_domain_alone_give_finite_losses_and_gradients(
    name: str, num_source: int
) -> None:
    """Source images may replace all target images, and a process may get rows of one domain."""
    method = make_method(name).train()
    terms = method.loss_terms(
        fitted(method, dataclasses.replace(make_batch(), num_source=num_source))
    )
    usual = method.loss_terms(fitted(method, make_batch()))
    assert set(terms) == set(usual), "all batches of a phase have the same terms"
    assert all(torch.isfinite(value) for value in terms.values())
    method.loss(terms).backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in method.parameters())


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("scale", [0.0, 1e6])
def test_images_of_nothing_and_of_huge_values_give_finite_losses_and_gradients(
    name: str, scale: float
) -> None:
    method = make_method(name).train()
    method.network.domains.mode = (
        "frozen"  # without the batch's statistics features are as small or large as images
    )
    batch = fitted(method, make_batch())
    terms = method.loss_terms(dataclasses.replace(batch, inputs=batch.inputs * scale))
    assert all(torch.isfinite(value) for value in terms.values())
    method.loss(terms).backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in method.parameters())


@pytest.mark.parametrize("name", METHODS)
def test_sigma_is_one_positive_value_per_image_or_absent(name: str) -> None:
    method = make_method(name).eval()
    sigma_N = method.sigma(torch.randn(5, method.network.info.dim))
    if sigma_N is not None:
        assert sigma_N.shape == (5,)
        assert (sigma_N >= 0).all()


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_measured_and_exported_with_its_own_logits(name: str) -> None:
    """Measures and exports use `logits`, not f_Cl directly: the method may have its own head."""
    method = make_method(name).eval()
    info = method.network.info
    side = cache_size(info.image_size)
    pixels_NHW3 = torch.randint(0, 256, (6, side, side, 3), dtype=torch.uint8)
    images_NCHW = centre_view(pixels_NHW3, info)
    with torch.no_grad():
        logits_NC = method.logits(method.network.features(images_NCHW))
        exported_NC = Exported(method)(pixels_NHW3)[0]
    outputs = run_with_measures(method, [images_NCHW], TARGET, TrainingConfig(mc_passes=40))
    assert outputs.labels_N.tolist() == logits_NC.argmax(dim=1).tolist()
    assert outputs.measures["logit"] == pytest.approx(logits_NC.amax(dim=1).numpy(), abs=1e-5)
    assert exported_NC.numpy() == pytest.approx(logits_NC.numpy(), abs=1e-4)
    assert (outputs.measures["mcd_mu"] >= 1 / CLASSES - 1e-6).all()
    assert (outputs.measures["mcd_mu"] <= 1).all()
    assert (outputs.measures["mcd_sigma"] > 0).all()


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


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_dropout_masks_drop_at_their_rate_and_depend_on_a_rows_place_alone(rate: float) -> None:
    features = torch.zeros(16, 500)
    whole = make_batch().dropout_masks(features, 2, rate)
    assert whole.shape == (16, 2, 500)
    assert set(whole.unique().tolist()) <= {0.0, 1.0}
    assert whole.mean().item() == pytest.approx(1 - rate, abs=0.02)
    rows = torch.tensor([0, 1, 8, 9])
    part = dataclasses.replace(make_batch(), rows=rows).dropout_masks(features[rows], 2, rate)
    assert torch.equal(part, whole[rows])


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize(
    "name",
    [name for name, kind in METHODS.items() if "target_ce" in kind.Config.__dataclass_fields__],
)
def test_pseudo_labels_matter_only_if_target_ce_is_set(name: str, asked: bool) -> None:
    assert make_method(name).config.target_ce is False
    values = []
    for target_label in (0, 1):
        method = make_method(name, target_ce=asked).train()
        batch = make_batch()
        batch.labels_N[batch.num_source :] = target_label
        torch.manual_seed(0)
        values.append(method.loss(method.loss_terms(batch)).item())
    assert (values[0] == values[1]) is not asked
