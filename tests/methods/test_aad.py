import pytest
import torch
from torch import Tensor

from certvol.methods._base import Batch
from certvol.methods.aad import agreement_with_others
from support import naive_losses as naive
from support.methods import fitted, make_batch, make_method, make_survey
from support.plain_steps import Weights, assert_steps_are, linear, rows_behind_bottleneck


def test_equal_sure_rows_agree_with_all_others_and_different_ones_with_none() -> None:
    assert agreement_with_others(torch.eye(4)[[2, 2, 2]]).tolist() == [2, 2, 2]
    assert agreement_with_others(torch.eye(4)).tolist() == [0, 0, 0, 0]


def test_terms_are_those_of_the_loops() -> None:
    method = make_method("aad", decay=2.0, neighbours=4).train()
    method.network.classifier.dropout = 0.0
    survey = make_survey(method, 64)
    with torch.no_grad():
        rows = method.eval().head.bottleneck(survey.features_ND)
    near = naive.nearest_others(rows, 4)
    expected_near = survey.probabilities_NC[torch.tensor(near)].sum(1)
    assert torch.allclose(method.label_target(survey).tables["near"], expected_near)
    method.train()
    batch = fitted(method, make_batch())
    with torch.no_grad():
        logits = method.network.classifier(method.network.features(batch.inputs))
    terms = method.loss_terms(batch)
    neighbours = [[row] for row in batch.tables["near"].tolist()]
    attracted, dispersed = naive.attraction_and_dispersion(logits[8:].softmax(1), neighbours)
    assert terms["attraction"].item() == pytest.approx(attracted, rel=1e-4)
    assert terms["dispersion"].item() == pytest.approx(dispersed / 36, rel=1e-4)


def test_whole_steps_in_plain_pytorch_give_equal_weights() -> None:
    def loss(weights: Weights, batch: Batch) -> Tensor:
        rows = rows_behind_bottleneck(weights, batch.inputs)[8:]
        p = torch.softmax(linear(weights, "network.classifier.output", rows), 1)
        attraction = torch.einsum("nc,nc->", p, batch.tables["near"]) / 8
        products = p @ p.T
        dispersion = (products.sum() - products.trace()) / 8
        return dispersion * 6**-0.5 - attraction

    assert_steps_are(make_method("aad", decay=0.5, bottleneck=12), loss)


def test_few_images_have_fewer_neighbours() -> None:
    method = make_method("aad", neighbours=5)
    for images in (1, 3):
        near = method.label_target(make_survey(method, images)).tables["near"]
        assert near.shape == (images, 4)
        assert near.sum(1).tolist() == pytest.approx([images - 1] * images, abs=1e-5)
