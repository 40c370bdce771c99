import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from certvol.methods._base import Batch
from certvol.methods.simnet import overlap
from support import naive_losses as naive
from support.methods import CLASSES, make_batch, make_method
from support.plain_steps import (
    LAMBDA,
    Weights,
    adversarial,
    assert_steps_are,
    features_of,
    linear,
    negative_log_likelihood,
    normalised,
)


def behind(weights: Weights, name: str, features: Tensor) -> Tensor:
    x = linear(weights, f"network.classifier.{name}.linear", features)
    norm = f"network.classifier.{name}.norm"
    return normalised(x, weights[f"{norm}.weight_SC"][0], weights[f"{norm}.bias_SC"][0])


@pytest.mark.parametrize("adapting", [False, True])
def test_whole_steps_in_plain_pytorch_give_equal_weights(adapting: bool) -> None:
    stored: list[Tensor] = []

    def loss(weights: Weights, batch: Batch) -> Tensor:
        split = batch.num_source
        features = features_of(weights, batch.inputs)
        rows, of_classes = (
            behind(weights, name, features) for name in ("bottleneck", "of_classes")
        )
        means = torch.stack(
            [of_classes[:split][batch.labels_N[:split] == c].mean(0) for c in range(CLASSES)]
        )
        moved = 0.7 * stored[0] + 0.3 * means if stored else means
        stored[:] = [moved.detach()]
        u, v = (weights[f"network.classifier.{name}.weight"] for name in ("output", "key"))
        bias = weights["network.classifier.output.bias"]
        logits = torch.stack([(u @ row + bias) @ (v @ moved.T) for row in rows]) / math.sqrt(9)
        total = negative_log_likelihood(logits[:split], batch.labels_N[:split])
        cosines = sum(
            F.cosine_similarity(moved[a], moved[b], dim=0) ** 2
            for a in range(CLASSES)
            for b in range(CLASSES)
            if a != b
        )
        total = total + 0.2 * cosines / CLASSES
        if not adapting:
            return total
        return total + sum(adversarial(weights, rows, split, LAMBDA))

    settings = {"bottleneck": 12, "rank": 9, "orthogonality": 0.2, "discriminator_width": 14}
    assert_steps_are(make_method("simnet", **settings), loss, adapting=adapting)


def test_overlap_is_the_sum_over_pairs_of_present_classes() -> None:
    prototypes, present = torch.randn(4, 6), torch.tensor([1.0, 0.0, 1.0, 1.0])
    rows = prototypes.tolist()
    total = sum(naive.cosine(rows[a], rows[b]) ** 2 for a in (0, 2, 3) for b in (0, 2, 3) if a != b)
    assert overlap(prototypes, present).item() == pytest.approx(total / 3, rel=1e-5)
    assert overlap(torch.eye(4), torch.ones(4)).item() == 0
    assert overlap(torch.ones(4, 2), torch.ones(4)).item() == pytest.approx(3)
    assert overlap(prototypes, torch.zeros(4)).item() == 0


def test_prototypes_average_the_batches_and_absent_classes_keep_theirs() -> None:
    head = make_method("simnet", bottleneck=5).train().head
    first, second = torch.randn(6, 5), torch.randn(4, 5)
    start = head.prototypes_CB.clone()
    moved, present = head.move_prototypes(first, torch.tensor([0, 0, 1, 1, 1, 3]), 0.7)
    assert present.tolist() == [1, 1, 0, 1]
    assert torch.allclose(moved[1], first[2:5].mean(0))
    assert torch.equal(moved[2], start[2])
    moved, _ = head.move_prototypes(second, torch.tensor([1, 1, 2, 2]), 0.7)
    assert torch.allclose(moved[1], 0.7 * first[2:5].mean(0) + 0.3 * second[:2].mean(0))
    assert torch.allclose(moved[2], second[2:].mean(0))
    assert torch.allclose(moved[3], first[5])
    assert torch.allclose(head.prototypes_CB, moved)
    head.eval().move_prototypes(torch.randn(2, 5), torch.tensor([0, 1]), 0.7)
    assert torch.allclose(head.prototypes_CB, moved)


def test_predictions_are_the_similarities_to_the_stored_prototypes() -> None:
    method = make_method("simnet", bottleneck=5, rank=3).train()
    method.loss_terms(make_batch())
    method.eval()
    features = torch.randn(4, method.network.dim)
    rows = method.head.bottleneck(features)
    found = method.logits(features).detach()
    for i in range(4):
        query = method.head.output(rows[i])
        for c in range(CLASSES):
            key = method.head.key.weight @ method.head.prototypes_CB[c]
            expected = (query @ key).item() / math.sqrt(3)
            assert found[i, c].item() == pytest.approx(expected, rel=1e-3, abs=1e-5)


def test_the_gradient_reaches_prototypes_through_the_newest_mean() -> None:
    head = make_method("simnet", bottleneck=5).train().head
    labels = torch.tensor([0, 1])
    head.move_prototypes(torch.randn(2, 5), labels, 0.7)
    rows = torch.randn(2, 5, requires_grad=True)
    moved, _ = head.move_prototypes(rows, labels, 0.7)
    (gradient,) = torch.autograd.grad(moved[0].sum(), rows)
    assert torch.allclose(gradient, torch.tensor([[0.3] * 5, [0.0] * 5]))
