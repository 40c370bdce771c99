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


def mc_dropout(
    features_ND: Tensor, layers: list[tuple[Tensor, Tensor]], masks: tuple[Tensor, Tensor | None]
) -> tuple[list[float], list[float]]:
    """Mean and standard deviation, over the passes, of the probability of the class whose mean is largest."""
    means, deviations = [], []
    for feature in features_ND:
        passes = []
        for number in range(len(masks[0])):
            x = layers[0][0] @ (feature * masks[0][number]) + layers[0][1]
            if len(layers) == 2 and masks[1] is not None:
                x = layers[1][0] @ (x.relu() * masks[1][number]) + layers[1][1]
            passes.append(x.softmax(dim=0).tolist())
        mean = [sum(column) / len(passes) for column in zip(*passes, strict=True)]
        winner = max(range(len(mean)), key=mean.__getitem__)
        means.append(mean[winner])
        deviations.append(math.sqrt(sum((p[winner] - mean[winner]) ** 2 for p in passes) / len(passes)))
    return means, deviations


def risk_coverage_over_all_orders(certainty: list[float], wrong: list[bool]) -> list[float]:
    """Risk at 1, 2, ... accepted images, averaged over every order of the images that goes from certain to uncertain."""
    sums, orders = [0.0] * len(wrong), 0
    for order in itertools.permutations(range(len(wrong))):
        if any(certainty[a] < certainty[b] for a, b in itertools.pairwise(order)):
            continue
        orders += 1
        for k in range(len(order)):
            sums[k] += sum(wrong[i] for i in order[: k + 1]) / (k + 1)
    return [total / orders for total in sums]


def calibration_error(confidence: list[float], right: list[bool], num_bins: int) -> float:
    error = 0.0
    for number in range(num_bins):
        inside = [
            i
            for i, value in enumerate(confidence)
            if (number / num_bins < value <= (number + 1) / num_bins) or (number == 0 and value == 0)
        ]
        if inside:
            accuracy = sum(right[i] for i in inside) / len(inside)
            error += abs(sum(confidence[i] for i in inside) / len(inside) - accuracy) * len(inside) / len(confidence)
    return error
