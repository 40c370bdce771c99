import dataclasses
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import certvol
from certvol.methods._base import Batch
from certvol.methods._clusters import nearest_others, prototype_labels
from certvol.methods.shot import divergence_from, negative_diversity
from certvol.runs.checkpoint import read_tensors
from support import naive_losses as naive
from support.images import tiny
from support.methods import CLASSES, make_batch, make_method, make_survey
from support.plain_steps import Weights, assert_steps_are, linear, rows_behind_bottleneck


@pytest.mark.parametrize("least", [0, 7])
def test_labels_are_those_of_the_loops(least: int) -> None:
    torch.manual_seed(0)
    rows, p = torch.randn(40, 5), (3 * torch.randn(40, 4)).softmax(dim=1)
    p[:, 3] = 0.5 * p[:, 3]
    assert prototype_labels(rows, p, least).tolist() == naive.prototype_labels(rows, p, least)


def test_the_target_is_labelled_behind_the_bottleneck() -> None:
    method = make_method("shot", bottleneck=12)
    survey = make_survey(method, 60)
    p = (2 * torch.randn(60, CLASSES, generator=torch.Generator().manual_seed(1))).softmax(1)
    labels = method.label_target(dataclasses.replace(survey, probabilities_NC=p)).labels_N
    with torch.no_grad():
        rows = method.head.bottleneck(survey.features_ND)
    assert labels.tolist() == naive.prototype_labels(rows, p, 0)
    assert labels.tolist() != naive.prototype_labels(survey.features_ND, p, 0)


def test_classes_are_counted_again_in_each_round() -> None:
    """The predictions have four rows of class 1, but only one row lies at its centre."""
    rows = torch.tensor([[1.0, 0.0]] * 12 + [[0.0, 1.0]])
    p = torch.eye(2)[torch.tensor([0] * 9 + [1] * 4)]
    p[9:12] = torch.tensor([0.49, 0.51])
    assert prototype_labels(rows, p, 0).tolist() == [0] * 12 + [1]
    assert prototype_labels(rows, p, 2).tolist() == [0] * 13


def test_labels_of_tight_clusters_are_right_though_predictions_are_poor() -> None:
    torch.manual_seed(0)
    true = torch.arange(3).repeat(30)
    rows = torch.eye(3)[true] * 5 + 0.1 * torch.randn(90, 3)
    p = (torch.eye(3)[true] + 2 * torch.randn(90, 3)).softmax(dim=1)
    assert (p.argmax(1) == true).float().mean() < 0.75
    assert torch.equal(prototype_labels(rows, p), true)


def test_a_class_of_few_predictions_gets_no_labels_unless_all_are_so() -> None:
    torch.manual_seed(0)
    rows = torch.randn(30, 4)
    p = torch.eye(3)[torch.tensor([0] * 14 + [1] * 13 + [2] * 3)]
    assert set(prototype_labels(rows, p, 3).tolist()) == {0, 1}
    assert set(prototype_labels(rows, p, 0).tolist()) == {0, 1, 2}
    assert set(prototype_labels(rows, p, 50).tolist()) == {0, 1, 2}


def test_neighbours_are_those_of_the_loops_and_never_the_row_itself() -> None:
    rows = F.normalize(torch.randn(30, 5, generator=torch.Generator().manual_seed(0)), dim=1)
    assert nearest_others(rows, 4).tolist() == naive.nearest_others(rows, 4)


def test_diversity_is_log_c_for_an_even_mean_and_0_for_one_class() -> None:
    assert negative_diversity(torch.eye(4)).item() == pytest.approx(-math.log(4))
    assert negative_diversity(torch.eye(4)[[1, 1]]).item() == pytest.approx(0)
    assert negative_diversity(torch.empty(0, 4)).item() == 0
    p = torch.rand(9, 4).softmax(1)
    expected = -naive.entropy(naive.column_means(p.tolist()))
    assert negative_diversity(p).item() == pytest.approx(expected, rel=1e-5)


def test_the_divergence_is_that_of_the_formula_and_0_at_the_shares() -> None:
    q, p = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.rand(9, 4).softmax(1)
    p[:, 3] = 0
    p /= p.sum(1, keepdim=True)
    mean = naive.column_means(p.tolist())
    expected = sum(m * math.log(m / s) for m, s in zip(mean[:3], q.tolist(), strict=False))
    assert divergence_from(q, p).item() == pytest.approx(expected, abs=1e-6)
    assert divergence_from(q, q[None]).item() == pytest.approx(0, abs=1e-6)
    assert divergence_from(q, p[:0]).item() == 0


@pytest.mark.parametrize("known", [False, True])
def test_under_a_prior_whole_steps_use_its_posterior(known: bool) -> None:
    q = torch.tensor([0.6, 0.3, 0.1, 0.0])

    def loss(weights: Weights, batch: Batch) -> Tensor:
        rows = rows_behind_bottleneck(weights, batch.inputs)
        fixed = {name: value.detach() for name, value in weights.items()}
        logits = linear(fixed, "network.classifier.output", rows)[8:, :3]
        log_p = torch.log_softmax(logits + (q[:3].log() if known else 0), 1)
        mean = log_p.exp().mean(0)
        total = -(log_p.exp() * log_p).sum(1).mean()
        total = total + (mean * (mean / q[:3] if known else mean).log()).sum()
        return total - 0.7 * log_p[torch.arange(8), batch.labels_N[8:]].mean()

    method = make_method("shot", pseudo_weight=0.7, bottleneck=12)
    method.prior_shift_C = torch.tensor([0.0, 0.0, 0.0, -1e4])
    if known:
        method.prior_shift_C[:3] = q[:3].log()
        method.target_shares_C = q
    real = method.loss_terms

    def allowed(batch: Batch) -> dict[str, Tensor]:
        batch.labels_N.clamp_(max=2)
        found: dict[str, Tensor] = real(batch)
        return found

    method.loss_terms = allowed
    assert_steps_are(method, loss)


@pytest.mark.parametrize("partial", [False, True])
def test_whole_steps_in_plain_pytorch_give_equal_weights(partial: bool) -> None:
    def loss(weights: Weights, batch: Batch) -> Tensor:
        rows = rows_behind_bottleneck(weights, batch.inputs)
        fixed = {name: value.detach() for name, value in weights.items()}
        logits = linear(fixed, "network.classifier.output", rows)[8:]
        log_p = torch.log_softmax(logits, 1)
        mean = log_p.exp().mean(0)
        total = -(log_p.exp() * log_p).sum(1).mean()
        if not partial:
            total = total + (mean * mean.log()).sum()
        return total - 0.7 * log_p[torch.arange(8), batch.labels_N[8:]].mean()

    assert_steps_are(make_method("shot", pseudo_weight=0.7, partial=partial, bottleneck=12), loss)


def test_pretraining_is_smoothed_cross_entropy() -> None:
    def loss(weights: Weights, batch: Batch) -> Tensor:
        rows = rows_behind_bottleneck(weights, batch.inputs)
        log_p = torch.log_softmax(linear(weights, "network.classifier.output", rows), 1)
        goal = F.one_hot(batch.labels_N, CLASSES) * 0.8 + (1 - F.one_hot(batch.labels_N)) * 0.2 / 3
        return -(goal * log_p).sum(1).mean()

    method = make_method("shot", label_smoothing=0.2, bottleneck=12)
    assert_steps_are(method, loss, adapting=False)


def test_source_labels_do_not_matter_in_adaptation() -> None:
    values = []
    for label in (0, 1):
        method = make_method("shot").train()
        batch = make_batch()
        batch.labels_N[:8] = label
        torch.manual_seed(0)
        values.append(method.loss(method.loss_terms(batch)).item())
    assert values[0] == values[1]


def test_the_partial_form_labels_fewer_classes() -> None:
    found = {}
    for partial in (False, True):
        method = make_method("shot", partial=partial, min_images=20)
        survey = make_survey(method, 64)
        labels = torch.tensor([0] * 30 + [1] * 25 + [2] * 9)
        survey = dataclasses.replace(survey, probabilities_NC=torch.eye(CLASSES)[labels])
        found[partial] = set(method.label_target(survey).labels_N.tolist())
    assert found == {False: {0, 1, 2}, True: {0, 1}}


def test_adaptation_leaves_the_classifier_as_pretraining_made_it(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = tiny(method__name="shot", training__weight_decay=0.1, guard__action="warn")
    run = certvol.adapt(*folders, out=tmp_path / "run", **settings).path
    before, after = (read_tensors(run / f"{name}.safetensors") for name in ("pretrained", "model"))
    for key in before:
        fixed = key.startswith("network.classifier.output.")
        if key.endswith(("weight", "bias")):
            assert torch.equal(before[key], after[key]) is fixed, key
