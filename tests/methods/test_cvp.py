import math

import pytest
import torch
import torch.nn.functional as F

from certvol.methods.protocol import AdaptationMethod
from certvol.nn.heads import Classifier
from methods.test_contract import CLASSES, make_batch, make_method


def _terms(method: AdaptationMethod, seed: int = 0) -> dict[str, float]:
    method.network.classifier.dropout = 0.0
    return {name: value.item() for name, value in method.train().loss_terms(make_batch(seed=seed)).items()}


def test_terms_of_the_full_method() -> None:
    assert list(_terms(make_method("cvp"))) == ["ce", "samples_ce", "antagonistic"]


def test_samples_weight_scales_the_samples_term_and_nothing_else() -> None:
    terms = {"ce": torch.tensor(1.0), "samples_ce": torch.tensor(10.0), "antagonistic": torch.tensor(100.0)}
    assert make_method("cvp", samples_weight=0.5).loss(terms).item() == 106
    assert make_method("cvp", samples_weight=1.0).loss(terms).item() == 111
    assert _terms(make_method("cvp", samples_weight=0.5)) == _terms(make_method("cvp", samples_weight=1.0))


def test_without_samples_weight_the_samples_still_form_the_target_of_sigma() -> None:
    full, ablated = _terms(make_method("cvp")), _terms(make_method("cvp", samples_weight=0.0))
    assert list(ablated) == ["ce", "antagonistic"]
    assert ablated["antagonistic"] == pytest.approx(full["antagonistic"])


def test_without_antagonist_its_term_is_gone() -> None:
    assert list(_terms(make_method("cvp", antagonistic=False))) == ["ce", "samples_ce"]


def test_without_both_the_loss_is_that_of_basic() -> None:
    assert _terms(make_method("cvp", antagonistic=False, samples_weight=0.0)) == pytest.approx(
        _terms(make_method("basic"))
    )


def test_sigma_of_the_batch_is_watched_without_gradient() -> None:
    batch = make_batch()
    make_method("cvp").train().loss_terms(batch)
    assert batch.watched["sigma"].shape == (16,)
    assert not batch.watched["sigma"].requires_grad


@pytest.mark.parametrize("layers", [1, 2])
def test_the_samples_width_is_times_sigma(layers: int) -> None:
    wide, plain = make_method("cvp", samples_width=3.0), make_method("cvp")
    classifier = Classifier(plain.network.info.dim, CLASSES, layers, dropout=0.0)
    mu_ND, sigma_N = torch.rand(16, plain.network.info.dim), torch.rand(16)
    logits = []
    for method, sigma in ((wide, sigma_N), (plain, 3 * sigma_N)):
        method.network.classifier = classifier
        logits.append(method._samples_logits(mu_ND, sigma, make_batch()))
    assert torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("width", [1.0, 3.0])
def test_one_whole_step_in_plain_pytorch_gives_equal_weights(width: float) -> None:
    """The method under SGD, redone with nothing of ours but the initial weights. The trainer's step: test_stepper.py."""
    method = make_method("cvp", num_samples=8, samples_width=width).train()
    method.network.classifier.dropout = 0.0
    plain = {name: value.detach().clone().requires_grad_() for name, value in method.named_parameters()}
    settings = {"lr": 0.01, "momentum": 0.95, "nesterov": True}
    ours, theirs = torch.optim.SGD(method.parameters(), **settings), torch.optim.SGD(plain.values(), **settings)
    strides = [module.stride for module in method.network.backbone.modules() if isinstance(module, torch.nn.Conv2d)]

    for step in range(2):
        batch = make_batch(seed=step)
        ours.zero_grad()
        method.loss(method.loss_terms(batch)).backward()
        ours.step()

        theirs.zero_grad()
        x = batch.images_NCHW
        convolutions = [name for name in plain if name.startswith("network.backbone") and plain[name].ndim == 4]
        scales = [name for name in plain if name.endswith("weight_SC")]
        for convolution, scale, stride in zip(convolutions, scales, strides, strict=True):
            x = F.conv2d(x, plain[convolution], stride=stride, padding=1)
            mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), keepdim=True, unbiased=False)
            bias = plain[scale.replace("weight_SC", "bias_SC")]
            x = (x - mean) / torch.sqrt(variance + 1e-5) * plain[scale].view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)
            x = torch.relu(x)
        mu = x.mean((2, 3))
        sigma = F.leaky_relu(mu @ plain["sigma_head.hidden.weight"].T + plain["sigma_head.hidden.bias"], 0.01)
        sigma = sigma @ plain["sigma_head.output.weight"].T + plain["sigma_head.output.bias"]
        sigma = torch.log(1 + sigma[:, 0].exp())
        noise = torch.randn(16, 8, mu.shape[1], generator=torch.Generator().manual_seed(step))

        def classify(features: torch.Tensor) -> torch.Tensor:
            hidden = features @ plain["network.classifier.hidden.weight"].T + plain["network.classifier.hidden.bias"]
            return (
                torch.relu(hidden) @ plain["network.classifier.output.weight"].T
                + plain["network.classifier.output.bias"]
            )

        def negative_log_likelihood(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return -torch.log_softmax(logits, -1)[torch.arange(len(labels)), labels]

        ce_mu = negative_log_likelihood(classify(mu), batch.labels_N).mean()
        samples = mu[:, None] + width * sigma[:, None, None] * noise
        each = torch.stack([negative_log_likelihood(classify(samples[:, m]), batch.labels_N) for m in range(8)], 1)
        ce_phi = each.mean(1)
        distance = (sigma - (math.log(CLASSES) - ce_phi.detach()).clamp(min=0)).abs()
        ant = torch.where(distance < 1, 0.5 * distance**2, distance - 0.5).mean()
        (ce_mu + 0.5 * ce_phi.mean() + ant).backward()
        theirs.step()

    for name, value in method.named_parameters():
        assert torch.allclose(value, plain[name], atol=2e-6, rtol=1e-4), name
