import pytest
import torch
from torch import Tensor

from certvol.methods._base import Batch
from support.methods import make_method
from support.plain_steps import (
    Weights,
    assert_steps_are,
    bottleneck_of,
    common_logits,
    features_of,
    linear,
    negative_log_likelihood,
)


@pytest.mark.parametrize("width", [0, 12])
def test_whole_steps_in_plain_pytorch_give_equal_weights(width: int) -> None:
    def loss(weights: Weights, batch: Batch) -> Tensor:
        rows = features_of(weights, batch.inputs)
        if width > 0:
            rows = bottleneck_of(weights, rows)
            logits = linear(weights, "network.classifier.output", rows)
        else:
            logits = common_logits(weights, rows)
        squared = (rows[:, None] - rows[None]).square().sum(2)
        mean = squared.detach().sum() / (16 * 15)
        kernel = sum(
            torch.exp(-squared / (2 * scale * mean)) for scale in (1 / 8, 1 / 4, 1 / 2, 1, 2)
        )
        kernel = kernel - 5 * torch.eye(16)
        mmd = kernel[:8, :8].sum() / 56 + kernel[8:, 8:].sum() / 56 - 2 * kernel[:8, 8:].mean()
        return negative_log_likelihood(logits[:8], batch.labels_N[:8]) + 2 * mmd

    assert_steps_are(make_method("dan", weight=2.0, bottleneck=width), loss)
