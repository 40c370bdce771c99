"""GTDA+LR: domain adaptation as a game on a graph (arXiv 1905.02036).

Implemented: on fixed features (of the pretrained weights or, without these, of the run's own
pretraining), source and target rows are the nodes of a graph, whose edges have the weights
exp(-d^2 / (s_i s_j)). Every node plays a mixed strategy over the classes: a source node its label,
a target node at first the posterior of a logistic regression on the source. The strategies of the
target replicate by their neighbours' payoffs until they settle.
Our choices, which the abstract leaves open: features are standardised in each domain; a node's
scale s is the distance to its seventh neighbour; edges lead to the 20 nearest nodes. A new image
moves once from its posterior against its settled neighbours; an image that is a node (all target
images of the run) has the node's strategy.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from certvol.methods._closed_form import (
    SMALLEST_SCALE,
    Array,
    Fitted,
    LinearMethod,
    Problem,
    logistic_regression,
    row_distances,
    row_parts,
)
from certvol.settings import setting

# Its distance is a node's bandwidth (the self-tuning kernel of Zelnik-Manor and Perona).
SCALE_NEIGHBOUR = 7
SETTLED = 1e-6  # largest change of a strategy at which the game ends


class Game(NamedTuple):
    """A graph whose nodes have settled on mixed strategies, one share per class."""

    nodes_MD: Tensor
    strategies_MC: Tensor
    scales_M: Tensor
    """Distance of each node to its seventh neighbour."""


def neighbours(rows_ND: Tensor, nodes_MD: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return distances and numbers of the nearest nodes of each row, the nearest first."""
    count = min(count, len(nodes_MD))
    parts = [
        row_distances(rows, nodes_MD).topk(count, largest=False) for rows in row_parts(rows_ND)
    ]
    return torch.cat([part.values for part in parts]), torch.cat([part.indices for part in parts])


def _own_scale(distances_NK: Tensor) -> Tensor:
    return distances_NK[:, min(SCALE_NEIGHBOUR, distances_NK.shape[1]) - 1].clamp_min(
        SMALLEST_SCALE
    )


def similarities(distances_NK: Tensor, own_scale_N1: Tensor, other_scales_NK: Tensor) -> Tensor:
    """Return w_ij = exp(-d_ij^2 / (s_i s_j))."""
    scales_NK = (own_scale_N1 * other_scales_NK).clamp_min(SMALLEST_SCALE)
    return (-distances_NK.square() / scales_NK).exp()


def payoffs(weights_NK: Tensor, numbers_NK: Tensor, strategies_MC: Tensor) -> Tensor:
    """Return u_i(h) = sum_j w_ij x_jh over the neighbours of each row."""
    return (weights_NK[:, :, None] * strategies_MC[numbers_NK]).sum(1)


def replicate(strategies_NC: Tensor, payoffs_NC: Tensor) -> Tensor:
    """Return x_ih u_i(h) / sum_k x_ik u_i(k); a row without payoffs keeps its strategy."""
    moved_NC = strategies_NC * payoffs_NC
    total_N1 = moved_NC.sum(1, keepdim=True)
    return torch.where(total_N1 > 0, moved_NC / total_N1.clamp_min(1e-300), strategies_NC)


def gtda(
    problem: Problem, start_TC: Array, num_neighbours: int = 20, most_rounds: int = 200
) -> Game:
    """Play the game from `start_TC` until target nodes settle; source nodes are fixed."""
    num_source = len(problem.source_SD)
    nodes_MD = torch.from_numpy(np.concatenate([problem.source_SD, problem.target_TD]))
    one_hot_SC = np.eye(problem.num_classes)[problem.labels_S]
    strategies_MC = torch.from_numpy(np.concatenate([one_hot_SC, start_TC]))
    distances, numbers = neighbours(nodes_MD, nodes_MD, max(num_neighbours, SCALE_NEIGHBOUR) + 1)
    distances, numbers = distances[:, 1:], numbers[:, 1:]  # without the node itself, or its double
    scales_M = _own_scale(distances)
    distances = distances[num_source:, :num_neighbours]
    numbers = numbers[num_source:, :num_neighbours]
    weights_TK = similarities(distances, scales_M[num_source:, None], scales_M[numbers])
    target_TC = strategies_MC[num_source:]
    for _ in range(most_rounds):
        moved_TC = replicate(target_TC, payoffs(weights_TK, numbers, strategies_MC))
        change = float((moved_TC - target_TC).abs().max()) if len(moved_TC) else 0.0
        target_TC.copy_(moved_TC)
        if change < SETTLED:
            break
    return Game(nodes_MD, strategies_MC, scales_M)


def gtda_strategies(rows_ND: Tensor, start_NC: Tensor, game: Game, num_neighbours: int) -> Tensor:
    """Return the strategy of a row that is a node; move a new row once from `start_NC`."""
    nodes_MD, strategies_MC, scales_M = game
    distances, numbers = neighbours(rows_ND, nodes_MD, max(num_neighbours, SCALE_NEIGHBOUR))
    own_scale_N1 = _own_scale(distances)[:, None]
    distances, numbers = distances[:, :num_neighbours], numbers[:, :num_neighbours]
    weights_NK = similarities(distances, own_scale_N1, scales_M[numbers])
    moved_NC = replicate(start_NC, payoffs(weights_NK, numbers, strategies_MC))
    # Another batch size changes the last digits of a feature.
    is_node_N1 = distances[:, :1] < 1e-3 * own_scale_N1
    return torch.where(is_node_N1, strategies_MC[numbers[:, 0]], moved_NC)


class Method(LinearMethod):
    summary = "GTDA+LR on fixed features: labels spread over a graph of neighbours by a game"
    arrays = (*LinearMethod.arrays, *Game._fields)
    nodes_MD: Tensor
    strategies_MC: Tensor
    scales_M: Tensor

    @dataclass(frozen=True, kw_only=True)
    class Config:
        neighbours: int = setting(
            20, above=0, at_most=2**16, help="Neighbours of each row in the graph."
        )
        rounds: int = setting(200, above=0, at_most=10_000, help="Largest number of iterations.")
        strength: float = setting(1.0, above=0, help="Inverse regularisation of the regression.")

    @staticmethod
    def fit(problem: Problem, config: Any, draws: np.random.Generator) -> Fitted:
        """Return the regression that starts the game, and the settled nodes."""
        source_SD, labels_S, target_TD, classes = problem
        weight_CD, bias_C = logistic_regression(source_SD, labels_S, classes, config.strength)
        posterior_TC = torch.from_numpy(target_TD @ weight_CD.T + bias_C).softmax(1).numpy()
        game = gtda(problem, posterior_TC, config.neighbours, config.rounds)
        nodes = {name: tensor.numpy() for name, tensor in game._asdict().items()}
        return {"weight_CD": weight_CD, "bias_C": bias_C, **nodes}

    def fitted_logits(self, rows_ND: Tensor) -> Tensor:
        start_NC = super().fitted_logits(rows_ND).softmax(1)
        game = Game(self.nodes_MD, self.strategies_MC, self.scales_M)
        strategies_NC = gtda_strategies(rows_ND, start_NC, game, self.config.neighbours)
        return strategies_NC.clamp_min(1e-12).log()
