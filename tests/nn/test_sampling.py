"""Samples drawn as logits are distributed as those of features through the same linear layer."""

import pytest
import torch
from torch import Tensor

from certvol.losses import samples_cross_entropy
from certvol.nn.sampling import sample_features, sample_logits

D, C, M = 12, 4, 200_000


def setting(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mu = torch.randn(2, D, generator=generator, dtype=torch.float64)
    weight = torch.randn(C, D, generator=generator, dtype=torch.float64) / D**0.5
    bias = torch.randn(C, generator=generator, dtype=torch.float64)
    return mu, torch.tensor([0.5, 2.0], dtype=torch.float64), weight, bias


def drawn(mu: Tensor, sigma: Tensor, weight: Tensor, bias: Tensor, as_logits: bool) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if as_logits:
        noise = torch.randn(len(mu), M, C, generator=generator, dtype=torch.float64)
        return sample_logits(mu @ weight.T + bias, sigma, weight, noise)
    noise = torch.randn(len(mu), M, D, generator=generator, dtype=torch.float64)
    return sample_features(mu, sigma, noise) @ weight.T + bias


def test_moments_are_those_of_the_closed_form() -> None:
    mu, sigma, weight, bias = setting()
    logits = drawn(mu, sigma, weight, bias, as_logits=True)
    for i in range(2):
        assert torch.allclose(logits[i].mean(0), weight @ mu[i] + bias, atol=0.03)
        expected = sigma[i] ** 2 * weight @ weight.T
        assert torch.allclose(logits[i].T.cov(), expected, atol=0.03 * float(expected.max()))


@pytest.mark.parametrize("label", [0, 3])
def test_expected_loss_and_its_gradients_are_those_of_samples_of_features(label: int) -> None:
    found = []
    for as_logits in (True, False):
        leaves = [tensor.clone().requires_grad_() for tensor in setting()]
        loss = samples_cross_entropy(drawn(*leaves, as_logits=as_logits), torch.tensor([label, label])).mean()
        loss.backward()
        found.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*found, strict=True):
        assert torch.allclose(ours.double(), theirs.double(), atol=0.01)
        assert ours.abs().max() > 0.03  # there was something to compare


def test_a_singular_covariance_and_weights_of_zero_stay_finite() -> None:
    for weight in (torch.ones(5, 3), torch.zeros(5, 3)):
        weight.requires_grad_()
        sigma = torch.ones(2, requires_grad=True)
        logits = sample_logits(torch.zeros(2, 5), sigma, weight, torch.randn(2, 7, 5))
        samples_cross_entropy(logits, torch.tensor([0, 1])).sum().backward()
        assert logits.isfinite().all()
        assert weight.grad is not None
        assert weight.grad.isfinite().all()
        assert sigma.grad is not None
        assert sigma.grad.isfinite().all()


def test_without_width_all_samples_are_the_mean() -> None:
    mean = torch.randn(3, C)
    logits = sample_logits(mean, torch.zeros(3), torch.randn(C, D), torch.randn(3, 8, C))
    assert torch.equal(logits, mean[:, None].expand(-1, 8, -1))
