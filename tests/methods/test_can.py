import dataclasses

import pytest
import torch
from torch import Tensor

import references
from certvol.methods._base import Batch
from certvol.methods._clusters import spherical_kmeans
from certvol.methods.can import contrastive_discrepancy
from support.methods import CLASSES, make_method, make_survey
from support.plain_steps import (
    Weights,
    assert_steps_are,
    common_logits,
    features_of,
    negative_log_likelihood,
)


def _layers(
    n: int = 9, m: int = 7, seed: int = 0
) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    layers = [
        (torch.randn(n, d, generator=generator), torch.randn(m, d, generator=generator))
        for d in (5, 3)
    ]
    return (
        layers,
        torch.randint(4, (n,), generator=generator),
        torch.randint(4, (m,), generator=generator),
    )


@pytest.mark.parametrize("over_all", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_cdd_equals_the_formula(over_all: bool, seed: int) -> None:
    layers, source, target = _layers(seed=seed)
    found = contrastive_discrepancy(layers, source, target, 5, over_all).item()
    expected = references.contrastive_discrepancy(
        layers, source.tolist(), target.tolist(), 5, over_all
    )
    assert found == pytest.approx(expected, rel=1e-4)


def test_cdd_of_equal_samples_of_one_class_is_0() -> None:
    rows = torch.randn(6, 4)
    zeros = torch.zeros(6, dtype=torch.int64)
    assert contrastive_discrepancy([(rows, rows)], zeros, zeros, 3, True).item() == pytest.approx(
        0, abs=1e-5
    )


def test_cdd_falls_when_classes_align() -> None:
    torch.manual_seed(0)
    centres = torch.tensor([[5.0, 0.0], [0.0, 5.0]])
    labels = torch.arange(2).repeat(8)
    rows = centres[labels] + 0.3 * torch.randn(16, 2)
    values = [
        contrastive_discrepancy(
            [(rows, rows[:, :] * share + rows.flip(1) * (1 - share))], labels, labels, 2, True
        ).item()
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    assert values == sorted(values, reverse=True)
    assert values[-1] < 0 < values[0]


def test_a_step_down_the_gradient_of_cdd_lowers_it() -> None:
    layers, source, target = _layers()
    moved = layers[0][1].requires_grad_()
    value = contrastive_discrepancy([(layers[0][0], moved)], source, target, 4, True)
    (gradient,) = torch.autograd.grad(value, moved)
    stepped = [(layers[0][0], moved.detach() - 0.1 * gradient)]
    lower = contrastive_discrepancy(stepped, source, target, 4, True)
    assert lower < value


@pytest.mark.parametrize("target_rows", [0, 1])
def test_cdd_of_few_or_equal_rows_is_finite_with_finite_gradients(target_rows: int) -> None:
    source = torch.zeros(3, 4, requires_grad=True)
    target = torch.zeros(target_rows, 4, requires_grad=True)
    labels = torch.zeros(3, dtype=torch.int64)
    value = contrastive_discrepancy([(source, target)], labels, labels[:target_rows], 4, False)
    assert torch.isfinite(value)
    assert torch.isfinite(torch.autograd.grad(value, source)[0]).all()


def test_clusters_give_labels_and_far_images_and_small_classes_are_left_out() -> None:
    method = make_method("can", max_distance=0.1, min_images=3)
    centres = torch.eye(CLASSES, method.network.info.dim)
    features = centres[torch.tensor([0] * 5 + [1] * 4 + [2] * 2)] * 3.0
    features[4] = torch.ones(method.network.info.dim)  # equally far from all centres
    survey = dataclasses.replace(
        make_survey(method, len(features)), features_ND=features, source_sums_CD=centres
    )
    assert method.label_target(survey).labels_N.tolist() == [0, 0, 0, 0, -1, 1, 1, 1, 1, -1, -1]


def test_clusters_that_have_drifted_are_matched_back_to_the_classes() -> None:
    method = make_method("can", min_images=0)
    centres = torch.eye(CLASSES, method.network.info.dim)
    features = torch.zeros(16, method.network.info.dim)
    features[:10, 0], features[:10, CLASSES] = 0.3, 1.0  # far from all, least so from class 0
    angles = torch.tensor([20.0] * 3 + [46.0]).deg2rad()  # from class 0 to class 1
    features[10:14, 0], features[10:14, 1] = angles.cos(), angles.sin()
    features[14:] = centres[2:]
    # The ten rows draw the first centre away from class 0; the three rows near class 0 then join
    # the second centre and draw it to class 0.
    survey = dataclasses.replace(
        make_survey(method, len(features)), features_ND=features, source_sums_CD=centres
    )
    assert spherical_kmeans(features, centres)[0].tolist() == [0] * 10 + [1] * 4 + [2, 3]
    assert method.label_target(survey).labels_N.tolist() == [1] * 10 + [0] * 4 + [2, 3]


def test_whole_steps_in_plain_pytorch_give_equal_weights() -> None:
    def kernel_mean(a: Tensor, b: Tensor, width: Tensor) -> Tensor:
        squared = ((a[:, None] - b) ** 2).sum(2)
        return (
            torch.stack([torch.exp(-squared / (width * 2.0 ** (i - 2))) for i in range(5)])
            .sum(0)
            .mean()
        )

    def discrepancy(source: Tensor, target: Tensor) -> Tensor:
        rows = torch.cat([source, target]).detach()
        width = ((rows[:, None] - rows) ** 2).sum() / (len(rows) * (len(rows) - 1))
        within = kernel_mean(source, source, width) + kernel_mean(target, target, width)
        return within - 2 * kernel_mean(source, target, width)

    def loss(weights: Weights, batch: Batch) -> Tensor:
        features = features_of(weights, batch.inputs)
        logits = common_logits(weights, features)
        total = negative_log_likelihood(logits[:8], batch.labels_N[:8])
        for layer in (features, torch.softmax(logits, 1)):
            for a in range(CLASSES):
                for b in range(CLASSES):
                    e = discrepancy(
                        layer[:8][batch.labels_N[:8] == a], layer[8:][batch.labels_N[8:] == b]
                    )
                    total = total + 0.3 * (
                        e / CLASSES if a == b else -e / (CLASSES * (CLASSES - 1))
                    )
        return total

    assert_steps_are(make_method("can"), loss)
