"""The trainer's own step, against SGD written out."""

import copy

import numpy as np
import pytest
import torch

from certvol.config import AugmentConfig, TrainingConfig
from certvol.data.batches import CyclePlan
from certvol.data.store import PixelStore
from certvol.training.distributed import Team
from certvol.training.stepper import Stepper
from certvol.training.views import Views
from methods.test_contract import CLASSES, make_method


@pytest.mark.parametrize(("name", "clip", "head_rate"), [("cvp", 0.0, 1.0), ("cvp", 0.1, 1.0), ("symnets", 0.1, 2.0)])
def test_a_step_is_sgd_with_nesterov_momentum_weight_decay_and_a_rate_for_each_part(
    name: str, clip: float, head_rate: float
) -> None:
    def rate(weight: str) -> float:
        own = 3.0 if name == "symnets" and weight.startswith("network.classifier.") else 1.0
        return own * (1.0 if weight.startswith("network.backbone.") else head_rate)

    rng = np.random.default_rng(0)
    pixels, rows = rng.integers(0, 256, (20, 18, 18, 3), dtype=np.uint8), np.arange(20)
    method = make_method(name, **({"num_samples": 4} if name == "cvp" else {"classifier_rate": 3.0})).train()
    twin = copy.deepcopy(method)
    store = PixelStore(pixels, rows, torch.device("cpu"), 0.5)
    views = Views(store, store, method.network.info, AugmentConfig())
    settings = TrainingConfig(momentum=0.9, weight_decay=0.01, grad_clip=clip, head_rate=head_rate)
    plan = CyclePlan(
        rng.integers(0, 20, (2, 16)), np.tile(np.arange(16) % CLASSES, (2, 1)), np.array([8, 8], dtype=np.int64)
    )
    stepper = Stepper(method, views, settings, Team(), bf16=False)
    momentum = {name: torch.zeros_like(p) for name, p in twin.named_parameters()}
    for index, learning_rate in enumerate((0.01, 0.002)):
        _, batch = stepper.step(plan, index, index, 0.0, True, learning_rate)
        _, again = Stepper(twin, views, settings, Team(), bf16=False).step(plan, index, index, 0.0, True, 0.0)
        assert torch.equal(batch.images_NCHW, again.images_NCHW)
        norm = torch.sqrt(sum((p.grad**2).sum() for p in twin.parameters()))
        assert clip == 0 or norm <= clip * 1.001
        with torch.no_grad():
            for key, p in twin.named_parameters():
                gradient = p.grad + 0.01 * p
                momentum[key] = gradient if index == 0 else 0.9 * momentum[key] + gradient
                p -= learning_rate * rate(key) * (gradient + 0.9 * momentum[key])
        for (key, mine), theirs in zip(method.named_parameters(), twin.parameters(), strict=True):
            assert torch.allclose(mine, theirs, atol=1e-6), key


def test_a_batch_holds_the_rows_of_its_target_images_and_another_view_where_the_method_asks() -> None:
    rng = np.random.default_rng(0)
    method = make_method("self_ensembling")
    store = PixelStore(rng.integers(0, 256, (20, 18, 18, 3), dtype=np.uint8), np.arange(20), torch.device("cpu"), 0.5)
    views = Views(store, store, method.network.info, AugmentConfig())
    plan = CyclePlan(rng.integers(0, 20, (1, 16)), np.zeros((1, 16), dtype=np.int64), np.array([6], dtype=np.int64))
    for rank, target_rows in ((0, slice(6, 11)), (1, slice(11, 16))):
        stepper = Stepper(method, views, TrainingConfig(), Team(rank, 2), bf16=False)
        stepper.tables = {"number": torch.arange(20), "square": torch.arange(20)[:, None] ** 2}
        batch = stepper._batch(plan, 0, 0, adapting=True)
        expected = plan.images_SN[0, target_rows].tolist()
        assert batch.tables["number"].tolist() == expected
        assert batch.tables["square"][:, 0].tolist() == [number**2 for number in expected]
        assert batch.other_images_NCHW is not None
        assert batch.other_images_NCHW.shape == batch.images_NCHW.shape
        assert not torch.equal(batch.other_images_NCHW, batch.images_NCHW)
        pretraining = stepper._batch(plan, 0, 0, adapting=False)
        assert pretraining.other_images_NCHW is None
        assert pretraining.tables == {}
    plain = Views(store, store, method.network.info, AugmentConfig(enabled=False))
    batch = Stepper(method, plain, TrainingConfig(), Team(), bf16=False)._batch(plan, 0, 0, adapting=True)
    assert torch.equal(batch.other_images_NCHW, batch.images_NCHW)  # of the same images


@pytest.mark.parametrize("name", ["dann", "basic"])
def test_a_fused_step_trains_what_has_had_no_gradient_before(name: str) -> None:
    """As a GPU's steps are: a discriminator gets its first gradient when adaptation starts."""
    rng = np.random.default_rng(0)
    store = PixelStore(rng.integers(0, 256, (20, 18, 18, 3), dtype=np.uint8), np.arange(20), torch.device("cpu"), 0.5)
    plan = CyclePlan(
        rng.integers(0, 20, (2, 16)), np.tile(np.arange(16) % CLASSES, (2, 1)), np.array([16, 8], dtype=np.int64)
    )
    ends = []
    for fused in (False, True):
        method = make_method(name).train()
        views = Views(store, store, method.network.info, AugmentConfig())
        stepper = Stepper(method, views, TrainingConfig(momentum=0.9), Team(), bf16=False)
        for group in stepper.optimizer.param_groups:
            group["fused"] = fused
        before = {key: value.clone() for key, value in method.state_dict().items()}
        for step, adapting in enumerate((False, True, True)):
            stepper.step(plan, int(adapting), step, 0.5, adapting, 0.01)
        ends.append(method.state_dict())
        assert all(not torch.equal(before[key], p) for key, p in method.named_parameters() if p.grad is not None)
    for key in ends[0]:
        assert torch.allclose(ends[0][key], ends[1][key], atol=1e-6), key
