import math

import pytest
import torch
from torch import Tensor

from certvol.methods._base import Batch
from certvol.methods.dta import adversarial_mask, class_balance, divergence
from support import naive_losses as naive
from support.methods import make_batch, make_method
from support.plain_steps import (
    Weights,
    assert_steps_are,
    features_of,
    linear,
    negative_log_likelihood,
)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 0.99])
def test_masks_are_those_of_the_loops(share: float) -> None:
    gradients = torch.randn(6, 20, generator=torch.Generator().manual_seed(0))
    gradients[0] = gradients[0].abs()
    found = adversarial_mask(gradients, torch.tensor(share))
    for row, mask in zip(gradients.tolist(), found.tolist(), strict=True):
        assert mask == pytest.approx(naive.adversarial_mask(row, share))
    assert found.sum(1).tolist() == pytest.approx([20] * 6)
    assert found[0].tolist() == [1] * 20, "no unit is dropped that keeps the predictions apart"


def test_a_mask_without_rows_is_empty_and_one_without_gradients_drops_nothing() -> None:
    assert adversarial_mask(torch.empty(0, 5), torch.tensor(0.4)).shape == (0, 5)
    assert adversarial_mask(torch.zeros(2, 5), torch.tensor(0.4)).tolist() == [[1] * 5] * 2


def test_divergence_and_balance_equal_their_formulas() -> None:
    logits, reference = torch.randn(5, 4), torch.randn(5, 4)
    total = 0.0
    for a, b in zip(logits.softmax(1).tolist(), reference.softmax(1).tolist(), strict=True):
        total += sum(q * math.log(q / p) for p, q in zip(a, b, strict=True))
    assert divergence(logits, reference).item() == pytest.approx(total / 20, rel=1e-4)
    assert divergence(logits, logits).item() == pytest.approx(0, abs=1e-7)
    shares = naive.column_means(logits.softmax(1).tolist())
    expected = -sum(math.log(share + 1e-6) for share in shares) / 4
    assert class_balance(logits).item() == pytest.approx(expected, rel=1e-5)
    assert class_balance(torch.zeros(3, 4)).item() == pytest.approx(math.log(4), rel=1e-4)
    assert class_balance(logits[:0]).item() == 0


def _logits(weights: Weights, rows: Tensor, units_mask: Tensor | None = None) -> Tensor:
    hidden = torch.relu(linear(weights, "network.classifier.first", rows))
    if units_mask is not None:
        hidden = hidden * units_mask
    return linear(weights, "network.classifier.output", hidden)


def _kl(logits: Tensor, reference: Tensor) -> Tensor:
    log_p, log_q = torch.log_softmax(logits, 1), torch.log_softmax(reference, 1)
    return (log_q.exp() * (log_q - log_p)).mean()


def test_whole_steps_in_plain_pytorch_give_equal_weights() -> None:
    def loss(weights: Weights, batch: Batch) -> Tensor:
        features = features_of(weights, batch.inputs)
        masks = batch.dropout_masks(features.detach(), 2, 0.2) / 0.8
        first, second = features * masks[:, 0], features * masks[:, 1]
        z1, z2 = _logits(weights, first), _logits(weights, second[:8])
        source = 2 * ((torch.softmax(z1[:8], 1) - torch.softmax(z2, 1)) ** 2).mean()
        source = source + negative_log_likelihood(z1[:8], batch.labels_N[:8])
        target, rows = z1[8:], second[8:]
        masks_of = []
        for units in (False, True):
            mask = torch.ones(8, 14 if units else rows.shape[1], requires_grad=True)
            given = (rows.detach(), mask) if units else (rows.detach() * mask, None)
            (gradient,) = torch.autograd.grad(_kl(_logits(weights, *given), target.detach()), mask)
            share = 0.5 * (0.6 if units else 0.3)
            plain = [naive.adversarial_mask(row, share) for row in gradient.tolist()]
            assert any(0 in row for row in plain)
            masks_of.append(torch.tensor(plain))
        without = _logits(weights, rows * masks_of[0])
        unitless = _logits(weights, rows, masks_of[1])
        log_p = torch.log_softmax(target, 1)
        balance = sum(-(torch.softmax(z, 1).mean(0) + 1e-6).log().mean() for z in (target, without))
        unsure = -(log_p.exp() * log_p).sum(1).mean()
        agree = 2 * _kl(without, target) + 2 * _kl(unitless, target)
        return source + agree + 0.02 * unsure + 0.01 * balance

    settings = {"width": 14, "feature_drop": 0.2, "channel_drop": 0.3, "unit_drop": 0.6}
    assert_steps_are(make_method("dta", **settings), loss)


def test_adversarial_masks_raise_the_divergence_more_than_shuffled_ones() -> None:
    method = make_method("dta", width=40, channel_drop=0.4, unit_drop=0.4).train()
    method.network.classifier.dropout = 0.0
    batch = make_batch(n=64)
    with torch.no_grad():
        features = method.network.features(batch.inputs)
        reference = method.head(features * (torch.rand_like(features) > 0.3))
        masks = method._adversarial_masks(batch, reference, features)
        hidden = method.head.units(features)
        for mask, of_units in zip(masks, (False, True), strict=True):
            assert (mask == 0).any()
            shuffled = torch.stack([row[torch.randperm(len(row))] for row in mask])
            found = [
                divergence(
                    method.head.classify(hidden * chosen)
                    if of_units
                    else method.head(features * chosen),
                    reference,
                ).item()
                for chosen in (mask, shuffled)
            ]
            assert found[0] > found[1]
