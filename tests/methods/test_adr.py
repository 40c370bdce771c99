import math

import pytest
import torch
from torch import Tensor

from certvol.methods._base import Batch
from certvol.methods.adr import disagreement
from support.methods import make_batch, make_method
from support.plain_steps import (
    Weights,
    assert_steps_are,
    common_logits,
    features_of,
    linear,
    negative_log_likelihood,
)


def test_disagreement_is_the_symmetric_divergence_over_rows_and_classes() -> None:
    first, second = torch.randn(5, 4), torch.randn(5, 4)
    total = 0.0
    for a, b in zip(first.softmax(1).tolist(), second.softmax(1).tolist(), strict=True):
        for p, q in zip(a, b, strict=True):
            total += 0.5 * (q * math.log(q / p) + p * math.log(p / q))
    assert disagreement(first, second).item() == pytest.approx(total / 20, rel=1e-5)
    assert disagreement(second, first).item() == pytest.approx(total / 20, rel=1e-5)
    assert disagreement(first, first).item() == 0
    assert disagreement(first[:0], second[:0]).item() == 0


def test_whole_steps_in_plain_pytorch_give_equal_weights() -> None:
    def loss(weights: Weights, batch: Batch) -> Tensor:
        features = features_of(weights, batch.inputs)
        masks = batch.dropout_masks(features.detach(), 4, 0.3)[8:] / 0.7
        parts = []
        for own in (True, False):
            used = {name: value if own else value.detach() for name, value in weights.items()}
            rows = (features.detach() if own else features)[8:]
            draws = []
            for number in (0, 2):
                x = linear(used, "network.classifier.hidden", rows * masks[:, number])
                x = torch.relu(x) * masks[:, number + 1]
                x = linear(used, "network.classifier.output", x)
                draws.append(torch.log_softmax(x, 1))
            a, b = draws
            kl = [(q.exp() * (q - p)).mean() for p, q in ((a, b.detach()), (b, a.detach()))]
            parts.append((kl[0] + kl[1]) / 2)
        ce = negative_log_likelihood(common_logits(weights, features)[:8], batch.labels_N[:8])
        return ce - 2 * parts[0] + 2 * 3 * parts[1]

    assert_steps_are(make_method("adr", weight=2.0, drop=0.3, generator_steps=3.0), loss)


def test_the_classifier_widens_the_disagreement_and_the_backbone_narrows_it() -> None:
    found = {}
    for name in ("network.classifier.", "network.backbone."):
        method = make_method("adr").train()
        values = []
        for _ in range(2):
            terms = method.loss_terms(make_batch())
            values.append(-terms["disagreement"].item())
            method.zero_grad()
            terms["disagreement"].backward()
            with torch.no_grad():
                for key, weight in method.named_parameters():
                    if key.startswith(name):
                        weight -= 0.01 * weight.grad
        found[name] = values[1] - values[0]
    assert found["network.classifier."] > 0
    assert found["network.backbone."] < 0
