"""Outputs of many batches are those of one."""

import weakref

import numpy as np
import pytest
import torch

from certvol.methods import basic, cvp
from certvol.methods._base import AdaptationMethod
from certvol.nn.network import Network, seeded_backbone
from certvol.nn.norm import TARGET
from certvol.predict.forward import BATCHES_ON_DEVICE, run_batches
from certvol.settings import ModelConfig


def method(kind: type[AdaptationMethod]) -> AdaptationMethod:
    config = ModelConfig(backbone="small_cnn", weights="none", norm="per_domain")
    backbone, info = seeded_backbone(config, 8, 0)
    torch.manual_seed(0)
    return kind(Network(backbone, info, 3, config), kind.Config())


@pytest.mark.parametrize("kind", [cvp.Method, basic.Method])
@pytest.mark.parametrize("batches", [1, BATCHES_ON_DEVICE, 2 * BATCHES_ON_DEVICE + 3])
def test_many_batches_give_the_rows_of_one_in_order(
    kind: type[AdaptationMethod], batches: int
) -> None:
    model, images = method(kind), torch.randn(batches * 2, 3, 8, 8)
    parts = run_batches(model, iter(torch.split(images, 2)), TARGET)
    whole = run_batches(model, iter([images]), TARGET)
    assert parts.probabilities_NC == pytest.approx(whole.probabilities_NC, abs=1e-5)
    if whole.sigma_N is None:
        assert parts.sigma_N is None
    else:
        assert parts.sigma_N == pytest.approx(whole.sigma_N, abs=1e-5)


def test_no_batch_gives_no_rows() -> None:
    outputs = run_batches(method(cvp.Method), iter([]), TARGET)
    assert outputs.probabilities_NC.shape == (0, 3)
    assert outputs.probabilities_NC.dtype == np.float32


def test_few_batches_wait_on_the_device() -> None:
    waiting: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def extra(
        features_ND: torch.Tensor, logits_NC: torch.Tensor, rows: slice
    ) -> dict[str, torch.Tensor]:
        nonlocal most
        values_N = torch.arange(rows.start, rows.stop)
        waiting.append(weakref.ref(values_N))
        most = max(most, sum(reference() is not None for reference in waiting))
        return {"number": values_N}

    count = 5 * BATCHES_ON_DEVICE * 2
    images = torch.randn(count, 3, 8, 8)
    outputs = run_batches(method(basic.Method), torch.split(images, 2), TARGET, extra=extra)
    assert most <= BATCHES_ON_DEVICE
    assert outputs.extra["number"].tolist() == list(range(count))
