"""GTDA+LR: domain adaptation as a game on a graph (arXiv 1905.02036).

Implemented: on fixed features (of pretrained weights, or else those that pretraining has made):
source and target features are the nodes of a graph with weights exp(-d^2 / (s_i s_j)); every node plays a mixed
strategy over the classes, the source its label, the target at first the posterior of a logistic regression on the source; the
target's strategies replicate by their neighbours' payoffs until they settle.
Our choices, as the abstract leaves them open: features standardised in each domain; a node's scale s is the distance to its
seventh neighbour; edges to the 20 nearest nodes. A new image, which is no node, moves once from its posterior against its settled
neighbours; one that is a node (all target images of the run) has the node's strategy.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from certvol.alignment import gtda, gtda_strategies, logistic_regression
from certvol.bounds import bounded
from certvol.closed_form import ClosedFormMethod


class Method(ClosedFormMethod):
    summary = "GTDA+LR on fixed features: labels spread over a graph by a game; transductive"
    arrays = ("weight_CD", "bias_C", "nodes_MD", "strategies_MC", "scales_M")
    weight_CD: Tensor
    bias_C: Tensor
    nodes_MD: Tensor
    strategies_MC: Tensor
    scales_M: Tensor

    @dataclass(frozen=True, kw_only=True)
    class Config:
        neighbours: int = bounded(20, above=0)
        rounds: int = bounded(200, above=0)
        strength: float = bounded(1.0, above=0)  # of the data against the penalty of the logistic regression

    def fit_features(self, source_SD: Tensor, labels_S: Tensor, target_TD: Tensor) -> None:
        source, target = self.keep_standardised(source_SD, target_TD)
        labels, classes = labels_S.numpy(), self.network.num_classes
        weight_CD, bias_C = logistic_regression(source, labels, classes, self.config.strength)
        posterior_TC = torch.from_numpy(target @ weight_CD.T + bias_C).softmax(1).numpy()
        game = gtda(source, labels, target, posterior_TC, self.config.neighbours, self.config.rounds)
        self.keep(
            weight_CD=weight_CD,
            bias_C=bias_C,
            nodes_MD=game.nodes_ND,
            strategies_MC=game.strategies_NC,
            scales_M=game.scales_N,
        )

    def fitted_logits(self, rows_ND: Tensor) -> Tensor:
        start_NC = (rows_ND @ self.weight_CD.T + self.bias_C).softmax(1)
        strategies_NC = gtda_strategies(
            rows_ND, start_NC, self.nodes_MD, self.strategies_MC, self.scales_M, self.config.neighbours
        )
        return strategies_NC.clamp_min(1e-12).log()
