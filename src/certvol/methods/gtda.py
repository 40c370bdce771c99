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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from certvol.methods._alignment import Game, Problem, gtda, gtda_strategies, logistic_regression
from certvol.methods._closed_form import Fitted, LinearMethod
from certvol.settings import setting


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
