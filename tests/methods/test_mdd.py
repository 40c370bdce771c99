import math

import pytest
import torch
from torch import Tensor

from certvol.methods._base import Batch
from certvol.methods.mdd import negative_log_rest
from support.methods import make_batch, make_method
from support.plain_steps import (
    LAMBDA,
    Weights,
    assert_steps_are,
    bottleneck_of,
    features_of,
    linear,
    negative_log_likelihood,
)


def two_layers(weights: Weights, name: str, rows: Tensor) -> Tensor:
    hidden = torch.relu(linear(weights, f"{name}.hidden", rows))
    return linear(weights, f"{name}.output", hidden)


def test_the_rest_is_the_probability_of_all_other_classes() -> None:
    logits = torch.randn(6, 4)
    labels = torch.tensor([0, 1, 2, 3, 0, 1])
    for row, label, found in zip(
        logits.tolist(), labels.tolist(), negative_log_rest(logits, labels).tolist(), strict=True
    ):
        powers = [math.exp(value) for value in row]
        assert found == pytest.approx(-math.log(1 - powers[label] / sum(powers)), rel=1e-4)
    assert negative_log_rest(torch.zeros(1, 4), labels[:1]).item() == pytest.approx(math.log(4 / 3))


def test_a_sure_row_has_a_finite_rest_and_gradient() -> None:
    logits = torch.tensor([[1e5, 0.0, 0.0]], requires_grad=True)
    value = negative_log_rest(logits, torch.tensor([0]))
    value.sum().backward()
    assert value.item() == pytest.approx(1e5, rel=1e-4)
    assert logits.grad is not None
    assert torch.allclose(logits.grad, torch.tensor([[1.0, -0.5, -0.5]]))


def test_whole_steps_in_plain_pytorch_give_equal_weights() -> None:
    def loss(weights: Weights, batch: Batch) -> Tensor:
        rows = bottleneck_of(weights, features_of(weights, batch.inputs))
        logits = two_layers(weights, "network.classifier", rows)
        labels = logits.argmax(1)
        parts = []
        for own in (True, False):
            used = {name: value if own else value.detach() for name, value in weights.items()}
            second = two_layers(used, "adversary", rows.detach() if own else rows)
            rest = 1 - torch.softmax(second[8:], 1)[torch.arange(8), labels[8:]]
            agreement = negative_log_likelihood(second[:8], labels[:8])
            parts.append(3 * agreement - torch.log(rest).mean())
        ce = negative_log_likelihood(logits[:8], batch.labels_N[:8])
        return ce + 2 * parts[0] - 2 * 0.2 * LAMBDA * parts[1]

    method = make_method("mdd", weight=2.0, margin=3.0, reversal=0.2, bottleneck=12)
    method.adversary.dropout = 0.0
    assert_steps_are(method, loss)


def test_the_second_classifier_neither_predicts_nor_learns_in_pretraining() -> None:
    method = make_method("mdd", bottleneck=12).train()
    method.loss(method.loss_terms(make_batch(adapting=False))).backward()
    assert all(weight.grad is None for weight in method.adversary.parameters())
    features = torch.randn(3, method.network.dim)
    before = method.eval().logits(features)
    torch.nn.init.zeros_(method.adversary.output.weight)
    assert torch.equal(method.logits(features), before)
