import dataclasses

import pytest
import torch
from torch import Tensor

import references
from certvol.methods._base import Batch
from certvol.methods.ufal import feature_alignment, filtered
from support.methods import CLASSES, fitted, make_batch, make_method, make_survey
from support.plain_steps import Weights, assert_steps_are, common_logits, features_of


@pytest.mark.parametrize("double", [False, True])
def test_alignment_equals_the_formula(double: bool) -> None:
    features, means = torch.randn(5, 3), torch.randn(4, 3)
    q = torch.rand(5, 4).softmax(1)
    found = feature_alignment(features, means, q, double)
    expected = [
        references.feature_alignment(f.tolist(), means.tolist(), s.tolist(), double)
        for f, s in zip(features, q, strict=True)
    ]
    assert found.tolist() == pytest.approx(expected, rel=1e-4)


def test_alignment_of_a_feature_on_its_mean_far_from_the_others_is_0() -> None:
    means = torch.tensor([[0.0, 0.0], [30.0, 0.0]])
    value = feature_alignment(
        torch.zeros(1, 2), means, torch.tensor([[1.0, 0.0]]), double_softmax=False
    )
    assert value.item() == pytest.approx(0, abs=1e-6)


def test_the_filter_drops_what_is_spread_and_floors_what_is_small() -> None:
    sure, spread = [0.9, 0.04, 0.03, 0.03], [0.3, 0.3, 0.3, 0.1]
    q, kept = filtered(torch.tensor([sure, spread]), floor=0.05)
    assert kept.tolist() == [True, False]
    assert q[0].tolist() == pytest.approx([0.9 / 0.90003, *[1e-5 / 0.90003] * 3])
    assert q.sum(1).tolist() == pytest.approx([1, 1])


def test_the_top_quarter_of_classes_counts() -> None:
    q = torch.tensor([[0.26, 0.26, 0.24, 0.24, 0, 0, 0, 0]])  # 2 of 8 classes hold 0.52
    assert filtered(q, 0.05)[1].tolist() == [True]


def test_means_are_of_drawn_classes_then_of_labels_then_of_all() -> None:
    method = make_method("ufal", mean_draws=1)
    features = torch.tensor([[0.0], [2.0], [4.0], [9.0]])
    drawn, labels = torch.tensor([0, 0, 1, 2]), torch.tensor([0, 0, 2, 2])
    kept = torch.tensor([True, True, True, False])
    means = method._means(features, drawn, labels, kept)
    # Class 2 was drawn by a skipped image: its pseudo-labels replace it. Class 3 has neither.
    assert means[:, 0].tolist() == [1.0, 4.0, 6.5, 3.75]


def test_left_out_images_have_no_label_and_the_means_are_of_this_survey() -> None:
    method = make_method("ufal")
    method.network.classifier.output.weight.data.mul_(0.0)  # equal probabilities
    method.network.classifier.output.bias.data.zero_()
    survey = make_survey(method, 64)
    with torch.no_grad():
        labelled = method.label_target(survey)
    assert (labelled.labels_N == -1).all()
    means = method.class_means_RCD[0]
    assert torch.allclose(
        means[0], survey.features_ND.mean(0), atol=1e-5
    )  # all images: argmax of equal values is class 0
    assert torch.allclose(means[3], survey.features_ND.mean(0), atol=1e-5)
    assert labelled.tables["soft_labels"].shape == (64, CLASSES)


def test_sets_of_means_differ_by_what_was_drawn() -> None:
    method = make_method("ufal", mean_draws=3, floor=0.0, drop=0.3)
    method.network.classifier.output.weight.data.mul_(20)  # sharp enough for the filter
    with torch.no_grad():
        method.label_target(make_survey(method, 64))
    first, second, _ = method.class_means_RCD
    assert first.shape == (CLASSES, method.network.info.dim)
    assert not torch.equal(first, second)


def test_classes_of_the_means_are_drawn_with_the_probabilities_of_the_soft_labels() -> None:
    method = make_method("ufal", passes=1, drop=0.0, floor=0.0)
    of_ones, of_zeros = torch.tensor([0.6, 0.2, 0.1, 0.1]), torch.tensor([0.2, 0.6, 0.1, 0.1])
    output = method.network.classifier.output
    output.weight.data.zero_()[:, 0] = of_ones.log() - of_zeros.log()
    output.bias.data.copy_(of_zeros.log())
    features = torch.zeros(4000, method.network.info.dim)
    features[:2000, 0] = 1.0
    with torch.no_grad():
        survey = dataclasses.replace(make_survey(method, 4000), features_ND=features)
        q = method.label_target(survey).tables["soft_labels"]
    assert torch.allclose(q[[0, -1]], torch.stack([of_ones, of_zeros]), atol=1e-5)
    # The mean of a class is the share of ones among those that drew it.
    for label, share in enumerate(of_ones / (of_ones + of_zeros)):
        assert method.class_means_RCD[:, label, 0].mean().item() == pytest.approx(
            share.item(), abs=0.04
        )


def test_whole_steps_in_plain_pytorch_give_equal_weights() -> None:
    method = make_method("ufal", mean_draws=1, label_smoothing=0.2, alignment_weight=0.5)

    def loss(weights: Weights, batch: Batch) -> Tensor:
        features = features_of(weights, batch.inputs)
        log = torch.log_softmax(common_logits(weights, features), 1)
        hard = torch.eye(CLASSES)[batch.labels_N]
        share = torch.where(torch.arange(16)[:, None] < 8, hard * 0.8 + (1 - hard) * 0.2 / 3, hard)
        means = method.class_means_RCD[0]
        distance = ((features[8:, None] - means) ** 2).sum(2)
        scores = torch.softmax(torch.softmax(-distance, 1), 1)
        aligned = -(batch.tables["soft_labels"] * scores.log()).sum(1).mean()
        return -(share * log).sum(1).mean() + 0.5 * aligned

    assert_steps_are(method, loss, atol=2e-5)  # squared distances of 60 are rounded at 1e-5


def test_features_of_zero_give_finite_losses() -> None:
    method = make_method("ufal").train()
    batch = fitted(method, make_batch())
    batch.inputs.zero_()
    assert all(torch.isfinite(value) for value in method.loss_terms(batch).values())
