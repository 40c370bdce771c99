"""A narrow layer between backbone and classifier, on which methods compare the domains."""

import torch.nn.functional as F
from torch import Tensor, nn

from certvol.nn.heads import Classifier
from certvol.nn.network import Network
from certvol.nn.norm import DomainBatchNorm


class Bottleneck(nn.Module):
    """ReLU(BatchNorm(Linear D -> B)). Whose statistics it uses is `model.norm`'s to say, as in the backbone."""

    def __init__(self, network: Network, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(network.info.dim, width)
        self.norm = DomainBatchNorm(nn.BatchNorm1d(width), network.domains)

    def forward(self, features_ND: Tensor) -> Tensor:
        return F.relu(self.norm(self.linear(features_ND)))


class BottleneckClassifier(Classifier):
    """A bottleneck and a linear classifier on it; of width 0: the common classifier, on the backbone's feature.

    Takes the place of `network.classifier`, so that whatever classifies features does so through the bottleneck.
    """

    def __init__(self, network: Network, width: int) -> None:
        common = network.classifier
        layers = 2 if width == 0 and common.hidden is not None else 1
        super().__init__(width or network.info.dim, network.num_classes, layers, common.dropout)
        self.width = width or network.info.dim
        self.bottleneck: nn.Module = Bottleneck(network, width) if width > 0 else nn.Identity()

    def forward(self, features: Tensor, dropout: float | None = None) -> Tensor:
        return self.classify(self.bottleneck(features), dropout)

    def classify(self, rows_NB: Tensor, dropout: float | None = None) -> Tensor:
        """Of the bottleneck's output. Dropout stands before the classifier, not before the bottleneck."""
        return super().forward(rows_NB, dropout)


def install(network: Network, width: int) -> int:
    """Gives the network a bottleneck of this width (0: none), and returns how wide its output is."""
    network.classifier = classifier = BottleneckClassifier(network, width)
    return classifier.width


def head_of(network: Network) -> BottleneckClassifier:
    if not isinstance(network.classifier, BottleneckClassifier):
        raise AssertionError("a bottleneck is installed before it is used")
    return network.classifier


def compared_rows(network: Network, images_NCHW: Tensor) -> tuple[Tensor, Tensor]:
    """(what the bottleneck makes of images, logits)."""
    head = head_of(network)
    rows_NB = head.bottleneck(network.features(images_NCHW))
    return rows_NB, head.classify(rows_NB)
