import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from certvol.methods._base import AdaptationMethod, Batch
from certvol.nn.heads import Classifier
from support.methods import CLASSES, make_batch, make_method
from support.plain_steps import Weights, assert_steps_are, common_logits, features_of, linear


def _terms(method: AdaptationMethod, seed: int = 0) -> dict[str, float]:
    method.network.classifier.dropout = 0.0
    return {
        name: value.item()
        for name, value in method.train().loss_terms(make_batch(seed=seed)).items()
    }


def test_terms_of_the_full_method() -> None:
    assert list(_terms(make_method("cvp"))) == ["ce", "samples_ce", "antagonistic"]


def test_samples_weight_scales_the_samples_term_and_nothing_else() -> None:
    terms = {
        "ce": torch.tensor(1.0),
        "samples_ce": torch.tensor(10.0),
        "antagonistic": torch.tensor(100.0),
    }
    assert make_method("cvp", samples_weight=0.5).loss(terms).item() == 106
    assert make_method("cvp", samples_weight=1.0).loss(terms).item() == 111
    assert _terms(make_method("cvp", samples_weight=0.5)) == _terms(
        make_method("cvp", samples_weight=1.0)
    )


def test_without_samples_weight_the_samples_still_form_the_target_of_sigma() -> None:
    full, ablated = _terms(make_method("cvp")), _terms(make_method("cvp", samples_weight=0.0))
    assert list(ablated) == ["ce", "antagonistic"]
    assert ablated["antagonistic"] == pytest.approx(full["antagonistic"])


def test_without_antagonist_there_is_no_such_term() -> None:
    assert list(_terms(make_method("cvp", antagonistic=False))) == ["ce", "samples_ce"]


def test_without_both_the_loss_equals_that_of_basic() -> None:
    assert _terms(make_method("cvp", antagonistic=False, samples_weight=0.0)) == pytest.approx(
        _terms(make_method("basic"))
    )


def test_sigma_of_the_batch_is_watched_without_gradient() -> None:
    batch = make_batch()
    make_method("cvp").train().loss_terms(batch)
    assert batch.logged["sigma"].shape == (16,)
    assert not batch.logged["sigma"].requires_grad


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
def test_whole_steps_in_plain_pytorch_give_equal_weights(width: float) -> None:
    """The trainer's own step is tested in test_step.py."""

    def cross_entropies(weights: Weights, rows: Tensor, labels: Tensor) -> Tensor:
        log = torch.log_softmax(common_logits(weights, rows), -1)
        return -log[torch.arange(len(labels)), labels]

    def loss(weights: Weights, batch: Batch) -> Tensor:
        labels = batch.labels_N
        mu = features_of(weights, batch.inputs)
        hidden = F.leaky_relu(linear(weights, "sigma_head.hidden", mu), 0.01)
        sigma = torch.log(1 + linear(weights, "sigma_head.output", hidden)[:, 0].exp())
        noise = torch.randn(16, 8, mu.shape[1], generator=batch.generator)
        samples = mu[:, None] + width * sigma[:, None, None] * noise
        each = [cross_entropies(weights, samples[:, m], labels) for m in range(8)]
        ce_phi = torch.stack(each, 1).mean(1)
        distance = (sigma - (math.log(CLASSES) - ce_phi.detach()).clamp(min=0)).abs()
        ant = torch.where(distance < 1, 0.5 * distance**2, distance - 0.5).mean()
        return cross_entropies(weights, mu, labels).mean() + 0.5 * ce_phi.mean() + ant

    assert_steps_are(make_method("cvp", num_samples=8, samples_width=width), loss)
