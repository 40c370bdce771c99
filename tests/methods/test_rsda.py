import math

import pytest
import torch
from torch import Tensor

import references
from certvol.errors import UserError
from certvol.methods import config_classes
from certvol.methods._base import Batch
from certvol.methods._clusters import gaussian_uniform_posterior
from certvol.methods.rsda_dann import pseudo_label_weights, robust_loss
from certvol.methods.rsda_mstn import moved_centroids, semantic_distance
from certvol.settings import resolve
from support.methods import CLASSES, make_method, make_survey
from support.plain_steps import (
    Weights,
    assert_steps_are,
    features_of,
    linear,
    negative_log_likelihood,
)


def test_the_robust_loss_is_a_weighted_mean_and_0_of_no_weights() -> None:
    p, labels = torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 0])
    assert robust_loss(p, labels, torch.tensor([1.0, 0.5])).item() == pytest.approx(
        (0.1 + 0.5 * 0.6) / 1.5
    )
    assert robust_loss(p, labels, torch.zeros(2)).item() == 0
    assert robust_loss(p[:0], labels[:0], torch.zeros(0)).item() == 0


def test_outliers_of_a_class_weigh_nothing_and_its_core_much() -> None:
    torch.manual_seed(0)
    labels = torch.arange(2).repeat_interleave(50)
    rows = torch.eye(8)[labels] + 0.1 * torch.randn(100, 8)
    rows[:4] = torch.eye(8)[4] + 0.1 * torch.randn(4, 8)  # of no class
    weights = pseudo_label_weights(rows, labels, 3)
    assert weights[:4].tolist() == [0] * 4
    assert weights[4:50].median() > 0.7
    assert ((weights == 0) | (weights >= 0.5)).all()


def test_weights_are_by_angles_from_the_centre_of_a_label() -> None:
    torch.manual_seed(0)
    rows = torch.randn(40, 4) + torch.tensor([2.0, 0.0, 0.0, 0.0])
    labels = torch.arange(40) % 2
    expected = torch.zeros(40)
    for label in (0, 1):
        own = rows[labels == label] / rows[labels == label].norm(dim=1, keepdim=True)
        centre = own.sum(dim=0) / own.sum(dim=0).norm()
        angles = [math.acos(float(row @ centre)) for row in own]
        expected[labels == label] = gaussian_uniform_posterior(torch.tensor(angles))
    expected[expected < 0.5] = 0
    assert pseudo_label_weights(rows, labels, 3).tolist() == pytest.approx(
        expected.tolist(), abs=1e-3
    )


@pytest.mark.parametrize("method", ["rsda_dann", "rsda_mstn"])
def test_without_rounds_only_the_first_training_runs(method: str) -> None:
    config = resolve(config_classes(), overrides={"method.name": method, "method.rounds": "0"})
    assert make_method(method, rounds=config.method.rounds).stages == 1
    with pytest.raises(UserError, match=r"`method.rounds` should not be negative, found -1"):
        resolve(config_classes(), overrides={"method.name": method, "method.rounds": -1})


def test_labels_of_the_first_training_have_weight_zero() -> None:
    method = make_method("rsda_dann")
    with torch.no_grad():
        first = method.label_target(make_survey(method, 40, stage=0))
        later = method.label_target(make_survey(method, 40, stage=1))
    assert first.tables["weights"].sum() == first.tables["in_rounds"].sum() == 0
    assert later.tables["weights"].sum() > 0
    assert later.tables["in_rounds"].tolist() == [1.0] * 40
    assert make_method("rsda_dann", rounds=3).stages == 4


def test_the_semantic_distance_equals_the_formula_over_classes_seen_in_both_domains() -> None:
    source, target = torch.randn(5, 3), torch.randn(5, 3)
    source[1], target[2] = 0, 0
    assert semantic_distance(source, target).item() == pytest.approx(
        references.semantic_distance(source, target), rel=1e-4
    )
    assert semantic_distance(source, 2 * source).item() == pytest.approx(0, abs=1e-5)


def test_a_class_without_rows_keeps_its_centroid() -> None:
    old = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    rows = torch.tensor([[3.0, 3.0], [5.0, 5.0]])
    moved = moved_centroids(old, rows, torch.tensor([0, 0]), 0.3)
    assert moved.flatten().tolist() == pytest.approx([0.7 + 0.3 * 4, 0.3 * 4, 0, 1])


def test_centroids_are_kept_without_gradient_and_only_the_entropy_spares_the_classifier() -> None:
    from support.methods import fitted, make_batch

    method = make_method("rsda_mstn").train()
    terms = method.loss_terms(fitted(method, make_batch()))
    assert method.source_centroids_CD.abs().sum() > 0
    assert not method.source_centroids_CD.requires_grad
    terms["entropy"].backward()
    assert method.head.output.weight.grad is None
    assert method.head.bottleneck.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ["rsda_dann", "rsda_mstn"])
def test_whole_steps_in_plain_pytorch_give_equal_weights(name: str) -> None:
    method = make_method(name, entropy_weight=0.5)
    for each in method.discriminator.layers:
        each.dropout = 0.0
    centroids = {domain: torch.zeros(CLASSES, 256) for domain in ("source", "target")}
    radius, rising = 10.0, math.tanh(2.5)

    def to_unit(x: Tensor) -> Tensor:
        length: Tensor = x.norm(dim=-1, keepdim=True)
        return x / length

    def layer(weights: Weights, number: int, x: Tensor) -> Tensor:
        cosine = x[:, -1:] / x.norm(dim=1, keepdim=True)
        tangent = (
            radius
            * torch.acos(torch.where(cosine.abs() > 0.9999, 0.9999 * cosine, cosine))
            * to_unit(x[:, :-1])
        )
        moved = linear(weights, f"discriminator.layers.{number}.linear", tangent)
        angle = moved.norm(dim=1, keepdim=True) / radius
        wrapped = torch.cat([torch.sin(angle) * to_unit(moved), torch.cos(angle)], 1)
        return radius * to_unit(torch.relu(wrapped))

    def cut(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return x @ to_unit(weight).T + radius * torch.tanh(bias)

    def loss(weights: Weights, batch: Batch) -> Tensor:
        z = radius * to_unit(
            linear(weights, "network.classifier.bottleneck", features_of(weights, batch.inputs))
        )
        w, b = (
            weights["network.classifier.output.weight"],
            weights["network.classifier.output.bias"],
        )
        logits = cut(z, w, b)
        p = torch.softmax(logits[8:], 1)
        total = negative_log_likelihood(logits[:8], batch.labels_N[:8])
        g = batch.tables["weights"]
        total = total + (g * (1 - p[torch.arange(8), batch.labels_N[8:]])).sum() / g.sum()
        q = torch.softmax(cut(z[8:], w.detach(), b.detach()), 1)
        total = total - 0.5 * rising * (q * q.log()).sum(1).mean()

        def confusion(x: Tensor, part: Weights) -> Tensor:
            rows = layer(part, 1, layer(part, 0, x))
            d = cut(rows, part["discriminator.output.weight"], part["discriminator.output.bias"])[
                :, 0
            ]
            return (
                torch.log(1 + torch.exp(-d[:8])).mean() + torch.log(1 + torch.exp(d[8:])).mean()
            ) / 2

        # The discriminator minimises it ten times as fast; the features maximise it.
        total = total + 10 * confusion(z.detach(), weights)
        fixed = {key: value.detach() for key, value in weights.items()}
        total = total - rising * (confusion(z, fixed) - confusion(z, fixed).detach())
        if name == "rsda_mstn":
            moved = {}
            for domain, rows, labels in (
                ("source", z[:8], batch.labels_N[:8]),
                ("target", z[8:], logits[8:].argmax(1)),
            ):
                means = []
                for c in range(CLASSES):
                    members = rows[labels == c]
                    old = centroids[domain][c]
                    means.append(0.7 * old + 0.3 * members.mean(0) if len(members) > 0 else old)
                moved[domain] = torch.stack(means)
                centroids[domain] = moved[domain].detach()
            for a, b_ in zip(moved["source"], moved["target"], strict=True):
                if b_.abs().sum() > 0 and a.abs().sum() > 0:
                    total = total + rising * (1 - a @ b_ / (a.norm() * b_.norm()))
        return total

    assert_steps_are(method, loss)
