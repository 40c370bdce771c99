"""Minimum Class Confusion (Jin et al., ECCV 2020): predictions on the target should not hesitate between two classes.

Implemented: cross-entropy on the source + `weight` * the class confusion of the batch's target rows, softened by `temperature`,
rows weighted by 1 + exp(-entropy).
Deliberate differences: no bottleneck (published: 1024 wide) but the common classifier, at the backbone's learning rate
(published: 10 times that). `target_ce` is not in the paper.
"""

from dataclasses import dataclass

from torch import Tensor

from certvol.bounds import bounded
from certvol.losses import class_confusion, mean_cross_entropy
from certvol.methods.protocol import AdaptationMethod, Batch


class Method(AdaptationMethod):
    summary = "Minimum Class Confusion: no hesitation between two classes on the target"
    batches = "plain"

    @dataclass(frozen=True, kw_only=True)
    class Config:
        weight: float = bounded(1.0, least=0)
        temperature: float = bounded(2.5, above=0)  # published: 2.5, and 3 on VisDA
        target_ce: bool = False  # also train on this cycle's pseudo-labels, like `basic`

    @property
    def term_weights(self) -> dict[str, float]:
        return {"confusion": self.config.weight}

    def loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        logits_NC = self.network.classifier(self.network.features(batch.images_NCHW))
        labelled = batch.num_labelled(self.config.target_ce)
        terms = {"ce": mean_cross_entropy(logits_NC[:labelled], batch.labels_N[:labelled])}
        if batch.adapting:
            terms["confusion"] = class_confusion(logits_NC[batch.num_source :], self.config.temperature)
        return terms
