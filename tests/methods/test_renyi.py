import dataclasses
import math

import pytest
import torch
from torch import Tensor

from certvol.methods._base import Batch
from certvol.methods.renyi import balanced_labels, log_mean_softmax, renyi_entropy
from support.methods import make_batch, make_method, make_survey
from support.plain_steps import Weights, assert_steps_are, common_logits, features_of, linear


@pytest.mark.parametrize("order", [1, 2, 5])
def test_the_entropy_is_log_c_for_even_and_0_for_sure_predictions(order: int) -> None:
    even = torch.full((1, 4), 0.25).log()
    assert renyi_entropy(even, order).item() == pytest.approx(math.log(4))
    sure = torch.tensor([[1 - 3e-7, 1e-7, 1e-7, 1e-7]]).log()
    assert renyi_entropy(sure, order).item() == pytest.approx(0, abs=1e-5)


def test_the_entropy_is_the_formula_and_falls_with_its_order() -> None:
    p = torch.rand(5, 4).softmax(1)
    values = []
    for order in (1, 2, 5):
        found = renyi_entropy(p.log(), order).tolist()
        for value, row in zip(found, p.tolist(), strict=True):
            if order == 1:
                expected = -sum(q * math.log(q) for q in row)
            else:
                expected = math.log(sum(q**order for q in row)) / (1 - order)
            assert value == pytest.approx(expected, rel=1e-4)
        values.append(found)
    assert all(a > b > c for a, b, c in zip(*values, strict=True))
    assert all(c > -math.log(max(row)) for c, row in zip(values[2], p.tolist(), strict=True))


def test_probabilities_are_means_over_draws() -> None:
    mean, log_variance, noise = torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 6, 4)
    found = log_mean_softmax(mean, log_variance, noise).exp()
    for i in range(3):
        total = [0.0] * 4
        for draw in noise[i].tolist():
            z = [
                m + e * math.exp(v / 2)
                for m, v, e in zip(mean[i].tolist(), log_variance[i].tolist(), draw, strict=True)
            ]
            powers = [math.exp(value) for value in z]
            total = [t + power / sum(powers) / 6 for t, power in zip(total, powers, strict=True)]
        assert found[i].tolist() == pytest.approx(total, rel=1e-4)
    certain = log_mean_softmax(mean, torch.full((3, 4), -10.0), torch.zeros(3, 1, 4))
    assert torch.allclose(certain, mean.log_softmax(1), atol=1e-6)
    assert torch.isfinite(log_mean_softmax(1e6 * mean, 1e6 * log_variance, noise)).all()


def naive_labels(p: list[list[float]], portion: float) -> list[int]:
    classes = range(len(p[0]))
    thresholds = []
    for c in classes:
        sure = sorted((max(row) for row in p if row.index(max(row)) == c), reverse=True)
        thresholds.append(sure[max(1, int(len(sure) * portion)) - 1] if sure else 1.0)
    found = []
    for row in p:
        ratios = [row[c] / thresholds[c] for c in classes]
        found.append(ratios.index(max(ratios)) if max(ratios) >= 1 else -1)
    return found


@pytest.mark.parametrize("portion", [0.1, 0.5, 1.0])
def test_labels_are_those_of_the_loops(portion: float) -> None:
    p = (2 * torch.randn(60, 5, generator=torch.Generator().manual_seed(0))).softmax(1)
    p[:, 4] *= 0.01  # never predicted
    labels = balanced_labels(p.double(), portion)
    assert labels.tolist() == naive_labels(p.double().tolist(), portion)
    assert (labels >= 0).any()
    assert (4 in labels.tolist()) is False


def test_each_predicted_class_gets_its_portion_and_one_at_least() -> None:
    p = torch.full((22, 3), 0.01)
    p[:10, 0], p[10:20, 1] = torch.linspace(0.9, 0.99, 10), torch.linspace(0.4, 0.5, 10)
    p[20:, 2] = torch.tensor([0.3, 0.35])
    labels = balanced_labels(p, 0.3)
    assert labels.tolist() == [-1] * 7 + [0] * 3 + [-1] * 7 + [1] * 3 + [-1, 2]


def test_the_portion_grows_from_cycle_to_cycle_up_to_its_bound() -> None:
    method = make_method("renyi", portion=0.2, portion_growth=0.3, most_portion=0.7)
    survey = make_survey(method, 200)
    p = torch.rand(200, 1, generator=torch.Generator().manual_seed(0)) * 0.5 + 0.5
    survey = dataclasses.replace(survey, probabilities_NC=torch.cat([p, 1 - p, 0 * p, 0 * p], 1))
    shares = []
    for cycle in range(4):
        labels_N = method.label_target(dataclasses.replace(survey, cycle=cycle)).labels_N
        shares.append((labels_N >= 0).float().mean().item())
    assert shares == pytest.approx([0.2, 0.5, 0.7, 0.7], abs=0.01)


@pytest.mark.parametrize("kind", ["min", "collision", "shannon"])
def test_whole_steps_in_plain_pytorch_give_equal_weights(kind: str) -> None:
    def loss(weights: Weights, batch: Batch) -> Tensor:
        features = features_of(weights, batch.inputs)
        mean = common_logits(weights, features)
        deviation = torch.exp(linear(weights, "log_variance", features) / 2)
        noise = batch.noise(mean.detach(), 3)
        draws = [torch.softmax(mean + deviation * noise[:, m], 1) for m in range(3)]
        p = torch.stack(draws).mean(0)
        own = -p[torch.arange(16), batch.labels_N].log()
        q = p[8:]
        target = {
            "min": own[8:],
            "collision": -(q**2).sum(1).log(),
            "shannon": -(q * q.log()).sum(1),
        }[kind]
        return own[:8].mean() + 0.5 * target.mean()

    assert_steps_are(make_method("renyi", entropy=kind, weight=0.5, samples=3), loss)


def test_predictions_use_the_variance() -> None:
    method = make_method("renyi").eval()
    features = torch.randn(3, method.network.dim)
    with torch.no_grad():
        method.log_variance.bias.fill_(-20)
        narrow = method.logits(features)
        method.log_variance.bias.fill_(6)
        wide = method.logits(features)
    assert torch.allclose(narrow, method.network.classifier(features).log_softmax(1), atol=0.1)
    assert (narrow - wide).abs().max() > 0.1
    assert wide.exp().sum(1).tolist() == pytest.approx([1] * 3)


def test_pseudo_labels_matter_for_the_order_infinity_alone() -> None:
    for kind in ("min", "collision", "shannon"):
        values = []
        for label in (0, 1):
            method = make_method("renyi", entropy=kind).train()
            batch = make_batch()
            batch.labels_N[8:] = label
            torch.manual_seed(0)
            values.append(method.loss(method.loss_terms(batch)).item())
        assert (values[0] != values[1]) is (kind == "min")
