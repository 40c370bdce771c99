"""SimNet (Pinheiro, "Unsupervised Domain Adaptation with Similarity Learning", CVPR 2018):
classification by similarity to a prototype of each class.

Implemented, after SimNet: images and classes have layers of their own. A logit is f(x)^T U^T V m_c,
where f(x) are an image's features behind a bottleneck, m_c is the class's prototype, the mean of
another bottleneck's output over its source images, and U and V have `rank` rows. Cross-entropy on
the source + DANN's loss on f(x) + `orthogonality` * the squared cosines between the prototypes of
different classes.
Our choices, because we did not find the published ones: a prototype is a moving average of its
class's means in batches, with which it starts, and the gradient flows through the newest mean. A
class that no batch has shown has a random prototype. Similarities are divided by the root of the
rank, U has biases, squared cosines are summed over pairs and divided by the number of classes, and
neither bottleneck has a ReLU. `target_ce` is not in the paper.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from certvol.methods._adversary import AdversarialMethod
from certvol.methods._base import Batch
from certvol.methods._domain_loss import Bottleneck, BottleneckClassifier
from certvol.methods._losses import class_means, mean_cross_entropy
from certvol.nn.heads import Classifier, Drop
from certvol.nn.network import Network
from certvol.settings import setting


class SimilarityClassifier(BottleneckClassifier):
    """Similarities of f(x) to prototypes; the layer `output` is U, and `key` is V."""

    start_CB: Tensor
    """Prototypes of classes that no batch has shown."""
    sums_CB: Tensor
    """Prototypes times `seen_C`."""
    seen_C: Tensor
    """1 if a class has been seen; after averaging, the share of processes that saw it."""

    def __init__(self, network: Network, width: int, rank: int) -> None:
        super().__init__(network, width, rectified=False)
        self.output = nn.Linear(self.width, rank)
        self.key = nn.Linear(self.width, rank, bias=False)
        self.of_classes = Bottleneck(network, self.width, rectified=False)
        self.register_buffer("start_CB", torch.randn(network.num_classes, self.width))
        self.register_buffer("sums_CB", torch.zeros(network.num_classes, self.width))
        self.register_buffer("seen_C", torch.zeros(network.num_classes))

    def classify(self, rows_NB: Tensor, drop: Drop | None = None) -> Tensor:
        return self.similarities(rows_NB, self.prototypes_CB, drop)

    @property
    def prototypes_CB(self) -> Tensor:
        seen_C1 = self.seen_C[:, None]
        return torch.where(seen_C1 > 0, self.sums_CB / seen_C1.clamp(min=1e-6), self.start_CB)

    def similarities(
        self, rows_NB: Tensor, prototypes_CB: Tensor, drop: Drop | None = None
    ) -> Tensor:
        queries_NR = Classifier.forward(self, rows_NB, drop)
        keys_CR: Tensor = self.key(prototypes_CB)
        return queries_NR @ keys_CR.T / math.sqrt(keys_CR.shape[1])

    def move_prototypes(
        self, rows_SB: Tensor, labels_S: Tensor, momentum: float
    ) -> tuple[Tensor, Tensor]:
        """Return prototypes and whether the batch has each class; store them while training."""
        means_CB, present_C = class_means(rows_SB, labels_S, len(self.seen_C))
        seen_C1, present_C1 = (self.seen_C > 0)[:, None], present_C[:, None] > 0
        stored_CB = self.prototypes_CB
        blended_CB = momentum * stored_CB + (1 - momentum) * means_CB
        moved_CB = torch.where(seen_C1, blended_CB, means_CB)
        moved_CB = torch.where(present_C1, moved_CB, stored_CB)
        if self.training:
            with torch.no_grad():
                self.sums_CB.copy_(moved_CB)
                self.seen_C.copy_((seen_C1 | present_C1)[:, 0].float())
        return moved_CB, present_C


def overlap(prototypes_CB: Tensor, present_C: Tensor) -> Tensor:
    """Sum the squared cosines over ordered pairs of present classes; divide by their number."""
    with torch.autocast(prototypes_CB.device.type, enabled=False):
        units_CB = F.normalize(prototypes_CB.float(), dim=1) * present_C[:, None]
        cosine_CC = units_CB @ units_CB.T * (1 - torch.eye(len(units_CB), device=units_CB.device))
        return cosine_CC.square().sum() / present_C.sum().clamp(min=1)


class Method(AdversarialMethod):
    summary = "SimNet: classify by similarity to a prototype of each class, with DANN's loss"
    weighted: ClassVar[dict[str, str]] = {
        **AdversarialMethod.weighted,
        "orthogonality": "orthogonality",
    }

    @dataclass(frozen=True, kw_only=True)
    class Config(AdversarialMethod.Config):
        rank: int = setting(512, above=0, at_most=2**16, help="Rank of the similarity.")
        orthogonality: float = setting(
            0.1, at_least=0, help="Weight of the cosines between prototypes."
        )
        prototype_momentum: float = setting(
            0.7,
            at_least=0,
            below=1,
            help="Share of a prototype that stays when a batch updates it.",
        )

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__(network, config)
        network.classifier = SimilarityClassifier(network, config.bottleneck, config.rank)
        self.discriminator = self.new_discriminator(self.head.width)

    @property
    def head(self) -> SimilarityClassifier:
        head = self.network.classifier
        assert isinstance(head, SimilarityClassifier)
        return head

    def loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        head, split = self.head, batch.num_source
        features_ND = self.network.features(batch.inputs)
        rows_NB, of_classes_NB = head.bottleneck(features_ND), head.of_classes(features_ND)
        prototypes_CB, present_C = head.move_prototypes(
            of_classes_NB[:split], batch.labels_N[:split], self.config.prototype_momentum
        )
        logits_NC = head.similarities(rows_NB, prototypes_CB)
        labelled = batch.num_labelled(self.config.target_ce)
        terms = {
            "ce": mean_cross_entropy(logits_NC[:labelled], batch.labels_N[:labelled]),
            "orthogonality": overlap(prototypes_CB, present_C),
        }
        if batch.adapting:
            terms["adversarial"] = self.adversarial_loss(batch, rows_NB)
        return terms
