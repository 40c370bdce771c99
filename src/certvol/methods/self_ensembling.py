"""Self-ensembling (French, Mackiewicz and Fisher, ICLR 2018): agree with an averaged teacher on another view of the
target.

Implemented: cross-entropy on the source + `consistency_weight` * (mean over target images of the squared difference
between the student's and the teacher's probabilities, counted where the teacher is surer than `threshold` +
`balance_weight` * class balance). The teacher is the average of the student's weights; it computes with the batch's own
statistics and dropout, as the student does, labels the target and is what is delivered.
Deliberate differences: the common network, optimiser and views (published: Adam, a 512 wide bottleneck, first layers up
to the first block fixed, views with stronger colours), and pretraining on the source. The published code's two quirks
(softmax taken twice on the source, log(1 + q) in the class balance where log(1 - q) is meant) are behind `quirks`.
Published with batches of each domain's own, which are `model.norm dsbn` or `per_domain` here; with mixed statistics the
teacher sees the source rows too, so that its statistics are of the same mixture.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from certvol.bounds import bounded
from certvol.losses import mean_cross_entropy, mean_or_zero
from certvol.methods.protocol import AdaptationMethod, Batch
from certvol.nn.network import Network
from certvol.nn.teacher import Teacher


def consistency(student_NC: Tensor, teacher_NC: Tensor, sure_N: Tensor) -> Tensor:
    """Mean over all rows of the squared difference, counted where the teacher is sure; 0 of no rows."""
    return mean_or_zero(sure_N * (student_NC - teacher_NC).square().mean(dim=1))


def class_balance(probabilities_NC: Tensor, quirk: bool = False) -> Tensor:
    """Binary cross-entropy of the mean probability of each class against 1 / C, summed over the classes; 0 of no rows."""
    if len(probabilities_NC) == 0:
        return probabilities_NC.sum()
    q_C = probabilities_NC.mean(dim=0).clamp(1e-6, 1 - 1e-6)
    share = 1 / len(q_C)
    return -(share * q_C.log() + (1 - share) * (1 + q_C if quirk else 1 - q_C).log()).sum()


class Method(AdaptationMethod):
    summary = "self-ensembling: agreement with an averaged teacher on another view of the target"
    batches = "plain"
    views_per_image = 2

    @dataclass(frozen=True, kw_only=True)
    class Config:
        teacher_decay: float = bounded(0.99, least=0, below=1)
        consistency_weight: float = bounded(10.0, least=0)
        threshold: float = bounded(0.9, least=0, below=1)  # of the teacher's highest probability
        balance_weight: float = bounded(0.01, least=0)  # times the weight of the consistency
        quirks: bool = False  # of the published code

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__(network, config)
        self.teacher = Teacher(self, network, config.teacher_decay)

    @property
    def term_weights(self) -> dict[str, float]:
        weight = self.config.consistency_weight
        return {"consistency": weight, "balance": weight * self.config.balance_weight}

    def _taught(self, batch: Batch) -> Tensor:
        """The teacher's probabilities for the other view of the target rows."""
        if self.teacher is None or batch.other_images_NCHW is None:
            raise ValueError("self-ensembling trains with a teacher and two views")
        mixed = self.network.has_batch_norm and self.network.domains.mode == "mixed"
        first = 0 if mixed else batch.num_source
        images_NCHW = batch.other_images_NCHW[first:]
        with self.teacher.in_charge(), self.network.rows_of(num_source=batch.num_source - first):
            logits_NC = self.network.classifier(self.network.features(images_NCHW))
        return torch.softmax(logits_NC[batch.num_source - first :].float(), dim=1)

    def loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        some_target = batch.adapting and batch.num_source < len(batch.labels_N)
        taught_NC = (
            self._taught(batch) if some_target else None
        )  # before the student, whose gradients need its own weights
        logits_NC = self.network.classifier(self.network.features(batch.images_NCHW))
        source_NC, labels_N = logits_NC[: batch.num_source], batch.labels_N[: batch.num_source]
        if self.config.quirks:
            source_NC = source_NC.float().softmax(dim=1)
        terms = {"ce": mean_cross_entropy(source_NC, labels_N)}
        if batch.adapting:
            student_NC = logits_NC[batch.num_source :].float().softmax(dim=1)
            if taught_NC is None:
                taught_NC = student_NC.detach()
            sure_N = (taught_NC.amax(dim=1) > self.config.threshold).float() if len(taught_NC) > 0 else taught_NC.sum(1)
            terms["consistency"] = consistency(student_NC, taught_NC, sure_N)
            terms["balance"] = class_balance(student_NC, self.config.quirks) * mean_or_zero(sure_N)
        return terms
