"""Measure how far CVP's samples reach: sigma, and how often a sample leaves its feature's class.

    python benchmarks/samples_reach.py RUN [RUN ...]

Reads finished runs of `cvp`: the target features they keep and the delivered classifier, without
dropout. A sample that never leaves its class adds nothing to training; one that always does is
noise. Classes are the model's predictions; no labels are used.
"""

import argparse
import math
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from certvol.cli._console import print_table
from certvol.methods._losses import cross_entropy, samples_cross_entropy
from certvol.nn.heads import sample_features
from certvol.predict.model import load
from certvol.runs.checkpoint import load_tensors
from certvol.runs.folder import RunFolder


@dataclass(frozen=True)
class Reach:
    """Medians over the target images; `kept` and `added` are means."""

    feature: float
    """The length of a feature."""
    sigma: float
    noise: float
    """Length of a sample's noise, divided by that of its feature."""
    kept: float
    """Share of samples in the feature's class."""
    added: float
    """Cross-entropy of samples minus that of their feature, against the feature's class."""


@torch.inference_mode()
def reach(features_ND: Tensor, sigma_N: Tensor, classifier: torch.nn.Module, samples: int) -> Reach:
    """`sigma_N`: width of the Gaussian around each feature."""
    noise_NMD = torch.randn(
        len(features_ND),
        samples,
        features_ND.shape[1],
        generator=torch.Generator().manual_seed(0),
    )
    logits_NC = classifier(features_ND)
    logits_NMC = classifier(sample_features(features_ND, sigma_N, noise_NMD))
    class_N = logits_NC.argmax(dim=1)
    length_N = features_ND.norm(dim=1)
    added_N = samples_cross_entropy(logits_NMC, class_N) - cross_entropy(logits_NC, class_N)
    return Reach(
        length_N.median().item(),
        sigma_N.median().item(),
        (sigma_N * math.sqrt(features_ND.shape[1]) / length_N).median().item(),
        (logits_NMC.argmax(dim=2) == class_N[:, None]).float().mean().item(),
        added_N.mean().item(),
    )


def reach_of_run(run: Path, samples: int) -> Reach:
    method = load(run, "cpu").method
    features_ND = load_tensors(RunFolder(run).features)["adapted"].float()
    with torch.inference_mode():
        sigma_N = method.sigma(features_ND)
    if sigma_N is None:
        raise SystemExit(f"{run} has a method without sigma; give runs of cvp")
    return reach(
        features_ND, method.config.samples_width * sigma_N, method.network.classifier, samples
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--samples", type=int, default=64, help="per image")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = {run: reach_of_run(run, arguments.samples) for run in arguments.runs}
    names = [field.name for field in fields(Reach)]
    rows = [
        [str(run), *(f"{getattr(figures, name):.3g}" for name in names)]
        for run, figures in found.items()
    ]
    means = [
        sum(getattr(figures, name) for figures in found.values()) / len(found) for name in names
    ]
    print_table("samples", ["run", *names], [*rows, ["mean", *(f"{mean:.3g}" for mean in means)]])


if __name__ == "__main__":
    main()
