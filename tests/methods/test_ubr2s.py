import pytest
import torch
from torch import Tensor

import references
from certvol.methods._base import Batch
from certvol.methods.ubr2s import draw_weights, resampled
from support.methods import CLASSES, make_method, make_survey
from support.plain_steps import Weights, assert_steps_are, common_logits, features_of


def test_weights_are_those_of_the_formula() -> None:
    torch.manual_seed(0)
    mean, deviation = torch.rand(20, 4), 0.05 + 0.2 * torch.rand(20, 4)
    r, labels = resampled(mean, deviation, torch.randn(20, 3, 4))
    found = draw_weights(r, labels, mean, deviation)
    expected = [
        references.draw_weight(*row)
        for row in zip(r.tolist(), labels.tolist(), mean.tolist(), deviation.tolist(), strict=True)
    ]
    assert found.tolist() == pytest.approx(expected, abs=1e-5)
    assert 0 <= found.min() < found.max() <= 1


def test_a_sure_image_keeps_its_label_and_counts_fully() -> None:
    mean, deviation = torch.tensor([[1.0, 0.0, 0.0]]), torch.zeros(1, 3)
    r, labels = resampled(mean, deviation, torch.randn(1, 3, 3))
    assert torch.equal(r, mean)
    assert labels.tolist() == [0]
    assert draw_weights(r, labels, mean, deviation).tolist() == [1.0]


def test_a_draw_two_deviations_away_counts_nothing() -> None:
    mean, deviation = torch.tensor([[0.5, 0.0]]), torch.full((1, 2), 0.1)
    assert draw_weights(
        torch.tensor([[0.7, 0.0]]), torch.tensor([0]), mean, deviation
    ).item() == pytest.approx(0, abs=1e-6)


def test_labels_are_drawn_as_often_as_their_share_says() -> None:
    torch.manual_seed(1)
    share = torch.tensor([0.6, 0.3, 0.1, 0.0])
    _, labels = resampled(share.expand(20000, -1), torch.zeros(20000, 4), torch.randn(20000, 3, 4))
    assert (torch.bincount(labels, minlength=4) / 20000).tolist() == pytest.approx(
        share.tolist(), abs=0.015
    )


def test_pseudo_labels_are_the_largest_means() -> None:
    method = make_method("ubr2s", passes=8)
    with torch.no_grad():
        labelled = method.label_target(make_survey(method, 32))
    assert torch.equal(labelled.labels_N, labelled.tables["mean"].argmax(1))
    assert labelled.tables["mean"].sum(1).tolist() == pytest.approx([1.0] * 32, abs=1e-5)
    assert (labelled.tables["deviation"] > 0).all()


def test_whole_steps_in_plain_pytorch_give_equal_weights() -> None:
    def loss(weights: Weights, batch: Batch) -> Tensor:
        log = torch.log_softmax(common_logits(weights, features_of(weights, batch.inputs)), 1)
        hard = torch.eye(CLASSES)[batch.labels_N[:8]]
        source = -((hard * 0.75 + (1 - hard) * 0.25 / 3) * log[:8]).sum(1)
        noise = torch.randn(16, 3, CLASSES, generator=batch.generator)[8:]
        mean, deviation = batch.tables["mean"], batch.tables["deviation"]
        r = (mean + deviation * noise[:, 0]).clamp(0, 1)
        labels = (r / ((noise[:, 1] ** 2 + noise[:, 2] ** 2) / 2)).argmax(1)
        rows = zip(r.tolist(), labels.tolist(), mean.tolist(), deviation.tolist(), strict=True)
        drawn = torch.tensor([references.draw_weight(*row) for row in rows])
        target = -log[8:][torch.arange(8), labels] * drawn / drawn.mean()
        return torch.cat([source, target]).mean()

    assert_steps_are(make_method("ubr2s", passes=6), loss)
