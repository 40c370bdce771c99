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

from certvol.analysis import measure
from certvol.bounds import bounds_of
from certvol.config import ModelConfig, TrainingConfig, resolve
from certvol.data.augment import cache_size
from certvol.data.augment import test_view as view_of
from certvol.errors import UserError
from certvol.export import Exported
from certvol.methods import discover
from certvol.methods.protocol import AdaptationMethod, Batch, Survey
from certvol.nn.network import Network, seeded_backbone
from certvol.nn.norm import TARGET

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


def make_survey(method: AdaptationMethod, n: int, seed: int = 0, stage: int = 1) -> Survey:
    """`n` target images whose features are random, as far as the method asks for it."""
    generator = torch.Generator().manual_seed(seed)
    features_ND = torch.randn(n, method.network.info.dim, generator=generator).relu()
    with torch.no_grad():
        probabilities_NC = method.eval().logits(features_ND).softmax(dim=1)
    centres_CD = torch.rand(CLASSES, method.network.info.dim, generator=generator) if method.surveys_source else None
    return Survey(features_ND, probabilities_NC, centres_CD, stage, generator)


def fitted(method: AdaptationMethod, batch: Batch, seed: int = 0) -> Batch:
    """The batch with what this method's trainer would add to it: another view, and rows of its tables."""
    if not batch.adapting:
        return batch
    training = method.training
    tables = {}
    if method.labels_whole_target:
        with torch.no_grad():
            noted = method.label_target(make_survey(method, 64, seed)).tables
        tables = {name: table[: len(batch.labels_N) - batch.num_source] for name, table in noted.items()}
    method.train(training)
    generator = torch.Generator().manual_seed(seed + 1)
    other = torch.randn(batch.images_NCHW.shape, generator=generator) if method.views_per_image == 2 else None
    return dataclasses.replace(batch, tables=tables, other_images_NCHW=other)


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
def test_every_number_has_its_range_beside_it_and_starts_within(name: str) -> None:
    bounds = dict(bounds_of(METHODS[name].Config))
    numbers = {f.name: f.default for f in dataclasses.fields(METHODS[name].Config) if f.type in (int, float)}
    assert bounds.keys() == numbers.keys()
    assert not [field for field, default in numbers.items() if bounds[field].fault(default)]


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
    # A network that compares the domains has nothing to learn in pretraining; what predicts learns in both phases.
    learning = method if adapting else method.network
    for parameter_name, parameter in learning.named_parameters():
        assert parameter.grad is not None, parameter_name
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in method.parameters())


@pytest.mark.parametrize("name", METHODS)
def test_logits_are_one_per_class_and_dropout_is_on_demand_in_evaluation(name: str) -> None:
    method = make_method(name).eval()
    features_ND = torch.randn(5, method.network.info.dim)
    logits_NC = method.logits(features_ND)
    assert logits_NC.shape == (5, CLASSES)
    assert torch.equal(method.logits(features_ND), logits_NC)
    assert not torch.equal(method.logits(features_ND, dropout=0.5), logits_NC)


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
    batch = fitted(method, make_batch(adapting))
    with _TensorsAlone():
        method.loss(method.loss_terms(batch)).backward()
        method.after_step()
        if method.teacher is not None:
            method.teacher.follow()


def test_the_check_for_tensors_alone_can_fail() -> None:
    values = torch.arange(4.0)
    steps: list[Callable[[], Any]] = [lambda: values[values > 1], lambda: values.sum().item(), values.nonzero]
    for step in steps:
        with _TensorsAlone(), pytest.raises(AssertionError, match="in a step"):
            step()


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if not method.uses_split])
def test_a_method_that_says_so_treats_source_and_target_rows_alike(name: str) -> None:
    found = []
    for num_source in (8, 11):
        torch.manual_seed(0)
        terms = make_method(name).train().loss_terms(dataclasses.replace(make_batch(), num_source=num_source))
        found.append({key: value.item() for key, value in terms.items()})
    assert found[0] == found[1]


@pytest.mark.parametrize("name", METHODS)
def test_one_label_only_gives_finite_losses(name: str) -> None:
    method = make_method(name).train()
    batch = fitted(method, dataclasses.replace(make_batch(), labels_N=torch.zeros(16, dtype=torch.int64)))
    assert all(torch.isfinite(value) for value in method.loss_terms(batch).values())


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("adapting", [False, True])
def test_losses_are_float32_and_near_those_of_full_precision_under_autocast(name: str, adapting: bool) -> None:
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
def test_batches_of_one_domain_alone_give_finite_losses_and_gradients(name: str, num_source: int) -> None:
    """Source images stand in for classes without target images; a process of several may get rows of one domain only."""
    method = make_method(name).train()
    terms = method.loss_terms(fitted(method, dataclasses.replace(make_batch(), num_source=num_source)))
    usual = method.loss_terms(fitted(method, make_batch()))
    assert set(terms) == set(usual), "all batches of a phase have the same terms"
    assert all(torch.isfinite(value) for value in terms.values())
    method.loss(terms).backward()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in method.parameters())


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("scale", [0.0, 1e6])
def test_images_of_nothing_and_of_huge_values_give_finite_losses_and_gradients(name: str, scale: float) -> None:
    method = make_method(name).train()
    method.network.domains.mode = "frozen"  # without the batch's statistics features are as small or large as images
    batch = fitted(method, make_batch())
    terms = method.loss_terms(dataclasses.replace(batch, images_NCHW=batch.images_NCHW * scale))
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
def test_a_method_is_measured_and_exported_by_its_own_logits(name: str) -> None:
    """A head of the method's own included: no one may go past `logits` to f_Cl."""
    method = make_method(name).eval()
    info = method.network.info
    side = cache_size(info.image_size)
    pixels_NHW3 = torch.randint(0, 256, (6, side, side, 3), dtype=torch.uint8)
    images_NCHW = view_of(pixels_NHW3, info.image_size, info.mean, info.std)
    with torch.no_grad():
        logits_NC = method.logits(method.network.features(images_NCHW))
        exported_NC = Exported(method)(pixels_NHW3)[0]
    measured = measure(method, [images_NCHW], TARGET, TrainingConfig(mc_passes=40))
    assert measured.predicted_N.tolist() == logits_NC.argmax(dim=1).tolist()
    assert measured.values["logit"] == pytest.approx(logits_NC.amax(dim=1).numpy(), abs=1e-5)
    assert exported_NC.numpy() == pytest.approx(logits_NC.numpy(), abs=1e-4)
    assert (measured.values["mcd_mu"] >= 1 / CLASSES - 1e-6).all()
    assert (measured.values["mcd_mu"] <= 1).all()
    assert (measured.values["mcd_sigma"] > 0).all()


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
