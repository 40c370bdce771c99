"""Slow, obvious versions of the numbers in certvol.scores: loops over lists."""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor


def oscillation(
    features_ND: Tensor, layers: list[tuple[Tensor, Tensor]], num_points: int
) -> tuple[float, float]:
    """Return total and floor: every point of every segment passes the whole classifier."""
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


def pearson(x: Sequence[float], y: Sequence[float]) -> float:
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    products = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    squares = sum((a - mean_x) ** 2 for a in x) * sum((b - mean_y) ** 2 for b in y)
    return products / math.sqrt(squares)


def ranks(values: Sequence[float]) -> list[float]:
    """Return ranks from 1; equal values share their mean rank."""
    return [
        sum(other < value for other in values) + (sum(other == value for other in values) + 1) / 2
        for value in values
    ]


def auroc(scores: Sequence[float], positive: Sequence[bool]) -> float:
    positives = [score for score, flag in zip(scores, positive, strict=True) if flag]
    negatives = [score for score, flag in zip(scores, positive, strict=True) if not flag]
    won = sum((a > b) + (a == b) / 2 for a in positives for b in negatives)
    return won / (len(positives) * len(negatives))


def soft_neighbourhood_density(p: list[list[float]], temperature: float) -> float:
    total = 0.0
    for i, mine in enumerate(p):
        near = []
        for j, other in enumerate(p):
            if i != j:
                product = sum(a * b for a, b in zip(mine, other, strict=True))
                near.append(product / math.hypot(*mine) / math.hypot(*other) / temperature)
        whole = sum(math.exp(value) for value in near)
        shares = [math.exp(value) / whole for value in near]
        total -= sum(share * math.log(share) for share in shares)
    return total / len(p)


def class_correlation(p: list[list[float]]) -> float:
    classes = range(len(p[0]))
    together = [[sum(row[a] * row[b] for row in p) for b in classes] for a in classes]
    return sum(together[c][c] for c in classes) / math.sqrt(
        sum(v * v for row in together for v in row)
    )


def nuclear_norm(p: list[list[float]]) -> float:
    """Sum the roots of the eigenvalues of P'P, which are P's singular values."""
    matrix = torch.tensor(p, dtype=torch.float64)
    return float(torch.linalg.eigvalsh(matrix.T @ matrix).clamp(min=0).sqrt().sum()) / len(p)


def ensemble_agreement(candidates: list[list[list[float]]]) -> list[float]:
    agreed = []
    for candidate in candidates:
        same = 0
        for i, row in enumerate(candidate):
            summed = [sum(other[i][c] for other in candidates) for c in range(len(row))]
            same += row.index(max(row)) == summed.index(max(summed))
        agreed.append(same / len(candidate))
    return agreed


def risk_coverage_over_all_orders(certainty: list[float], wrong: list[bool]) -> list[float]:
    """Risk at 1, 2, ... accepted images, averaged over all orders from certain to uncertain."""
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
            if (number / num_bins < value <= (number + 1) / num_bins)
            or (number == 0 and value == 0)
        ]
        if inside:
            accuracy = sum(right[i] for i in inside) / len(inside)
            error += (
                abs(sum(confidence[i] for i in inside) / len(inside) - accuracy)
                * len(inside)
                / len(confidence)
            )
    return error
