from typing import Any

import pytest
from torch import Tensor

from certvol.methods._base import Batch
from support.methods import make_method
from support.plain_steps import (
    LAMBDA,
    Weights,
    adversarial,
    assert_steps_are,
    bottleneck_of,
    features_of,
    linear,
    negative_log_likelihood,
)


@pytest.mark.parametrize("target_ce", [False, True])
def test_whole_steps_in_plain_pytorch_give_equal_weights(target_ce: bool) -> None:
    """The discriminator minimises its loss; the rest maximises lambda times it."""

    def loss(weights: Weights, batch: Batch) -> Tensor:
        rows = bottleneck_of(weights, features_of(weights, batch.inputs))
        labelled = 16 if target_ce else 8
        ce = negative_log_likelihood(
            linear(weights, "network.classifier.output", rows)[:labelled], batch.labels_N[:labelled]
        )
        discriminating, hiding = adversarial(weights, rows, 8, 0.7 * LAMBDA)
        return ce + 1.3 * (discriminating + hiding)

    settings: dict[str, Any] = {
        "weight": 1.3,
        "reversal": 0.7,
        "bottleneck": 12,
        "discriminator_width": 20,
        "target_ce": target_ce,
    }
    assert_steps_are(make_method("dann", **settings), loss)
