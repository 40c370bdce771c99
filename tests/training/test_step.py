"""A step against the optimisers written out; teachers and stages."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import certvol
from certvol.api import resolve_settings
from certvol.data.batches import CyclePlan
from certvol.data.store import Store
from certvol.data.views import ImageViews
from certvol.distributed import Team
from certvol.errors import UserError
from certvol.runs.checkpoint import read_tensors
from certvol.settings import AugmentConfig, TrainingConfig
from certvol.training.optimizers import OPTIMIZERS
from certvol.training.step import Stepper
from support.images import tiny
from support.methods import CLASSES, make_method
from support.watched_steps import Step, watch_steps


@pytest.mark.parametrize(
    ("name", "clip", "head_rate"), [("cvp", 0.0, 1.0), ("cvp", 0.1, 1.0), ("symnets", 0.1, 2.0)]
)
def test_a_step_is_sgd_with_nesterov_momentum_weight_decay_and_a_rate_per_part(
    name: str, clip: float, head_rate: float
) -> None:
    def rate(weight: str) -> float:
        own = 3.0 if name == "symnets" and weight.startswith("network.classifier.") else 1.0
        return own * (1.0 if weight.startswith("network.backbone.") else head_rate)

    rng = np.random.default_rng(0)
    pixels, rows = rng.integers(0, 256, (20, 18, 18, 3), dtype=np.uint8), np.arange(20)
    method = make_method(
        name, **({"num_samples": 4} if name == "cvp" else {"classifier_rate": 3.0})
    ).train()
    twin = copy.deepcopy(method)
    store = Store(pixels, rows, torch.device("cpu"), 0.5)
    views = ImageViews(store, store, method.network.info, AugmentConfig())
    settings = TrainingConfig(momentum=0.9, weight_decay=0.01, grad_clip=clip, head_rate=head_rate)
    plan = CyclePlan(
        rng.integers(0, 20, (2, 16)),
        np.tile(np.arange(16) % CLASSES, (2, 1)),
        np.array([8, 8], dtype=np.int64),
    )
    stepper = Stepper(method, views, settings, Team(), bf16=False)
    momentum = {name: torch.zeros_like(p) for name, p in twin.named_parameters()}
    for index, learning_rate in enumerate((0.01, 0.002)):
        _, batch = stepper.step(plan, index, index, 0.0, True, learning_rate)
        _, again = Stepper(twin, views, settings, Team(), bf16=False).step(
            plan, index, index, 0.0, True, 0.0
        )
        assert torch.equal(batch.inputs, again.inputs)
        norm = torch.sqrt(sum((p.grad**2).sum() for p in twin.parameters()))
        assert clip == 0 or norm <= clip * 1.001
        with torch.no_grad():
            for key, p in twin.named_parameters():
                gradient = p.grad + 0.01 * p
                momentum[key] = gradient if index == 0 else 0.9 * momentum[key] + gradient
                p -= learning_rate * rate(key) * (gradient + 0.9 * momentum[key])
        for (key, mine), theirs in zip(method.named_parameters(), twin.parameters(), strict=True):
            assert torch.allclose(mine, theirs, atol=1e-6), key


@pytest.mark.parametrize("adapting", [True, False])
def test_a_step_of_sam_takes_the_gradients_at_moved_weights_and_changes_the_old_ones(
    adapting: bool,
) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (20, 18, 18, 3), dtype=np.uint8)
    method = make_method("sdat", radius=0.3, bottleneck=12, discriminator_width=20).train()
    method.network.classifier.dropout = 0.0
    twin = copy.deepcopy(method)
    store = Store(pixels, np.arange(20), torch.device("cpu"), 0.5)
    views = ImageViews(store, store, method.network.info, AugmentConfig())
    labels = np.tile(np.arange(16) % CLASSES, (1, 1))
    split = np.array([8 if adapting else 16], dtype=np.int64)
    plan = CyclePlan(rng.integers(0, 20, (1, 16)), labels, split)
    settings = TrainingConfig(momentum=0.0)
    stepper = Stepper(method, views, settings, Team(), bf16=False)
    terms, batch = stepper.step(plan, 0, 0, 0.5, adapting, 0.05)

    weights = dict(twin.named_parameters())
    before = {name: value.detach().clone() for name, value in weights.items()}
    if adapting:
        found = twin.loss_terms(batch)
        found = torch.autograd.grad(
            found["ce"] + found["confusion"], list(weights.values()), allow_unused=True
        )
        uphill = {name: g for name, g in zip(weights, found, strict=True) if g is not None}
        assert not any(name.startswith("discriminator.") for name in uphill)
        length = sum(float((g**2).sum()) for g in uphill.values()) ** 0.5
        with torch.no_grad():
            for name, g in uphill.items():
                weights[name] += 0.3 * g / length
    again = twin.loss_terms(batch)
    twin.loss(again).backward()
    for name, value in method.named_parameters():
        gradient = weights[name].grad
        if gradient is None:
            assert not adapting
            continue
        assert torch.allclose(value, before[name] - 0.05 * gradient, atol=1e-6), name
    assert {key: v.item() for key, v in terms.items()} == pytest.approx(
        {key: v.item() for key, v in again.items()}, abs=1e-5
    )


def test_a_batch_holds_tables_and_a_second_view_if_the_method_asks() -> None:
    rng = np.random.default_rng(0)
    method = make_method("self_ensembling")
    store = Store(
        rng.integers(0, 256, (20, 18, 18, 3), dtype=np.uint8),
        np.arange(20),
        torch.device("cpu"),
        0.5,
    )
    views = ImageViews(store, store, method.network.info, AugmentConfig())
    plan = CyclePlan(
        rng.integers(0, 20, (1, 16)),
        np.zeros((1, 16), dtype=np.int64),
        np.array([6], dtype=np.int64),
    )
    for rank, target_rows in ((0, slice(6, 11)), (1, slice(11, 16))):
        stepper = Stepper(method, views, TrainingConfig(), Team(rank, 2), bf16=False)
        stepper.tables = {"number": torch.arange(20), "square": torch.arange(20)[:, None] ** 2}
        batch = stepper._batch(plan, 0, 0, adapting=True)
        expected = plan.images_SN[0, target_rows].tolist()
        assert batch.tables["number"].tolist() == expected
        assert batch.tables["square"][:, 0].tolist() == [number**2 for number in expected]
        assert batch.other_inputs is not None
        assert batch.other_inputs.shape == batch.inputs.shape
        assert not torch.equal(batch.other_inputs, batch.inputs)
        pretraining = stepper._batch(plan, 0, 0, adapting=False)
        assert pretraining.other_inputs is None
        assert pretraining.tables == {}
    plain = ImageViews(store, store, method.network.info, AugmentConfig(enabled=False))
    batch = Stepper(method, plain, TrainingConfig(), Team(), bf16=False)._batch(
        plan, 0, 0, adapting=True
    )
    assert batch.other_inputs is not None
    assert torch.equal(batch.other_inputs, batch.inputs)  # of the same images


def _steps(settings: TrainingConfig, name: str = "basic") -> list[dict[str, torch.Tensor]]:
    """Take two steps with a small network; return the weights before and the gradients of each."""
    rng = np.random.default_rng(0)
    method = make_method(name).train()
    pixels = rng.integers(0, 256, (20, 18, 18, 3), dtype=np.uint8)
    store = Store(pixels, np.arange(20), torch.device("cpu"), 0.5)
    views = ImageViews(store, store, method.network.info, AugmentConfig())
    labels = np.tile(np.arange(16) % CLASSES, (2, 1))
    plan = CyclePlan(rng.integers(0, 20, (2, 16)), labels, np.array([8, 8], dtype=np.int64))
    stepper = Stepper(method, views, settings, Team(), bf16=False)
    weights = {key: p.detach().clone() for key, p in method.named_parameters()}
    found = [weights]
    for index in range(2):
        stepper.step(plan, index, index, 0.0, True, 0.01)
        found.append(
            {k: p.grad.clone() for k, p in method.named_parameters() if p.grad is not None}
        )
    return [*found, {key: p.detach().clone() for key, p in method.named_parameters()}]


def test_adamw_is_adam_with_decoupled_weight_decay_and_the_momentum_as_first_beta() -> None:
    settings = TrainingConfig(optimizer="adamw", momentum=0.8, weight_decay=0.1)
    before, *gradients, after = _steps(settings)
    for key, weight in before.items():
        first, second, expected = torch.zeros_like(weight), torch.zeros_like(weight), weight.clone()
        for step, gradient in enumerate((gradients[0][key], gradients[1][key]), start=1):
            first = 0.8 * first + 0.2 * gradient
            second = 0.999 * second + 0.001 * gradient**2
            expected -= 0.01 * 0.1 * expected
            scale = (second / (1 - 0.999**step)).sqrt() + 1e-8
            expected -= 0.01 * first / (1 - 0.8**step) / scale
        assert torch.allclose(after[key], expected, atol=1e-5), key


def test_an_added_optimizer_can_be_chosen_and_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        OPTIMIZERS, "plain", lambda groups, settings, fused, recorded: torch.optim.SGD(groups)
    )
    given = {"training.optimizer": "plain"}
    before, first, second, after = _steps(resolve_settings(settings=given).training)
    for key, weight in before.items():
        assert torch.allclose(after[key], weight - 0.01 * (first[key] + second[key])), key
    with pytest.raises(
        UserError, match=r"`training\.optimizer` should be one of sgd, adamw, plain"
    ):
        resolve_settings(settings={"training.optimizer": "adam"})


@pytest.mark.parametrize("name", ["dann", "basic"])
def test_a_fused_step_trains_weights_that_had_no_gradient_before(name: str) -> None:
    """Steps on a GPU are fused; a discriminator gets its first gradient when adaptation starts."""
    rng = np.random.default_rng(0)
    store = Store(
        rng.integers(0, 256, (20, 18, 18, 3), dtype=np.uint8),
        np.arange(20),
        torch.device("cpu"),
        0.5,
    )
    plan = CyclePlan(
        rng.integers(0, 20, (2, 16)),
        np.tile(np.arange(16) % CLASSES, (2, 1)),
        np.array([16, 8], dtype=np.int64),
    )
    ends = []
    for fused in (False, True):
        method = make_method(name).train()
        views = ImageViews(store, store, method.network.info, AugmentConfig())
        stepper = Stepper(method, views, TrainingConfig(momentum=0.9), Team(), bf16=False)
        for group in stepper.optimizer.param_groups:
            group["fused"] = fused
        before = {key: value.clone() for key, value in method.state_dict().items()}
        for step, adapting in enumerate((False, True, True)):
            stepper.step(plan, int(adapting), step, 0.5, adapting, 0.01)
        ends.append(method.state_dict())
        assert all(
            not torch.equal(before[key], p)
            for key, p in method.named_parameters()
            if p.grad is not None
        )
    for key in ends[0]:
        assert torch.allclose(ends[0][key], ends[1][key], atol=1e-6), key


def test_a_teacher_starts_from_the_pretrained_model_and_follows_every_step(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    averages: list[torch.Tensor] = []
    step: Any = Stepper.step

    def watched(self: Stepper, *arguments: Any) -> Any:
        found = step(self, *arguments)
        weight = self.method.network.classifier.output.weight.detach()
        if arguments[4]:
            averages.append(0.9 * averages[-1] + 0.1 * weight)
        else:
            averages[:] = [weight.clone()]
        return found

    monkeypatch.setattr(Stepper, "step", watched)
    run = certvol.adapt(*folders, out=tmp_path / "run", **tiny(training__teacher=0.9)).path
    delivered = read_tensors(run / "model.safetensors")["network.classifier.output.weight"]
    assert len(averages) == 1 + 3 * 4
    assert torch.allclose(delivered, averages[-1], atol=1e-6)


def test_without_decay_the_teacher_equals_the_student(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """A teacher that follows at once changes only rounding."""
    plain = certvol.adapt(*folders, out=tmp_path / "plain", **tiny()).path
    taught = certvol.adapt(*folders, out=tmp_path / "taught", **tiny(training__teacher=1e-9)).path
    for key, value in load_file(plain / "model.safetensors").items():
        assert torch.allclose(value, load_file(taught / "model.safetensors")[key], atol=1e-3), key


def test_a_decay_of_1_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"training\.teacher"):
        certvol.adapt(*folders, out=tmp_path / "run", **tiny(training__teacher=1.0))


def test_stages_start_without_momentum(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without: list[int] = []

    def look(stepper: Stepper, step: Step) -> None:
        if step.adapting and not stepper.optimizer.state:
            without.append(step.place)

    watch_steps(monkeypatch, look)
    settings = tiny(
        method__name="rsda_dann", method__rounds=2, training__cycles=2, training__cycle_steps=2
    )
    settings["training.fresh_optimizer"] = False
    certvol.adapt(*folders, out=tmp_path / "run", **settings)
    assert without == [0, 4, 8]


@pytest.mark.parametrize(
    ("given", "classifier", "rest"), [(None, 20.0, 10.0), (1.0, 20.0, 1.0), (3.0, 60.0, 3.0)]
)
def test_the_usual_rate_behind_a_frozen_backbone_is_no_factor_of_a_methods_own(
    given: float | None, classifier: float, rest: float
) -> None:
    method = make_method("symnets", classifier_rate=20.0)
    method.network.trained_part = "head"
    pixels = np.zeros((20, 18, 18, 3), dtype=np.uint8)
    store = Store(pixels, np.arange(20), torch.device("cpu"), 0.5)
    views = ImageViews(store, store, method.network.info, AugmentConfig())
    settings = TrainingConfig(head_rate=given)
    stepper = Stepper(method, views, settings, Team(), bf16=False)
    times = {
        id(weight): group["times"]
        for group in stepper.optimizer.param_groups
        for weight in group["params"]
    }
    for name, weight in method.named_parameters():
        if name.startswith("network.classifier."):
            assert times[id(weight)] == classifier, name
        elif not name.startswith("network.backbone."):
            assert times[id(weight)] == rest, name
