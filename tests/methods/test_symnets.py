import math

import pytest
import torch
from torch import Tensor, nn

import references
from certvol.methods._base import Batch
from certvol.methods.symnets import half_log_probabilities, pair_entropy
from support.methods import CLASSES, make_batch, make_method
from support.plain_steps import (
    LAMBDA,
    Weights,
    assert_steps_are,
    features_of,
    linear,
    negative_log_likelihood,
)

HEAD = "network.classifier.output"


def test_even_logits_give_each_half_a_half_and_the_largest_entropy() -> None:
    logits = torch.zeros(3, 8)
    for half in half_log_probabilities(logits):
        assert half.tolist() == pytest.approx([math.log(0.5)] * 3)
    assert pair_entropy(logits).tolist() == pytest.approx([math.log(4)] * 3)


def test_entropy_is_the_same_whichever_classifier_is_sure() -> None:
    logits = torch.full((2, 8), -1e4)
    logits[0, 1] = logits[1, 5] = 0
    assert pair_entropy(logits).tolist() == pytest.approx([0, 0], abs=1e-6)


@pytest.mark.parametrize("scale", [0.0, 1e5])
def test_extreme_logits_give_finite_values_and_gradients(scale: float) -> None:
    logits = (torch.randn(6, 8) * scale).requires_grad_()
    (
        sum(half.sum() for half in half_log_probabilities(logits)) + pair_entropy(logits).sum()
    ).backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_gradients_are_those_of_two_backward_passes_each_kept_by_its_part() -> None:
    method = make_method("symnets").train()
    method.network.classifier.dropout = 0.0
    weights = {
        name: value.detach().clone().requires_grad_() for name, value in method.named_parameters()
    }
    method.loss(method.loss_terms(make_batch())).backward()
    batch = make_batch()
    logits = linear(weights, HEAD, features_of(weights, batch.inputs))
    for_classifiers, for_backbone = references.symnets(logits, batch.labels_N, 8, CLASSES, LAMBDA)
    names = list(weights)
    first = torch.autograd.grad(for_classifiers, list(weights.values()), retain_graph=True)
    second = torch.autograd.grad(for_backbone, list(weights.values()))
    for name, of_classifiers, of_backbone in zip(names, first, second, strict=True):
        pair = (of_classifiers, of_backbone)
        expected, other = pair if name.startswith(HEAD) else reversed(pair)
        found = method.get_parameter(name).grad
        assert found is not None
        assert torch.allclose(found, expected, atol=1e-6, rtol=1e-4), name
        assert not torch.allclose(found, other, atol=1e-4), name


def test_whole_steps_in_plain_pytorch_give_equal_weights() -> None:
    def loss(weights: Weights, batch: Batch) -> Tensor:
        features = features_of(weights, batch.inputs)
        fixed = {name: value.detach() for name, value in weights.items()}
        of_classifiers, _ = references.symnets(
            linear(weights, HEAD, features.detach()), batch.labels_N, 8, CLASSES, 1
        )
        _, of_backbone = references.symnets(
            linear(fixed, HEAD, features), batch.labels_N, 8, CLASSES, 2 * LAMBDA
        )
        return 3 * of_classifiers + of_backbone

    assert_steps_are(make_method("symnets", weight=2.0, classifier_rate=3.0), loss)


def test_pretraining_is_cross_entropy_of_both_classifiers_which_learn_faster() -> None:
    def loss(weights: Weights, batch: Batch) -> Tensor:
        features = features_of(weights, batch.inputs)
        fixed = {name: value.detach() for name, value in weights.items()}
        total = torch.zeros(())
        for rate, logits in (
            (3, linear(weights, HEAD, features.detach())),
            (1, linear(fixed, HEAD, features)),
        ):
            for half in (logits[:, :CLASSES], logits[:, CLASSES:]):
                total = total + rate * negative_log_likelihood(half, batch.labels_N) / 2
        return total

    assert_steps_are(make_method("symnets", classifier_rate=3.0), loss, adapting=False)


def test_the_published_rate_of_the_classifiers_is_the_default() -> None:
    assert make_method("symnets").config.classifier_rate == 10


def test_the_target_classifier_predicts() -> None:
    method = make_method("symnets").eval()
    features = torch.randn(5, method.network.info.dim)
    output = method.network.classifier.output
    expected = features @ output.weight[CLASSES:].T + output.bias[CLASSES:]
    assert torch.allclose(method.logits(features), expected, atol=1e-5)
    assert method.logits(features, nn.Dropout(0.5)).shape == (5, CLASSES)
