"""Base of methods that add a loss between the domains to the cross-entropy, and a bottleneck."""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from certvol.methods._base import AdaptationMethod, Batch
from certvol.methods._losses import mean_cross_entropy
from certvol.nn.heads import Classifier, Drop
from certvol.nn.network import Network
from certvol.nn.norm import DomainBatchNorm
from certvol.settings import setting


class DomainLossMethod(AdaptationMethod):
    """Cross-entropy on the source; in adaptation also `domain_losses`, on plain batches.

    A method names in `weighted` the term that `method.weight` scales.
    """

    batches = "plain"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        weight: float = setting(1.0, at_least=0, help="Weight of the method's loss.")
        target_ce: bool = setting(
            False, help="Also train on this cycle's pseudo-labels by cross-entropy."
        )

    def compared(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the features that are compared, and the logits."""
        features_ND = self.network.features(inputs)
        return features_ND, self.network.classifier(features_ND)

    def domain_losses(self, batch: Batch, rows_NB: Tensor, logits_NC: Tensor) -> dict[str, Tensor]:
        """Return the terms of adaptation besides the cross-entropy."""
        raise NotImplementedError

    def loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        rows_NB, logits_NC = self.compared(batch.inputs)
        labelled = batch.num_labelled(self.config.target_ce)
        terms = {"ce": mean_cross_entropy(logits_NC[:labelled], batch.labels_N[:labelled])}
        return terms | self.domain_losses(batch, rows_NB, logits_NC) if batch.adapting else terms


class Bottleneck(nn.Module):
    """ReLU(BatchNorm(Linear D -> B)), or without the ReLU. The norm mode is `model.norm`."""

    def __init__(self, network: Network, width: int, rectified: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(network.dim, width)
        self.norm = DomainBatchNorm(nn.BatchNorm1d(width), network.domains)
        self.rectified = rectified

    def forward(self, features_ND: Tensor) -> Tensor:
        rows_NB: Tensor = self.norm(self.linear(features_ND))
        return F.relu(rows_NB) if self.rectified else rows_NB


class BottleneckClassifier(Classifier):
    """A bottleneck and a classifier of `layers` on it, in place of `network.classifier`.

    With width 0, this is the common classifier on the backbone's features.
    """

    def __init__(
        self, network: Network, width: int, layers: int = 1, rectified: bool = True
    ) -> None:
        common = network.classifier
        self.width = width or network.dim
        layers = 2 if width == 0 and common.hidden is not None else layers
        super().__init__(self.width, network.num_classes, layers, common.dropout)
        self.bottleneck: nn.Module = nn.Identity()
        if width > 0:
            self.bottleneck = Bottleneck(network, width, rectified)

    def forward(self, features: Tensor, drop: Drop | None = None) -> Tensor:
        return self.classify(self.bottleneck(features), drop)

    def classify(self, rows_NB: Tensor, drop: Drop | None = None) -> Tensor:
        """Return the logits of the bottleneck's output. Dropout acts behind the bottleneck."""
        return super().forward(rows_NB, drop)


class BottleneckMethod(DomainLossMethod):
    """A method that compares the domains behind a bottleneck."""

    @dataclass(frozen=True, kw_only=True)
    class Config(DomainLossMethod.Config):
        bottleneck: int = setting(
            256, at_least=0, at_most=2**16, help="Width of the bottleneck; 0: none."
        )

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__(network, config)
        self.network.classifier = BottleneckClassifier(network, config.bottleneck)

    @property
    def head(self) -> BottleneckClassifier:
        head = self.network.classifier
        assert isinstance(head, BottleneckClassifier)
        return head

    def compared(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        rows_NB = self.head.bottleneck(self.network.features(inputs))
        return rows_NB, self.head.classify(rows_NB)
