"""Self-ensembling (French, Mackiewicz and Fisher, ICLR 2018): agree with an averaged teacher on
another view of the target.

Implemented: cross-entropy on the source + `consistency_weight` * (mean over target images of the
squared difference between the student's and the teacher's probabilities, counted if the teacher is
surer than `threshold` + `balance_weight` * class balance). The teacher is the average of the
student's weights; it computes with the batch's own statistics and dropout, as the student does,
labels the target and is delivered. Deliberate differences: network, optimiser and views are the
common ones (published: Adam, a 512 wide bottleneck, first layers up to the first block fixed, views
with stronger colours), and there is pretraining on the source. The published code's two quirks
(softmax taken twice on the source, log(1 + q) in the class balance instead of log(1 - q)) are
behind `quirks`. Published with batches of one domain each, which are `model.norm dsbn` or
`per_domain` here; with mixed statistics the teacher sees the source rows too, so that its
statistics are of the same mixture.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from certvol.methods._base import AdaptationMethod, Batch
from certvol.methods._losses import mean_cross_entropy, mean_or_zero
from certvol.nn.network import Network
from certvol.nn.teacher import Teacher
from certvol.settings import setting


def consistency(student_NC: Tensor, teacher_NC: Tensor, sure_N: Tensor) -> Tensor:
    """Average the squared difference over all rows; rows with an unsure teacher count as 0."""
    return mean_or_zero(sure_N * (student_NC - teacher_NC).square().mean(dim=1))


def class_balance(probabilities_NC: Tensor, quirk: bool = False) -> Tensor:
    """Sum over classes the binary cross-entropy of the mean probability against 1 / C.

    0 without rows.
    """
    if len(probabilities_NC) == 0:
        return probabilities_NC.sum()
    q_C = probabilities_NC.mean(dim=0).clamp(1e-6, 1 - 1e-6)
    share = 1 / len(q_C)
    return -(share * q_C.log() + (1 - share) * (1 + q_C if quirk else 1 - q_C).log()).sum()


class Method(AdaptationMethod):
    summary = "self-ensembling: agree with an averaged teacher on another view of the target"
    batches = "plain"
    views_per_image = 2

    @dataclass(frozen=True, kw_only=True)
    class Config:
        teacher_decay: float = setting(
            0.99,
            at_least=0,
            below=1,
            help="Decay per step of the average of weights that is the teacher.",
        )
        consistency_weight: float = setting(10.0, at_least=0, help="Weight of the consistency.")
        threshold: float = setting(
            0.9,
            at_least=0,
            below=1,
            help="Skip rows whose highest teacher probability is not above this.",
        )
        balance_weight: float = setting(
            0.01, at_least=0, help="Weight of the class balance, relative to the consistency's."
        )
        quirks: bool = setting(
            False,
            help="Reproduce two mistakes of the published code: softmax twice on the source, "
            "log(1 + q) in the class balance.",
        )

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__(network, config)
        self.teacher: Teacher = Teacher(self, network, config.teacher_decay)

    @property
    def term_weights(self) -> dict[str, float]:
        weight = self.config.consistency_weight
        return {"consistency": weight, "balance": weight * self.config.balance_weight}

    def _teach(self, batch: Batch) -> Tensor:
        """Return the teacher's probabilities for the other view of the target rows."""
        assert batch.other_inputs is not None, "the trainer gives two views"
        mixed = self.network.has_batch_norm and self.network.domains.mode == "mixed"
        first = 0 if mixed else batch.num_source
        inputs = batch.other_inputs[first:]
        with self.teacher.in_charge(), self.network.rows_of(num_source=batch.num_source - first):
            logits_NC = self.network.classifier(self.network.features(inputs))
        target_NC: Tensor = logits_NC[batch.num_source - first :]
        return target_NC.float().softmax(dim=1)

    def loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        split = batch.num_source
        # Before the student's pass, whose gradients need the student's own weights.
        taught_NC = self._teach(batch) if batch.adapting and split < len(batch.labels_N) else None
        logits_NC = self.network.classifier(self.network.features(batch.inputs))
        source_NC = logits_NC[:split]
        if self.config.quirks:
            source_NC = source_NC.float().softmax(dim=1)
        terms = {"ce": mean_cross_entropy(source_NC, batch.labels_N[:split])}
        if batch.adapting:
            student_NC = logits_NC[split:].float().softmax(dim=1)
            if taught_NC is None:
                taught_NC = student_NC.detach()
            sure_N = (taught_NC.amax(dim=1) > self.config.threshold).float()
            terms["consistency"] = consistency(student_NC, taught_NC, sure_N)
            terms["balance"] = class_balance(student_NC, self.config.quirks) * mean_or_zero(sure_N)
        return terms
