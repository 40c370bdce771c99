"""Minimum Class Confusion (Jin et al., ECCV 2020): penalise target predictions that hesitate
between two classes.

Implemented: cross-entropy on the source + `weight` * the class confusion of the batch's target
rows, softened by `temperature`, rows weighted by 1 + exp(-entropy).
Deliberate differences: no bottleneck (published: 1024 wide) but the common classifier, at the
backbone's learning rate (published: 10 times that). `target_ce` is not in the paper.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from certvol.methods._base import Batch
from certvol.methods._domain_loss import DomainLossMethod
from certvol.methods._losses import class_confusion
from certvol.settings import setting


class Method(DomainLossMethod):
    summary = (
        "Minimum Class Confusion: penalise target predictions that hesitate between two classes"
    )
    weighted: ClassVar[dict[str, str]] = {"confusion": "weight"}

    @dataclass(frozen=True, kw_only=True)
    class Config(DomainLossMethod.Config):
        temperature: float = setting(
            2.5, above=0, help="Temperature of the probabilities; published: 2.5, and 3 on VisDA."
        )

    def domain_losses(self, batch: Batch, rows_NB: Tensor, logits_NC: Tensor) -> dict[str, Tensor]:
        return {
            "confusion": class_confusion(logits_NC[batch.num_source :], self.config.temperature)
        }
