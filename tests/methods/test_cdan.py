import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from certvol.methods._base import Batch
from certvol.methods.cdan import OuterProduct, RandomProduct
from support.methods import CLASSES, make_batch, make_method
from support.plain_steps import (
    LAMBDA,
    Weights,
    adversarial,
    assert_steps_are,
    bottleneck_of,
    features_of,
    linear,
    negative_log_likelihood,
)


def test_the_map_is_the_outer_product_of_each_row() -> None:
    rows, p = torch.randn(5, 3), torch.rand(5, 4)
    for mapped, row, share in zip(OuterProduct()(rows, p), rows, p, strict=True):
        assert torch.equal(mapped, torch.outer(row, share).flatten())


def test_the_random_map_keeps_inner_products_of_outer_products() -> None:
    torch.manual_seed(0)
    rows, p = torch.randn(2, 6), torch.rand(2, 4)
    outer, random = OuterProduct()(rows, p), RandomProduct(6, 4, 200_000)(rows, p)
    assert torch.allclose(random @ random.T, outer @ outer.T, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("product", ["outer", "random"])
@pytest.mark.parametrize("entropy", [False, True])
def test_whole_steps_in_plain_pytorch_give_equal_weights(product: str, entropy: bool) -> None:
    settings: dict[str, Any] = {
        "entropy": entropy,
        "product": product,
        "random_dim": 11,
        "bottleneck": 12,
        "discriminator_width": 20,
    }
    method = make_method("cdan", **settings)
    maps = [value.clone() for name, value in method.named_buffers() if "random" in name]

    def loss(weights: Weights, batch: Batch) -> Tensor:
        rows = bottleneck_of(weights, features_of(weights, batch.inputs))
        logits = linear(weights, "network.classifier.output", rows)
        p = torch.softmax(logits, 1).detach()
        if product == "outer":
            joined = torch.stack(
                [torch.outer(row, share).flatten() for row, share in zip(rows, p, strict=True)]
            )
        else:
            joined = (rows @ maps[0]) * (p @ maps[1]) / 11**0.5
        certainty = 1 + torch.exp((p * p.log()).sum(1)) if entropy else None
        return negative_log_likelihood(logits[:8], batch.labels_N[:8]) + sum(
            adversarial(weights, joined, 8, LAMBDA, certainty)
        )

    assert_steps_are(method, loss)


@pytest.mark.parametrize(("width", "kind"), [(1024, OuterProduct), (1025, RandomProduct)])
def test_a_long_product_is_a_random_one(width: int, kind: type) -> None:
    assert CLASSES == 4
    assert isinstance(make_method("cdan", bottleneck=width, discriminator_width=8).product, kind)


def test_sure_and_absent_classes_give_finite_losses() -> None:
    method = make_method("cdan").train()
    with torch.no_grad():
        method.network.classifier.output.weight.mul_(1e5)
    batch = dataclasses.replace(make_batch(), labels_N=torch.full((16,), 2))
    terms = method.loss_terms(batch)
    method.loss(terms).backward()
    assert all(torch.isfinite(value) for value in terms.values())
    assert all(torch.isfinite(p.grad).all() for p in method.parameters())
