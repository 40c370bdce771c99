import math

import pytest
import torch
from torch import Tensor, nn

from certvol.methods._losses import antagonistic, samples_cross_entropy
from certvol.nn.heads import (
    MC_ROWS,
    Classifier,
    SigmaHead,
    mc_dropout,
    sample_features,
    sample_logits,
)


def standard_noise(mu_ND: Tensor, num_samples: int, generator: torch.Generator) -> Tensor:
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
    drop = nn.Dropout(0.85)
    assert not torch.equal(classifier(features_ND, drop), classifier(features_ND, drop))
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
    """With all units below zero, plain ReLUs would pass no gradient to the first layer."""
    head = SigmaHead(5)
    with torch.no_grad():
        head.hidden.bias.fill_(-100)
    head(torch.rand(7, 5)).sum().backward()
    assert head.hidden.weight.grad is not None
    assert head.hidden.weight.grad.abs().sum() > 0


def test_samples_have_the_mean_and_width_they_are_given() -> None:
    generator = torch.Generator().manual_seed(0)
    mu_ND, sigma_N = torch.tensor([[1.0, -2.0], [0.0, 5.0]]), torch.tensor([0.5, 2.0])
    phi_NMD = sample_features(mu_ND, sigma_N, standard_noise(mu_ND, 20_000, generator))
    assert phi_NMD.shape == (2, 20_000, 2)
    assert torch.allclose(phi_NMD.mean(1), mu_ND, atol=0.06)
    assert torch.allclose(phi_NMD.std(1), sigma_N[:, None].expand(2, 2), rtol=0.03)


def _sigma_gradient(samples_weight: float, antagonistic_weight: float, sigma: float) -> float:
    """Return the gradient of CVP's losses by sigma.

    The feature lies one unit from the boundary of a fixed linear classifier of two classes.
    """
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
    optimizer = torch.optim.SGD(
        [*classifier.parameters(), *head.parameters()], lr=0.1, momentum=0.9
    )
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


D, C, M = 12, 4, 200_000


def _head(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mu = torch.randn(2, D, generator=generator, dtype=torch.float64)
    weight = torch.randn(C, D, generator=generator, dtype=torch.float64) / D**0.5
    bias = torch.randn(C, generator=generator, dtype=torch.float64)
    return mu, torch.tensor([0.5, 2.0], dtype=torch.float64), weight, bias


def _drawn(mu: Tensor, sigma: Tensor, weight: Tensor, bias: Tensor, as_logits: bool) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    if as_logits:
        noise = torch.randn(len(mu), M, C, generator=generator, dtype=torch.float64)
        return sample_logits(mu @ weight.T + bias, sigma, weight, noise)
    noise = torch.randn(len(mu), M, D, generator=generator, dtype=torch.float64)
    return sample_features(mu, sigma, noise) @ weight.T + bias


def test_moments_are_those_of_the_closed_form() -> None:
    mu, sigma, weight, bias = _head()
    logits = _drawn(mu, sigma, weight, bias, as_logits=True)
    for i in range(2):
        assert torch.allclose(logits[i].mean(0), weight @ mu[i] + bias, atol=0.03)
        expected = sigma[i] ** 2 * weight @ weight.T
        assert torch.allclose(logits[i].T.cov(), expected, atol=0.03 * float(expected.max()))


@pytest.mark.parametrize("label", [0, 3])
def test_expected_loss_and_its_gradients_are_those_of_samples_of_features(label: int) -> None:
    found = []
    for as_logits in (True, False):
        leaves = [tensor.clone().requires_grad_() for tensor in _head()]
        mu, sigma, weight, bias = leaves
        logits = _drawn(mu, sigma, weight, bias, as_logits)
        loss = samples_cross_entropy(logits, torch.tensor([label, label])).mean()
        found.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
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


def _classifier(layers: int, images: int = 9) -> tuple[Tensor, Classifier]:
    torch.manual_seed(layers)
    classifier = Classifier(6, 4, layers).eval().requires_grad_(False)
    for parameter in classifier.parameters():
        nn.init.normal_(parameter)
    return torch.randn(images, 6), classifier


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("shared", [False, True])
def test_mc_dropout_without_dropout_is_the_classifier(layers: int, shared: bool) -> None:
    features, classifier = _classifier(layers)
    mean, deviation = mc_dropout(classifier, features, 5, 0.0, 0, shared)
    assert torch.allclose(mean, classifier(features).softmax(dim=1), atol=1e-6)
    assert deviation.max() < 1e-6


@pytest.mark.parametrize("passes", [1, 2, 7])
def test_mc_dropout_gives_the_moments_of_its_passes(passes: int) -> None:
    features, classifier = _classifier(2)
    mean, deviation = mc_dropout(classifier, features, passes, 0.6, 3)
    torch.manual_seed(3)
    drawn = [classifier(features, nn.Dropout(0.6)).softmax(1) for _ in range(passes)]
    expected = sum(drawn) / passes
    squares = sum((one - expected) ** 2 for one in drawn) / passes
    assert torch.allclose(mean, expected, atol=1e-6)
    assert torch.allclose(deviation, squares.sqrt(), atol=1e-6)
    assert (deviation > 0).any() == (passes > 1)


@pytest.mark.parametrize("layers", [1, 2])
def test_shared_dropout_has_the_distribution_of_dropout_per_image(layers: int) -> None:
    features, classifier = _classifier(layers, images=4)
    together = mc_dropout(classifier, features, 20_000, 0.5, 1, shared=True)
    apart = mc_dropout(classifier, features, 4000, 0.5, 5)
    for one, other in zip(together, apart, strict=True):
        assert torch.allclose(one, other, atol=0.03)


def test_shared_dropout_gives_an_image_the_same_result_in_any_batch() -> None:
    features, classifier = _classifier(2)
    whole = mc_dropout(classifier, features, 6, 0.5, 2, shared=True)
    for rows in (features[4:5], torch.cat([features.repeat(MC_ROWS // 9, 1), features[:5]])):
        alone = mc_dropout(classifier, rows, 6, 0.5, 2, shared=True)
        for one, other in zip(alone, whole, strict=True):
            assert torch.allclose(one[-1], other[4], atol=1e-6)


@pytest.mark.parametrize("shared", [False, True])
def test_mc_dropout_leaves_the_random_state_alone(shared: bool) -> None:
    features, classifier = _classifier(2)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    mc_dropout(classifier, features, 3, 0.5, 7, shared)
    assert torch.equal(torch.rand(1), expected)
