import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from certvol.methods._base import Batch
from certvol.methods.atdoc import neighbour_labels
from support import naive_losses as naive
from support.methods import CLASSES, fitted, make_batch, make_method, make_survey
from support.plain_steps import Weights, assert_steps_are, linear, rows_behind_bottleneck


def test_labels_and_weights_are_those_of_the_loops() -> None:
    torch.manual_seed(0)
    rows, p = torch.randn(30, 5), (2 * torch.randn(30, 4)).softmax(1)
    labels, weights = neighbour_labels(rows, p, 5)
    expected = naive.neighbour_labels(rows, p, 5)
    assert labels.tolist() == [label for label, _ in expected]
    assert weights.tolist() == pytest.approx([weight for _, weight in expected], rel=1e-4)


@pytest.mark.parametrize("neighbours", [2, 9])
def test_the_target_is_labelled_by_neighbours_behind_the_bottleneck(neighbours: int) -> None:
    method = make_method("atdoc", neighbours=neighbours, bottleneck=12)
    survey = make_survey(method, 40)
    p = (2 * torch.randn(40, CLASSES, generator=torch.Generator().manual_seed(1))).softmax(1)
    labelled = method.label_target(dataclasses.replace(survey, probabilities_NC=p))
    with torch.no_grad():
        rows = method.head.bottleneck(survey.features_ND)
    expected = naive.neighbour_labels(rows, p, neighbours)
    assert labelled.labels_N.tolist() == [label for label, _ in expected]
    weights = labelled.tables["weights"].tolist()
    assert weights == pytest.approx([weight for _, weight in expected], rel=1e-4)
    unprojected = naive.neighbour_labels(survey.features_ND, p, neighbours)
    assert expected != unprojected


def test_an_image_gets_the_label_of_its_neighbours_and_not_its_own() -> None:
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.01], [1.0, 0.02], [0.0, 1.0], [0.01, 1.0]])
    p = torch.tensor([[0.1, 0.9], [0.9, 0.1], [0.9, 0.1], [0.1, 0.9], [0.1, 0.9]])
    assert neighbour_labels(rows, p, 2)[0].tolist()[0] == 0
    assert neighbour_labels(rows, p, 1)[0].tolist()[3:] == [1, 1]


def test_a_class_without_any_prediction_and_a_single_image_give_finite_weights() -> None:
    p = torch.eye(3)[torch.tensor([0, 0, 1])]
    labels, weights = neighbour_labels(torch.randn(3, 2), p, 2)
    assert set(labels.tolist()) <= {0, 1}
    assert torch.isfinite(weights).all()
    labels, weights = neighbour_labels(torch.ones(1, 2), p[:1], 5)
    assert labels.tolist() == [0]
    assert weights.tolist() == [1]


def test_whole_steps_in_plain_pytorch_give_equal_weights() -> None:
    def loss(weights: Weights, batch: Batch) -> Tensor:
        rows = rows_behind_bottleneck(weights, batch.inputs)
        log_p = torch.log_softmax(linear(weights, "network.classifier.output", rows), 1)
        goal = F.one_hot(batch.labels_N[:8], CLASSES) * (1 - 0.1 - 0.1 / 3) + 0.1 / 3
        source = -(goal * log_p[:8]).sum(1).mean()
        near = batch.tables["weights"] / batch.tables["weights"].sum()
        target = -(near * log_p[8:][torch.arange(8), batch.labels_N[8:]]).sum()
        return source + 3 * 0.5 * target

    assert_steps_are(make_method("atdoc", weight=3.0, bottleneck=12), loss)


def test_the_target_does_not_count_at_the_start_nor_without_weights() -> None:
    method = make_method("atdoc").train()
    batch = fitted(method, make_batch())
    batch.tables["weights"].zero_()
    assert method.loss_terms(batch)["neighbour_ce"].item() == 0
    batch = fitted(method, make_batch())
    batch.progress.zero_()
    assert method.loss_terms(batch)["neighbour_ce"].item() == 0
