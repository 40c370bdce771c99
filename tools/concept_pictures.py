"""Draw the pictures of docs/concepts/cvp.md.

    certvol demo --out demo --seed 0
    python tools/concept_pictures.py --run demo/cvp

Without --run, the picture of sigma over a run's training is left as it is.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from certvol.methods._losses import antagonistic, cross_entropy, samples_cross_entropy, sigma_target
from certvol.nn.heads import SigmaHead, sample_features

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
COLOURS = np.array(["#d0691d", "#2f6fb0", "#2d8659"])
CENTRES = np.array([[-1.6, -0.6], [1.5, -0.9], [0.1, 1.7]])
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.hashsalt": "certvol",
    "svg.fonttype": "none",
}
SAMPLES, STEPS, ALPHA = 32, 1500, 0.5


def toy_points() -> tuple[Tensor, Tensor]:
    """Draw three classes of points on a plane, which are the features of the toy."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 240)
    points = CENTRES[labels] + rng.normal(0, 0.62, (240, 2))
    return torch.tensor(points, dtype=torch.float32), torch.tensor(labels)


def train_toy(points_ND: Tensor, labels_N: Tensor) -> tuple[nn.Module, SigmaHead]:
    """Train a classifier and f_Sigma by CVP's three losses."""
    torch.manual_seed(0)
    classifier = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3))
    head = SigmaHead(2, 32)
    parameters = [*classifier.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.01, weight_decay=1e-3)
    for _ in range(STEPS):
        sigma_N = head(points_ND)
        noise_NMD = torch.randn(len(points_ND), SAMPLES, 2)
        samples_NMD = sample_features(points_ND, sigma_N, noise_NMD)
        samples_ce_N = samples_cross_entropy(classifier(samples_NMD), labels_N)
        loss = (
            cross_entropy(classifier(points_ND), labels_N).mean()
            + ALPHA * samples_ce_N.mean()
            + antagonistic(sigma_N, samples_ce_N, 3).mean()
        )
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    return classifier, head


def spread_over(sigma_N: Any, labels_N: Any) -> list[int]:
    """Choose four points of each class, from the narrowest sigma to a wide one."""
    found = []
    for label in range(3):
        own = np.flatnonzero(labels_N == label)
        places = np.linspace(0, 0.97 * (len(own) - 1), 4).astype(int)
        found += [int(i) for i in own[np.argsort(sigma_N[own])][places]]
    return found


def gaussian() -> Figure:
    """Draw points with a circle of their sigma, and the decision boundary."""
    points_ND, labels_N = toy_points()
    classifier, head = train_toy(points_ND, labels_N)
    figure = Figure(figsize=(6.4, 4.6), layout="constrained")
    axes = figure.subplots()
    x, y = np.meshgrid(np.linspace(-4, 4, 300), np.linspace(-3.2, 4.6, 300))
    grid = torch.tensor(np.stack([x.ravel(), y.ravel()], 1), dtype=torch.float32)
    with torch.no_grad():
        classes = classifier(grid).argmax(1).reshape(x.shape).numpy()
        sigma_N = head(points_ND).numpy()
    for level in (0.5, 1.5):
        axes.contour(x, y, classes, levels=[level], colors="#5a6472", linewidths=1.2)
    x_N, y_N = points_ND.numpy().T
    axes.scatter(x_N, y_N, s=7, color=COLOURS[labels_N.numpy()], alpha=0.45, lw=0)
    for i in spread_over(sigma_N, labels_N.numpy()):
        centre, colour = (float(x_N[i]), float(y_N[i])), COLOURS[int(labels_N[i])]
        circle = matplotlib.patches.Circle(centre, float(sigma_N[i]), fill=False, color=colour)
        axes.add_patch(circle)
        axes.plot(*centre, "o", ms=4.5, color=colour)
    axes.set(xlim=(-4, 4), ylim=(-3.2, 4.6), aspect="equal", xlabel="feature 1", ylabel="feature 2")
    return figure


def psi() -> Figure:
    """Draw psi against the samples' loss."""
    figure = Figure(figsize=(5.6, 3.2), layout="constrained")
    axes = figure.subplots()
    loss = torch.linspace(0, 4, 200)
    for classes, colour in ((31, COLOURS[1]), (10, COLOURS[0])):
        axes.plot(loss, sigma_target(loss, classes), color=colour, lw=2, label=f"{classes} classes")
        axes.plot(math.log(classes), 0, "o", color=colour, ms=5, clip_on=False, zorder=3)
    axes.annotate(
        "guessing",
        (math.log(10), 0),
        (2.05, 0.75),
        arrowprops={"arrowstyle": "-", "color": "#5a6472"},
    )
    axes.set(
        xlabel="loss of the samples", ylabel="psi, the target of sigma", xlim=(0, 4), ylim=(0, 3.6)
    )
    axes.legend()
    return figure


def sigma(run: Path) -> Figure:
    """Draw the median sigma of both domains over a run's steps."""
    lines = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    pretrained = max(line["step"] for line in lines if line["phase"] == "pretrain")
    steps = [line["step"] + pretrained * (line["phase"] == "adapt") for line in lines]
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    for side, colour in (("source", COLOURS[1]), ("target", COLOURS[0])):
        values = [line.get(f"sigma_{side}") for line in lines]
        known = [(x, y) for x, y in zip(steps, values, strict=True) if y is not None]
        axes.plot(*zip(*known, strict=True), color=colour, lw=1.6, label=side)
    axes.axvline(pretrained, color="#5a6472", ls=":", lw=1.2)
    axes.text(pretrained, axes.get_ylim()[1], " adaptation begins", va="top", color="#5a6472")
    axes.set(xlabel="training step", ylabel="median sigma", ylim=(0, None))
    axes.legend(loc="lower right")
    return figure


def save(figure: Figure, name: str) -> None:
    """Write an SVG without date and random names, so that the same picture has the same bytes."""
    figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None}, facecolor="white")
    print(f"{name}.svg: {(IMAGES / f'{name}.svg').stat().st_size / 1000:.0f} kB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, help="a run of cvp, for sigma over its training")
    options = parser.parse_args()
    with matplotlib.rc_context(STYLE):
        save(gaussian(), "gaussian")
        save(psi(), "psi")
        if options.run is not None:
            save(sigma(options.run), "sigma")


if __name__ == "__main__":
    main()
