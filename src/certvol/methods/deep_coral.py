"""Deep CORAL (Sun and Saenko, ECCV-W 2016): source and target of a batch should have the same covariance.

Implemented: cross-entropy on the source + `weight` * |cov_s - cov_t|^2 / (4 d^2), covariances of the batch with n - 1, on the
logits (as in the paper) or on the backbone's feature.
Deliberate differences: the paper's weight is set so that both terms are of like size at the end of training; here it is 1, and
yours to set. The classifier is the common one (two layers, dropout) and learns at the backbone's rate, where the paper's new
layer learns 10 times as fast (`training.head_rate 10`). `target_ce` is not in the paper.
Covariances of few rows are mostly noise, which falls with the fourth power of the logits' scale: with 64 rows per domain three
quarters of the term are there between two batches of one domain too, and shrinking logits is its easiest way down. Larger
batches have less of it (`training.batch_size 256` has the paper's 128 rows per domain).
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from certvol.bounds import bounded
from certvol.losses import coral, mean_cross_entropy
from certvol.methods.protocol import AdaptationMethod, Batch


class Method(AdaptationMethod):
    summary = "Deep CORAL: equal covariances of source and target"
    batches = "plain"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        weight: float = bounded(1.0, least=0)
        layer: Literal["logits", "features"] = "logits"  # whose covariances
        target_ce: bool = False  # also train on this cycle's pseudo-labels, like `basic`

    @property
    def term_weights(self) -> dict[str, float]:
        return {"coral": self.config.weight}

    def loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        features_ND = self.network.features(batch.images_NCHW)
        logits_NC = self.network.classifier(features_ND)
        labelled = batch.num_labelled(self.config.target_ce)
        terms = {"ce": mean_cross_entropy(logits_NC[:labelled], batch.labels_N[:labelled])}
        if batch.adapting:
            compared = logits_NC if self.config.layer == "logits" else features_ND
            terms["coral"] = coral(compared[: batch.num_source], compared[batch.num_source :])
        return terms
