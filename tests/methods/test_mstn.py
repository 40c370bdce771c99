import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import references
from certvol.methods._base import Batch
from certvol.methods._losses import class_means
from support.methods import CLASSES, make_batch, make_method
from support.plain_steps import (
    LAMBDA,
    Weights,
    assert_steps_are,
    bottleneck_of,
    features_of,
    linear,
    negative_log_likelihood,
)

SMALL: dict[str, Any] = {
    "bottleneck": 12,
    "discriminator_width": 20,
    "discriminator_norm": False,
    "discriminator_dropout": 0.0,
}


def test_means_of_classes_and_zero_for_an_absent_one() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [7.0, 7.0]])
    means, present = class_means(rows, torch.tensor([2, 2, 0]), 3)
    assert means.tolist() == [[7, 7], [0, 0], [2, 3]]
    assert present.tolist() == [1, 0, 1]


@pytest.mark.parametrize("pseudo_labels", ["batch", "cycle"])
def test_whole_steps_in_plain_pytorch_give_equal_weights(pseudo_labels: str) -> None:
    source: dict[int, Tensor] = {}
    target: dict[int, Tensor] = {}

    def loss(weights: Weights, batch: Batch) -> Tensor:
        nonlocal source, target
        rows = bottleneck_of(weights, features_of(weights, batch.inputs))
        logits = linear(weights, "network.classifier.output", rows)
        labels = logits[8:].argmax(1) if pseudo_labels == "batch" else batch.labels_N[8:]
        source = references.moved_centroids(source, rows[:8], batch.labels_N[:8], 0.7)
        target = references.moved_centroids(target, rows[8:], labels, 0.7)
        semantic = references.centroid_distance(source, target)
        confusion = []
        for own in (True, False):
            used = {name: value if own else value.detach() for name, value in weights.items()}
            x = torch.relu(linear(used, "discriminator.layers.0", rows.detach() if own else rows))
            x = torch.relu(linear(used, "discriminator.layers.2", x))
            p = torch.sigmoid(linear(used, "discriminator.layers.4", x)[:, 0])
            confusion.append(-(p[:8].log().mean() + (1 - p[8:]).log().mean()) / 2)
        ce = negative_log_likelihood(logits[:8], batch.labels_N[:8])
        return ce + confusion[0] - 0.2 * LAMBDA * confusion[1] + 5 * LAMBDA * semantic

    assert_steps_are(
        make_method("mstn", weight=5.0, pseudo_labels=pseudo_labels, **SMALL), loss, steps=3
    )


def test_target_rows_count_for_the_class_predicted_without_dropout() -> None:
    method = make_method("mstn", **SMALL).train()
    method.network.classifier.dropout = 0.9
    batch = make_batch(n=64)
    rows, _ = method.compared(batch.inputs)
    logits = linear(dict(method.named_parameters()), "network.classifier.output", rows[32:])
    method.loss_terms(batch)
    centroids, seen = class_means(rows[32:], logits.argmax(1), CLASSES)
    assert seen.sum() > 1
    assert torch.equal(method.seen_2C[1], seen)
    assert torch.allclose(method.sums_2CB[1], centroids, atol=1e-5)


def test_an_absent_class_keeps_its_centroid() -> None:
    method = make_method("mstn", pseudo_labels="cycle", **SMALL).train()
    method.loss_terms(make_batch())
    before = method.sums_2CB.clone()
    assert (method.seen_2C == 1).all()
    method.loss_terms(dataclasses.replace(make_batch(seed=1), labels_N=torch.full((16,), 2)))
    for label in range(CLASSES):
        assert torch.equal(before[:, label], method.sums_2CB[:, label]) is (label != 2)


def test_a_class_that_one_domain_has_not_seen_does_not_count() -> None:
    method = make_method("mstn", pseudo_labels="cycle", **SMALL).train()
    labels = torch.cat([torch.zeros(8, dtype=torch.int64), torch.ones(8, dtype=torch.int64)])
    terms = method.loss_terms(dataclasses.replace(make_batch(), labels_N=labels))
    assert terms["centroids"].item() == 0
    assert method.seen_2C.tolist() == [[1, 0, 0, 0], [0, 1, 0, 0]]


def test_centroids_move_in_training_alone_and_are_saved() -> None:
    method = make_method("mstn", **SMALL)
    assert {"sums_2CB", "seen_2C"} <= set(method.state_dict())
    method.eval().loss_terms(make_batch())
    assert not method.seen_2C.any()
    method.train().loss_terms(make_batch(adapting=False))
    assert not method.seen_2C.any()
    method.loss_terms(make_batch())
    assert method.seen_2C.any()


def test_averaging_over_processes_keeps_a_centroid_that_only_one_has_seen() -> None:
    method = make_method("mstn", pseudo_labels="cycle", centroid_momentum=0.5, **SMALL).train()
    method.loss_terms(make_batch())
    centroids = method.sums_2CB.clone()
    method.sums_2CB.div_(2)
    method.seen_2C.div_(2)
    batch = dataclasses.replace(make_batch(seed=1), labels_N=torch.zeros(16, dtype=torch.int64))
    method.loss_terms(batch)
    assert torch.allclose(method.sums_2CB[:, 1:], centroids[:, 1:])
    assert (method.seen_2C == 1).all()
