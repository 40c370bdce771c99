"""Slow, obvious versions of what the code does fast: plain loops, written from the formulas."""

import itertools
import math

import torch
from torch import Tensor


def cross_entropy_of(logits: list[float], label: int) -> float:
    return math.log(sum(math.exp(value) for value in logits)) - logits[label]


def samples_cross_entropy(logits_NMC: Tensor, labels_N: Tensor) -> list[float]:
    values = []
    for samples, label in zip(logits_NMC.tolist(), labels_N.tolist(), strict=True):
        values.append(sum(cross_entropy_of(sample, label) for sample in samples) / len(samples))
    return values


def antagonistic(sigma_N: Tensor, samples_ce_N: Tensor, num_classes: int) -> list[float]:
    values = []
    for sigma, ce in zip(sigma_N.tolist(), samples_ce_N.tolist(), strict=True):
        distance = abs(sigma - max(0.0, math.log(num_classes) - ce))
        values.append(0.5 * distance**2 if distance < 1 else distance - 0.5)
    return values


def batch_norm(x_NCHW: Tensor, weight_C: Tensor, bias_C: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x_NCHW)
    for channel in range(x_NCHW.shape[1]):
        values = x_NCHW[:, channel]
        mean = values.mean()
        variance = ((values - mean) ** 2).mean()
        out[:, channel] = (values - mean) / torch.sqrt(variance + eps) * weight_C[channel] + bias_C[channel]
    return out


def oscillation(features_ND: Tensor, layers: list[tuple[Tensor, Tensor]], num_points: int) -> tuple[float, float]:
    """Total and floor: every point of every segment through the whole classifier."""
    changes = differing = 0
    for i in range(len(features_ND)):
        for j in range(i):
            predicted = []
            for k in range(num_points):
                share = k / (num_points - 1)
                x = (1 - share) * features_ND[i] + share * features_ND[j]
                for number, (weight, bias) in enumerate(layers):
                    x = weight @ (x.relu() if number else x) + bias
                predicted.append(int(x.argmax()))
            changes += sum(before != after for before, after in itertools.pairwise(predicted))
            differing += predicted[0] != predicted[-1]
    return changes / num_points, differing / num_points


def jda_projection(
    rows_ND: Tensor,
    source_labels: list[int],
    target_labels: list[int] | None,
    num_classes: int,
    components: int,
    ridge: float,
) -> Tensor:
    """The generalised eigenproblem as it is written, with all of M at n x n."""
    from scipy.linalg import eigh

    n, num_source = len(rows_ND), len(source_labels)
    e = torch.tensor([1 / num_source] * num_source + [-1 / (n - num_source)] * (n - num_source), dtype=torch.float64)
    m = torch.outer(e, e) * num_classes
    for c in range(num_classes):
        in_source = [i for i, label in enumerate(source_labels) if label == c]
        in_target = [num_source + i for i, label in enumerate(target_labels or []) if label == c]
        if in_source and in_target:
            e = torch.zeros(n, dtype=torch.float64)
            for i in in_source:
                e[i] = 1 / len(in_source)
            for i in in_target:
                e[i] = -1 / len(in_target)
            m = m + torch.outer(e, e)
    m = m / m.norm()
    x = rows_ND.T
    h = torch.eye(n, dtype=torch.float64) - 1 / n
    left = x @ m @ x.T + ridge * torch.eye(len(x), dtype=torch.float64)
    _, vectors = eigh((x @ h @ x.T).numpy(), left.numpy())  # the largest here are the smallest of the other way round
    return torch.from_numpy(vectors[:, ::-1][:, :components].copy())


def replicator_rounds(
    weights: list[list[float]], strategies: list[list[float]], fixed: int, rounds: int
) -> list[list[float]]:
    """Nodes below `fixed` never move; all others move at once, each by the strategies of the round before."""
    for _ in range(rounds):
        after = [list(row) for row in strategies]
        for i in range(fixed, len(strategies)):
            payoff = [sum(w * strategies[j][h] for j, w in enumerate(weights[i])) for h in range(len(strategies[i]))]
            total = sum(x * u for x, u in zip(strategies[i], payoff, strict=True))
            if total > 0:
                after[i] = [x * u / total for x, u in zip(strategies[i], payoff, strict=True)]
        strategies = after
    return strategies
