"""Build a graph of nearest neighbours among target images, and spread probabilities over it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from certvol.methods._clusters import nearest_others
from certvol.scores.uncertainty import entropy

LOG_FLOOR = 1e-10
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Neighbours:
    """The k nearest neighbours of each of N rows, nearest first; a row is not its own neighbour."""

    rows_NK: Tensor

    def nearest(self, k: int) -> "Neighbours":
        return Neighbours(self.rows_NK[:, :k])

    def add_up(self, values_NC: Tensor) -> Tensor:
        """Return W V, the sums of values over neighbours; W_ij is 1 if mutual, else 1/2."""
        sums_NC = torch.zeros_like(values_NC)
        for rows_N in self.rows_NK.T:
            sums_NC += values_NC[rows_N]
            sums_NC.index_add_(0, rows_N, values_NC)
        return sums_NC / 2


def nearest_neighbours(units_ND: Tensor, k: int) -> Neighbours:
    """Find the exact nearest neighbours by cosine similarity."""
    return Neighbours(nearest_others(units_ND, k))


def neighbours_for(probabilities_NC: Tensor, most: int) -> int:
    """Return how many neighbours of an image probably show the same class, at most `most`.

    This is half of the images per class in use, which the entropy of the mean prediction estimates.
    """
    in_use = float(entropy(probabilities_NC.mean(dim=0, keepdim=True)).exp())
    return max(1, min(most, round(0.5 * len(probabilities_NC) / in_use)))


def smooth(probabilities_NC: Tensor, neighbours: Neighbours, rounds: int = 100) -> Tensor:
    """Smooth by Laplacian adjusted maximum-likelihood estimation (LAME, CVPR 2022).

    Repeat Y = softmax(log P + W Y). The classifier's probabilities P remain a separate term, and
    nothing is assumed about how often classes occur.
    """
    opinion_NC = probabilities_NC.clamp(min=LOG_FLOOR).log()
    smoothed_NC = probabilities_NC
    for _ in range(rounds):
        before_NC = smoothed_NC
        smoothed_NC = (opinion_NC + neighbours.add_up(before_NC)).softmax(dim=1)
        if (smoothed_NC - before_NC).abs().max() < TOLERANCE:
            break
    return smoothed_NC


def propagate(
    probabilities_NC: Tensor, neighbours: Neighbours, alpha: float, rounds: int = 100
) -> Tensor:
    """Spread probabilities over the graph: label spreading (Zhou et al., NIPS 2003).

    Repeat Z = alpha S Z + (1 - alpha) P with S = D^-1/2 W D^-1/2; return Z with rows that sum to 1.
    """
    ones_N1 = torch.ones_like(probabilities_NC[:, :1])
    scale_N1 = neighbours.add_up(ones_N1).clamp(min=1e-12).rsqrt()
    spread_NC = probabilities_NC
    for _ in range(rounds):
        before_NC = spread_NC
        moved_NC = scale_N1 * neighbours.add_up(scale_N1 * before_NC)
        spread_NC = alpha * moved_NC + (1 - alpha) * probabilities_NC
        if (spread_NC - before_NC).abs().max() < TOLERANCE:
            break
    return spread_NC / spread_NC.sum(dim=1, keepdim=True).clamp(min=1e-12)
