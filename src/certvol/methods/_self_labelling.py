"""Base of methods that label the target by its own clusters or neighbours."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from certvol.methods._base import AdaptationMethod, Batch
from certvol.methods._domain_loss import BottleneckClassifier
from certvol.methods._losses import mean_or_zero, smoothed_cross_entropy
from certvol.nn.network import Network
from certvol.settings import setting


class SelfLabellingMethod(AdaptationMethod):
    """Smoothed cross-entropy on the source; in adaptation `target_losses`, on plain batches."""

    batches = "plain"
    labels_whole_target = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        bottleneck: int = setting(256, above=0, at_most=2**16, help="Width of the bottleneck.")
        label_smoothing: float = setting(
            0.1, at_least=0, below=1, help="Smoothing of source labels."
        )

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__(network, config)
        network.classifier = BottleneckClassifier(network, config.bottleneck, rectified=False)

    @property
    def head(self) -> BottleneckClassifier:
        head = self.network.classifier
        assert isinstance(head, BottleneckClassifier)
        return head

    def target_logits(self, rows_TB: Tensor) -> Tensor:
        """Return the logits that `target_losses` gets, from the bottleneck's output."""
        return self.head.classify(rows_TB)

    def target_losses(self, batch: Batch, logits_TC: Tensor) -> dict[str, Tensor]:
        """Return the terms of adaptation on the batch's target rows, which may be none."""
        raise NotImplementedError

    def loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        split, smoothing = batch.num_source, self.config.label_smoothing
        rows_NB = self.head.bottleneck(self.network.features(batch.inputs))
        terms = {}
        if not (batch.adapting and self.source_free):
            logits_SC, labels_S = self.head.classify(rows_NB[:split]), batch.labels_N[:split]
            ce_S = smoothed_cross_entropy(logits_SC, labels_S, smoothing)
            terms["ce"] = mean_or_zero(ce_S)
        if batch.adapting:
            terms |= self.target_losses(batch, self.target_logits(rows_NB[split:]).float())
        return terms
