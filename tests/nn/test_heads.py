import math

import pytest
import torch
from torch import nn

from certvol.losses import antagonistic, samples_cross_entropy
from certvol.nn.heads import Classifier, SigmaHead
from certvol.nn.sampling import sample_features


def standard_noise(mu_ND: torch.Tensor, num_samples: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(len(mu_ND), num_samples, mu_ND.shape[1], generator=generator)


def test_two_layer_classifier_starts_as_its_output_layer_on_positive_features() -> None:
    classifier = Classifier(6, 3, layers=2).eval()
    features_ND = torch.rand(4, 6)
    assert torch.allclose(classifier(features_ND), classifier.output(features_ND))


def test_one_layer_classifier_is_linear() -> None:
    classifier = Classifier(6, 3, layers=1).eval()
    x, y = torch.randn(2, 4, 6)
    bias = classifier(torch.zeros(1, 6))
    assert torch.allclose(classifier(x + y) + bias, classifier(x) + classifier(y), atol=1e-5)


def test_dropout_acts_in_training_and_on_demand_but_not_in_evaluation() -> None:
    classifier = Classifier(64, 3, dropout=0.5)
    features_ND = torch.rand(1, 64)
    classifier.eval()
    assert torch.equal(classifier(features_ND), classifier(features_ND))
    assert not torch.equal(classifier(features_ND, dropout=0.85), classifier(features_ND, dropout=0.85))
    classifier.train()
    assert not torch.equal(classifier(features_ND), classifier(features_ND))


def test_sigma_is_softplus_of_two_layers() -> None:
    head = SigmaHead(5)
    x_ND = torch.randn(7, 5)
    hidden = x_ND @ head.hidden.weight.T + head.hidden.bias
    hidden = torch.where(hidden > 0, hidden, 0.01 * hidden)
    width = (hidden @ head.output.weight.T + head.output.bias).squeeze(1)
    assert torch.allclose(head(x_ND), torch.log1p(width.exp()), atol=1e-6)


def test_sigma_is_positive_float32_and_its_gradient_reaches_the_features() -> None:
    head = SigmaHead(5)
    x_ND = torch.randn(7, 5, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sigma_N = head(x_ND)
    assert sigma_N.dtype == torch.float32
    assert (sigma_N > 0).all()
    sigma_N.sum().backward()
    assert x_ND.grad is not None
    assert x_ND.grad.abs().sum() > 0


def test_a_switched_off_sigma_head_still_learns() -> None:
    """All hidden units below zero: with plain ReLUs no gradient would reach the first layer again."""
    head = SigmaHead(5)
    with torch.no_grad():
        head.hidden.bias.fill_(-100)
    head(torch.rand(7, 5)).sum().backward()
    assert head.hidden.weight.grad is not None
    assert head.hidden.weight.grad.abs().sum() > 0


def test_samples_have_the_mean_and_the_width_that_were_asked_for() -> None:
    generator = torch.Generator().manual_seed(0)
    mu_ND, sigma_N = torch.tensor([[1.0, -2.0], [0.0, 5.0]]), torch.tensor([0.5, 2.0])
    phi_NMD = sample_features(mu_ND, sigma_N, standard_noise(mu_ND, 20_000, generator))
    assert phi_NMD.shape == (2, 20_000, 2)
    assert torch.allclose(phi_NMD.mean(1), mu_ND, atol=0.06)
    assert torch.allclose(phi_NMD.std(1), sigma_N[:, None].expand(2, 2), rtol=0.03)


def _sigma_gradient(samples_weight: float, antagonistic_weight: float, sigma: float) -> float:
    """Of the CVP losses by sigma, at a feature one unit from the boundary of a fixed two-class linear classifier."""
    mu_ND, labels_N = torch.tensor([[1.0, 0.0]]), torch.tensor([0])
    sigma_N = torch.tensor([sigma], requires_grad=True)
    noise_NMD = standard_noise(mu_ND, 4000, torch.Generator().manual_seed(0))
    phi_NMD = sample_features(mu_ND, sigma_N, noise_NMD)
    logits_NMC = torch.stack([phi_NMD[..., 0], -phi_NMD[..., 0]], dim=-1)
    ce_N = samples_cross_entropy(logits_NMC, labels_N)
    (samples_weight * ce_N + antagonistic_weight * antagonistic(sigma_N, ce_N, 2)).sum().backward()
    assert sigma_N.grad is not None
    return sigma_N.grad.item()


def test_samples_cross_entropy_alone_shrinks_sigma() -> None:
    assert _sigma_gradient(1.0, 0.0, sigma=1.0) > 0


def test_the_antagonistic_term_widens_a_small_sigma_against_the_samples() -> None:
    assert _sigma_gradient(0.5, 1.0, sigma=0.01) < 0


@pytest.mark.parametrize(("with_antagonist", "collapses"), [(False, True), (True, False)])
def test_without_the_antagonist_sigma_collapses(with_antagonist: bool, collapses: bool) -> None:
    torch.manual_seed(0)
    mu_ND = torch.cat([torch.randn(32, 4) + 0.7, torch.randn(32, 4) - 0.7])
    labels_N = torch.arange(64) // 32
    classifier, head = nn.Linear(4, 2), SigmaHead(4)
    optimizer = torch.optim.SGD([*classifier.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    for _ in range(300):
        sigma_N = head(mu_ND)
        phi_NMD = sample_features(mu_ND, sigma_N, standard_noise(mu_ND, 32, generator))
        ce_N = samples_cross_entropy(classifier(phi_NMD), labels_N)
        loss = ce_N.mean() + (antagonistic(sigma_N, ce_N, 2).mean() if with_antagonist else 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    median = head(mu_ND).median().item()
    assert (median < 0.1) == collapses
    assert median < math.log(2) + 0.1
