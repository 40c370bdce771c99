"""Adversarial Dropout Regularization, ADR (Saito et al., ICLR 2018): learn features on which two
draws of the classifier's dropout agree.

Implemented: cross-entropy on the source; on the target the disagreement of two draws of dropout, d
= (KL(p2 || p1) + KL(p1 || p2)) / 2, averaged over rows and classes, in each part with the other
draw's probabilities fixed. The classifier increases d and everything before it decreases d, by a
gradient that is reversed and scaled by `generator_steps`.
Deliberate differences: one step with a reversed gradient (published: three alternating updates with
an optimiser each, the last one `generator_steps` times). The network is the common one (published:
three layers behind the features, without pretraining). Logarithms are those of the probabilities
(published code takes the softmax of the probabilities once more, which flattens d). `target_ce` is
not in the paper.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from certvol.methods._adversary import reverse_gradient
from certvol.methods._base import Batch
from certvol.methods._domain_loss import DomainLossMethod
from certvol.methods._losses import mean_or_zero
from certvol.nn.heads import Drop
from certvol.settings import setting


def disagreement(first_NC: Tensor, second_NC: Tensor) -> Tensor:
    """Return the symmetric divergence of two rows of logits, averaged over rows and classes.

    No gradient flows through the distribution that each divergence averages over.
    """
    log_p, log_q = first_NC.float().log_softmax(dim=1), second_NC.float().log_softmax(dim=1)
    q_to_p = log_q.detach().exp() * (log_q.detach() - log_p)
    p_to_q = log_p.detach().exp() * (log_p.detach() - log_q)
    return mean_or_zero((q_to_p + p_to_q).mean(dim=1)) / 2


class Method(DomainLossMethod):
    summary = "ADR: adversarial training until two draws of the classifier's dropout agree"
    weighted: ClassVar[dict[str, str]] = {"disagreement": "weight"}

    @dataclass(frozen=True, kw_only=True)
    class Config(DomainLossMethod.Config):
        drop: float = setting(0.5, above=0, below=1, help="Dropout rate of both draws.")
        generator_steps: float = setting(
            4.0, at_least=0, help="Factor of the reversed gradient: published updates per step."
        )

    def domain_losses(self, batch: Batch, rows_NB: Tensor, logits_NC: Tensor) -> dict[str, Tensor]:
        factor = rows_NB.new_full((), self.config.generator_steps)
        layers = 1 if self.network.classifier.hidden is None else 2
        masks_NMD = batch.dropout_masks(rows_NB.detach(), 2 * layers, self.config.drop)
        masks_NMD = masks_NMD[batch.num_source :] / (1 - self.config.drop)
        target_TB = reverse_gradient(rows_NB[batch.num_source :], factor)
        draws = [
            self.network.classifier(target_TB, _in_turn(masks_NMD[:, number * layers :]))
            for number in range(2)
        ]
        return {"disagreement": -disagreement(*draws)}


def _in_turn(masks_NMD: Tensor) -> Drop:
    """Drop the units of one mask after the other, one for each layer of a classifier."""
    masks = iter(masks_NMD.unbind(1))
    return lambda rows_ND: rows_ND * next(masks)
