"""Slow, obvious versions of losses and labels of the target: plain loops, from the formulas."""

import math

from torch import Tensor

Rows = list[list[float]]


def cosine(a: list[float], b: list[float]) -> float:
    lengths = math.hypot(*a) * math.hypot(*b)
    return sum(x * y for x, y in zip(a, b, strict=True)) / lengths if lengths > 0 else 0.0


def entropy(p: list[float]) -> float:
    return -sum(value * math.log(value) for value in p if value > 0)


def column_means(rows: Rows) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def prototype_labels(rows_ND: Tensor, p_NC: Tensor, least: int) -> list[int]:
    """Label by the nearest centre in two rounds, the first weighted by probability."""
    rows, p = rows_ND.tolist(), p_NC.tolist()
    units = []
    for row in rows:
        longer = [*row, 1.0]
        units.append([value / math.hypot(*longer) for value in longer])
    labels = [row.index(max(row)) for row in p]
    for number in range(2):
        classes = [c for c in range(len(p[0])) if labels.count(c) > least]
        centres = {}
        for c in classes:
            shares = [float(label == c) for label in labels] if number else [row[c] for row in p]
            centres[c] = [
                sum(share * unit[d] for share, unit in zip(shares, units, strict=True))
                / sum(shares)
                for d in range(len(units[0]))
            ]
        labels = [max(classes, key=lambda c: cosine(unit, centres[c])) for unit in units]
    return labels


def nearest_others(rows_ND: Tensor, count: int) -> list[list[int]]:
    rows = rows_ND.tolist()
    found = []
    for i, row in enumerate(rows):
        others = [j for j in range(len(rows)) if j != i]
        others.sort(key=lambda j: -cosine(row, rows[j]))
        found.append(others[:count])
    return found


def attraction_and_dispersion(p_NC: Tensor, near: list[list[list[float]]]) -> tuple[float, float]:
    """Return the mean of -p_i . p_j summed over neighbours, and of p_i . p_m over other rows."""

    def dot(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True))

    p = p_NC.tolist()
    attracted = -sum(dot(p[i], q) for i in range(len(p)) for q in near[i]) / len(p)
    others = [dot(p[i], p[m]) for i in range(len(p)) for m in range(len(p)) if m != i]
    return attracted, sum(others) / len(p)


def neighbour_labels(rows_ND: Tensor, p_NC: Tensor, count: int) -> list[tuple[int, float]]:
    """Return the label of each row by its neighbours, and the label's weight."""
    p = p_NC.tolist()
    masses = [sum(row[c] ** 2 for row in p) for c in range(len(p[0]))]
    found = []
    for near in nearest_others(rows_ND, count):
        means = [
            sum(p[j][c] ** 2 / masses[c] for j in near) / len(near) for c in range(len(masses))
        ]
        found.append((means.index(max(means)), max(means)))
    return found


def adversarial_mask(gradients: list[float], share: float) -> list[float]:
    """Drop the units whose loss raises the divergence most, at most a share of all."""
    limit = int(share * len(gradients))
    gains = [max(0.0, -gradient) for gradient in gradients]
    bound = sorted(gains, reverse=True)[limit]
    kept = [0.0 if gain > bound else 1.0 for gain in gains]
    return [value * len(kept) / sum(kept) for value in kept]
