import dataclasses

import pytest
import torch
from torch import Tensor

from certvol.methods._base import Batch
from certvol.methods.mic import masked_inputs
from support.methods import fitted, make_batch, make_method
from support.plain_steps import (
    Weights,
    assert_steps_are,
    bottleneck_of,
    features_of,
    linear,
    negative_log_likelihood,
)


def test_whole_blocks_of_target_rows_are_masked_at_the_rate() -> None:
    batch = make_batch(n=200)
    batch = dataclasses.replace(batch, inputs=torch.ones(200, 3, 16, 16))
    found = masked_inputs(batch, 4, 0.7)
    assert found.shape == (100, 3, 16, 16)
    blocks = found.reshape(100, 3, 4, 4, 4, 4)
    assert torch.equal(blocks.amax((3, 5)), blocks.amin((3, 5)))
    assert set(found.unique().tolist()) == {0.0, 1.0}
    assert found.mean().item() == pytest.approx(0.3, abs=0.03)
    assert torch.equal(found[:, 0], found[:, 2])
    again = masked_inputs(dataclasses.replace(batch, generator=make_batch().generator), 4, 0.0)
    assert torch.equal(again, batch.inputs[100:])


def test_a_row_gets_the_same_mask_in_a_share_of_the_batch() -> None:
    whole = masked_inputs(make_batch(), 4, 0.5)
    rows = torch.tensor([0, 1, 10, 15])
    batch = make_batch()
    share = dataclasses.replace(batch, inputs=batch.inputs[rows], rows=rows, num_source=2)
    assert torch.equal(masked_inputs(share, 4, 0.5), whole[[2, 7]])


def test_features_are_masked_by_dimension_and_tiny_images_by_pixel() -> None:
    batch = dataclasses.replace(make_batch(), inputs=torch.ones(16, 400))
    found = masked_inputs(batch, 4, 0.7)
    assert found.shape == (8, 400)
    assert found.mean().item() == pytest.approx(0.3, abs=0.05)
    tiny = dataclasses.replace(make_batch(), inputs=torch.ones(16, 3, 2, 2))
    assert masked_inputs(tiny, 4, 0.7).shape == (8, 3, 2, 2)


@pytest.mark.parametrize("certain", [False, True])
def test_whole_steps_in_plain_pytorch_give_equal_weights(certain: bool) -> None:
    """Without the terms of SDAT, which has tests of its own."""
    method = make_method(
        "mic",
        weight=0.0,
        confusion_weight=0.0,
        radius=0.0,
        bottleneck=12,
        masked=0.4,
        consistency_weight=2.0,
        certain=certain,
        discriminator_width=20,
        teacher_decay=0.8,
    )
    teacher: Weights = {}

    def logits_of(weights: Weights, inputs: Tensor) -> Tensor:
        rows = bottleneck_of(weights, features_of(weights, inputs))
        return linear(weights, "network.classifier.output", rows)

    def loss(weights: Weights, batch: Batch) -> Tensor:
        for name, value in weights.items():
            value = value.detach()
            teacher[name] = 0.8 * teacher[name] + 0.2 * value if name in teacher else value.clone()
        sure, labels = torch.softmax(logits_of(teacher, batch.inputs[8:]), 1).max(1)
        ce = negative_log_likelihood(logits_of(weights, batch.inputs)[:8], batch.labels_N[:8])
        log_p = torch.log_softmax(logits_of(weights, masked_inputs(batch, 4, 0.4)), 1)
        each = -log_p[torch.arange(8), labels]
        return ce + 2 * (sure * each if certain else each).mean()

    assert_steps_are(method, loss)


def test_the_consistency_counts_in_the_loss_of_sam_but_the_discriminator_does_not() -> None:
    method = make_method("mic", consistency_weight=2.0).train()
    terms = method.loss_terms(fitted(method, make_batch()))
    others = {name: value for name, value in terms.items() if name != "consistency"}
    more = method.loss(terms) - method.loss(others)
    assert more.item() == pytest.approx(2 * terms["consistency"].item(), rel=1e-4)
    climbed = terms["ce"] + terms["confusion"] + 2 * terms["consistency"]
    assert method.sam_loss(terms).item() == pytest.approx(climbed.item(), rel=1e-5)


def test_the_teacher_decides_under_the_prior() -> None:
    method = make_method("mic").train()
    method.prior_shift_C = torch.tensor([-1e4, 0.0, -1e4, 0.0])
    labels, sure = method._taught(make_batch())
    assert set(labels.tolist()) <= {1, 3}
    assert (sure >= 0.5).all()


def test_the_teacher_sees_whole_images_without_dropout() -> None:
    method = make_method("mic").train()
    batch = make_batch()
    first, second = method._taught(batch), method._taught(batch)
    assert torch.equal(first[0], second[0])
    assert torch.allclose(first[1], second[1])
    terms = method.loss_terms(dataclasses.replace(batch, num_source=16))
    assert terms["consistency"].item() == 0
