"""Slow, obvious versions of the code: plain loops, written from the formulas."""

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
        out[:, channel] = (values - mean) / torch.sqrt(variance + eps) * weight_C[channel] + bias_C[
            channel
        ]
    return out


def domain_confusion(logits_N: Tensor, num_source: int, certainty_N: Tensor | None) -> float:
    """Average -log sigmoid(logit) over the source and -log(1 - sigmoid(logit)) over the target."""
    halves = []
    for rows, sign in ((range(num_source), 1), (range(num_source, len(logits_N)), -1)):
        weights = [1.0 if certainty_N is None else float(certainty_N[i]) for i in rows]
        values = [math.log(1 + math.exp(-sign * float(logits_N[i]))) for i in rows]
        halves.append(sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights))
    return sum(halves) / 2


def coral(source_ND: Tensor, target_ND: Tensor) -> float:
    total, dim = 0.0, source_ND.shape[1]
    for a in range(dim):
        for b in range(dim):
            entries = []
            for rows in (source_ND, target_ND):
                mean_a, mean_b = float(rows[:, a].mean()), float(rows[:, b].mean())
                products = [(float(row[a]) - mean_a) * (float(row[b]) - mean_b) for row in rows]
                entries.append(sum(products) / (len(rows) - 1))
            total += (entries[0] - entries[1]) ** 2
    return total / (4 * dim**2)


def maximum_mean_discrepancy(
    source_ND: Tensor, target_ND: Tensor, scales: tuple[float, ...], biased: bool
) -> float:
    rows = [*source_ND, *target_ND]
    squared = [[float(((a - b) ** 2).sum()) for b in rows] for a in rows]
    pairs = [squared[i][j] for i in range(len(rows)) for j in range(len(rows)) if i != j]
    mean = sum(pairs) / len(pairs)

    def average(left: range, right: range) -> float:
        values = [
            sum(math.exp(-squared[i][j] / (2 * scale * mean)) for scale in scales)
            for i in left
            for j in right
            if biased or i != j
        ]
        return sum(values) / len(values)

    source, target = range(len(source_ND)), range(len(source_ND), len(rows))
    return average(source, source) + average(target, target) - 2 * average(source, target)


def class_confusion(logits_NC: Tensor, temperature: float) -> float:
    rows, classes = logits_NC.tolist(), logits_NC.shape[1]
    probabilities = []
    for row in rows:
        powers = [math.exp(value / temperature) for value in row]
        probabilities.append([power / sum(powers) for power in powers])
    weights = [1 + math.exp(sum(p * math.log(p) for p in row)) for row in probabilities]
    weights = [weight * len(rows) / sum(weights) for weight in weights]
    confusion = [
        [
            sum(w * row[a] * row[b] for w, row in zip(weights, probabilities, strict=True))
            for b in range(classes)
        ]
        for a in range(classes)
    ]
    return sum(
        confusion[a][b] / sum(confusion[a])
        for a in range(classes)
        for b in range(classes)
        if a != b
    ) / classes  # fmt: skip


def smoothed_cross_entropy(logits: list[float], label: int, smoothing: float) -> float:
    total = math.log(sum(math.exp(value) for value in logits))
    share = [
        1 - smoothing if k == label else smoothing / (len(logits) - 1) for k in range(len(logits))
    ]
    return sum(s * (total - value) for s, value in zip(share, logits, strict=True))


def feature_alignment(
    feature: list[float], means: list[list[float]], q: list[float], double_softmax: bool
) -> float:
    """UFAL: cross-entropy between q and softmax(-squared distances from the class means)."""

    def softmax(values: list[float]) -> list[float]:
        powers = [math.exp(value - max(values)) for value in values]
        return [power / sum(powers) for power in powers]

    scores = softmax(
        [-sum((f - m) ** 2 for f, m in zip(feature, mean, strict=True)) for mean in means]
    )
    return -sum(
        share * math.log(p)
        for share, p in zip(q, softmax(scores) if double_softmax else scores, strict=True)
    )


def draw_weight(r: list[float], label: int, mean: list[float], deviation: list[float]) -> float:
    """UBR2S: (1 - DE) * SL."""
    near = min(1.0, max(0.0, 1 - abs(r[label] - mean[label]) / (2 * deviation[label])))
    exceeds = []
    for k in range(len(r)):
        if k != label:
            z = (r[label] - mean[k]) / deviation[k]
            exceeds.append(1 - 0.5 * (1 + math.erf(z / math.sqrt(2))))
    return (1 - max(exceeds)) * near


def class_discrepancy(source: list[Tensor], target: list[Tensor]) -> float:
    """CAN: e(c1, c2) of the rows of a source class and of a target class, in one layer."""
    rows = [*source, *target]
    squared = [float(((a - b) ** 2).sum()) for a in rows for b in rows]
    width = max(sum(squared) / (len(rows) * (len(rows) - 1)), 1e-5)

    def kernel(a: Tensor, b: Tensor) -> float:
        return sum(
            math.exp(-float(((a - b) ** 2).sum()) / (width * 2 ** (i - 2))) for i in range(5)
        )

    def average(left: list[Tensor], right: list[Tensor]) -> float:
        return sum(kernel(a, b) for a in left for b in right) / (len(left) * len(right))

    return average(source, source) + average(target, target) - 2 * average(source, target)


def contrastive_discrepancy(
    layers: list[tuple[Tensor, Tensor]],
    source_labels: list[int],
    target_labels: list[int],
    num_classes: int,
    over_all: bool,
) -> float:
    alike: list[float] = []
    unlike: list[float] = []
    for a in set(source_labels):
        for b in set(target_labels):
            e = sum(
                class_discrepancy(
                    [row for row, label in zip(source, source_labels, strict=True) if label == a],
                    [row for row, label in zip(target, target_labels, strict=True) if label == b],
                )
                for source, target in layers
            )
            (alike if a == b else unlike).append(e)
    if over_all:
        return sum(alike) / num_classes - sum(unlike) / (num_classes * (num_classes - 1))
    return sum(alike) / max(1, len(alike)) - sum(unlike) / max(1, len(unlike))


def class_balance(probabilities_NC: Tensor, quirk: bool) -> float:
    """Self-ensembling: C * mean over classes of BCE(mean probability, 1 / C)."""
    classes = probabilities_NC.shape[1]
    values = []
    for k in range(classes):
        q = sum(row[k] for row in probabilities_NC.tolist()) / len(probabilities_NC)
        rest = math.log(1 + q) if quirk else math.log(1 - q)
        values.append(-(math.log(q) / classes + (1 - 1 / classes) * rest))
    return classes * sum(values) / classes


def spherical_layer(x: Tensor, weight: Tensor, bias: Tensor, radius: float) -> Tensor:
    """Map one row: logarithm at the north pole, linear layer, exponential, ReLU on the sphere."""
    pole = torch.zeros_like(x)
    pole[-1] = radius
    cosine = float(x @ pole) / float(x.norm() * pole.norm())
    direction = x / x.norm() - cosine * pole / radius
    shrunk = cosine * (1 - 1e-4) if abs(cosine) > 1 - 1e-4 else cosine
    tangent = radius * math.acos(shrunk) * (direction / direction.norm())[:-1]
    moved = weight @ tangent + bias
    angle = float(moved.norm()) / radius
    wrapped = torch.cat(
        [radius * math.sin(angle) * moved / moved.norm(), torch.tensor([radius * math.cos(angle)])]
    )
    on_sphere: Tensor = radius * wrapped.relu() / wrapped.relu().norm()
    return on_sphere


def semantic_distance(source_CD: Tensor, target_CD: Tensor) -> float:
    total = 0.0
    for a, b in zip(source_CD, target_CD, strict=True):
        if a.abs().sum() > 0 and b.abs().sum() > 0:
            total += 1 - float(a @ b / (a.norm() * b.norm()))
    return total


def moved_centroids(
    centroids: dict[int, Tensor], rows_NB: Tensor, labels_N: Tensor, keep: float
) -> dict[int, Tensor]:  # fmt: skip
    """MSTN: centroids of the classes seen so far; the gradient flows through the batch's share."""
    moved = {label: centroid.detach() for label, centroid in centroids.items()}
    for label in sorted(set(labels_N.tolist())):
        mean = torch.stack(
            [row for row, other in zip(rows_NB, labels_N.tolist(), strict=True) if other == label]
        ).mean(0)
        moved[label] = keep * moved.get(label, mean.detach()) + (1 - keep) * mean
    return moved


def centroid_distance(source: dict[int, Tensor], target: dict[int, Tensor]) -> Tensor:
    shared = [label for label in source if label in target]
    return sum((((source[label] - target[label]) ** 2).mean() for label in shared), torch.zeros(()))


def symnets(
    logits_NE: Tensor, labels_N: Tensor, num_source: int, num_classes: int, rate: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return what the classifiers and what the backbone minimise; source rows come first."""
    p_NE = torch.softmax(logits_NE, 1)
    classifiers, backbone = torch.zeros(()), torch.zeros(())
    num_target = len(logits_NE) - num_source
    for i, (logits, p) in enumerate(zip(logits_NE, p_NE, strict=True)):
        as_source, as_target = p[:num_classes].sum(), p[num_classes:].sum()
        if i < num_source:
            y = int(labels_N[i])
            for half in (logits[:num_classes], logits[num_classes:]):
                classifiers = classifiers - torch.log(torch.softmax(half, 0)[y]) / num_source
            classifiers = classifiers - torch.log(as_source) / num_source
            backbone = (
                backbone - 0.5 * (torch.log(p[y]) + torch.log(p[y + num_classes])) / num_source
            )
        else:
            classifiers = classifiers - torch.log(as_target) / num_target
            pairs = p[:num_classes] + p[num_classes:]
            confusion = (
                -0.5 * (torch.log(as_source) + torch.log(as_target))
                - (pairs * torch.log(pairs)).sum()
            )
            backbone = backbone + rate * confusion / num_target
    return classifiers, backbone


def jda_projection(
    rows_ND: Tensor,
    source_labels: list[int],
    target_labels: list[int] | None,
    num_classes: int,
    components: int,
    ridge: float,
) -> Tensor:
    """Solve the generalised eigenproblem as written, with all of M at n x n."""
    from scipy.linalg import eigh

    n, num_source = len(rows_ND), len(source_labels)
    e = torch.tensor(
        [1 / num_source] * num_source + [-1 / (n - num_source)] * (n - num_source),
        dtype=torch.float64,
    )
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
    _, vectors = eigh(
        (x @ h @ x.T).numpy(), left.numpy()
    )  # the largest here are the smallest of the other way round
    return torch.from_numpy(vectors[:, ::-1][:, :components].copy())


def replicator_rounds(
    weights: list[list[float]], strategies: list[list[float]], fixed: int, rounds: int
) -> list[list[float]]:
    """Move all nodes from `fixed` on at once, by the strategies of the round before."""
    for _ in range(rounds):
        after = [list(row) for row in strategies]
        for i in range(fixed, len(strategies)):
            payoff = [
                sum(w * strategies[j][h] for j, w in enumerate(weights[i]))
                for h in range(len(strategies[i]))
            ]
            total = sum(x * u for x, u in zip(strategies[i], payoff, strict=True))
            if total > 0:
                after[i] = [x * u / total for x, u in zip(strategies[i], payoff, strict=True)]
        strategies = after
    return strategies


def gaussian_uniform_posterior(distances: list[float], rounds: int) -> list[float]:
    """EM for a Gaussian of mean 0 among uniform outliers, value by value."""
    n = len(distances)
    pairs = n // 2
    signed = [
        (d - min(distances)) * (-1 if i % 2 == 0 and i < 2 * pairs else 1)
        for i, d in enumerate(distances)
    ]
    mean = sum(signed) / n
    deviation = math.sqrt(sum((x - mean) ** 2 for x in signed) / n)
    values = [(x - mean) / deviation for x in signed]
    share, variance, density = 0.1, 1.0, 0.2
    for _ in range(rounds):
        inside = []
        for x in values:
            normal = math.exp(-(x**2) / (2 * (variance + 1e-3))) / math.sqrt(
                2 * math.pi * (variance + 1e-3)
            )
            inside.append(share * normal / (share * normal + (1 - share) * density))
        count = sum(inside)
        share = min(0.5, count / n)
        variance = sum(g * x**2 for g, x in zip(inside, values, strict=True)) / count
        first = sum((1 - g) / (1 - share) * x for g, x in zip(inside, values, strict=True)) / count
        second = (
            sum((1 - g) / (1 - share) * x**2 for g, x in zip(inside, values, strict=True)) / count
        )
        density = 1 / (2 * math.sqrt(3 * (second - first**2)))
    return inside
