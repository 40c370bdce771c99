import math

import pytest
from torch import Tensor

from certvol.methods.protocol import Batch
from methods.plain_steps import (
    Weights,
    adversarial,
    assert_steps_are,
    bottleneck_of,
    features_of,
    linear,
    negative_log_likelihood,
)
from methods.test_contract import make_method

LAMBDA = 2 / (1 + math.exp(-10 * 0.5)) - 1  # at the progress of the batches of tests


@pytest.mark.parametrize("target_ce", [False, True])
def test_whole_steps_in_plain_pytorch_give_equal_weights(target_ce: bool) -> None:
    """The discriminator goes down its loss, the rest up lambda times the same."""

    def loss(weights: Weights, batch: Batch) -> Tensor:
        rows = bottleneck_of(weights, features_of(weights, batch.images_NCHW))
        labelled = 16 if target_ce else 8
        ce = negative_log_likelihood(
            linear(weights, "network.classifier.output", rows)[:labelled], batch.labels_N[:labelled]
        )
        discriminating, hiding = adversarial(weights, rows, 8, 0.7 * LAMBDA)
        return ce + 1.3 * (discriminating + hiding)

    settings = {"weight": 1.3, "reversal": 0.7, "bottleneck": 12, "discriminator_width": 20, "target_ce": target_ce}
    assert_steps_are(make_method("dann", **settings), loss)


def test_pretraining_is_cross_entropy_alone_and_leaves_the_discriminator() -> None:
    def loss(weights: Weights, batch: Batch) -> Tensor:
        rows = bottleneck_of(weights, features_of(weights, batch.images_NCHW))
        return negative_log_likelihood(linear(weights, "network.classifier.output", rows), batch.labels_N)

    assert_steps_are(make_method("dann", bottleneck=12), loss, adapting=False)
