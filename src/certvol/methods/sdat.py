"""Smooth Domain-Adversarial Training, SDAT (Rangwani et al., ICML 2022): CDAN and MCC, trained
towards a flat minimum of the task loss.

Implemented: the terms of `cdan` + `confusion_weight` * the class confusion of `mcc` on the target.
A step takes its gradients at weights moved by `radius` along the gradient of the task loss, which
is cross-entropy and confusion, without the adversarial term (SAM on the task loss). With `weight` 0
this is MCC with SAM, with `confusion_weight` 0 CDAN with SAM; `entropy` (CDAN+E) is as in `cdan`.
Deliberate differences: those of `cdan` and `mcc`, and pretraining is without SAM. The bottleneck
has the adversarial methods' width, 256. BatchNorm statistics move in both evaluations of a step, as
published. `entropy` is on by default as in `cdan`; the published scripts run CDAN without it:
`method.entropy false`. Published radius: 0.02 to 0.05; temperature 2, and 3 on VisDA.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from certvol.methods import cdan
from certvol.methods._base import Batch
from certvol.methods._losses import class_confusion
from certvol.settings import setting


class Method(cdan.Method):
    summary = "SDAT: CDAN and MCC, trained towards a flat minimum of the task loss"
    weighted: ClassVar[dict[str, str]] = {**cdan.Method.weighted, "confusion": "confusion_weight"}

    @dataclass(frozen=True, kw_only=True)
    class Config(cdan.Method.Config):
        radius: float = setting(
            0.02,
            at_least=0,
            help="Radius of sharpness-aware minimisation (SAM); 0: ordinary steps.",
        )
        confusion_weight: float = setting(1.0, at_least=0, help="Weight of the class confusion.")
        temperature: float = setting(2.0, above=0, help="Temperature of the class confusion.")

    @property
    def sam_radius(self) -> float:
        return float(self.config.radius)

    def sam_loss(self, terms: dict[str, Tensor]) -> Tensor:
        return self.loss({name: term for name, term in terms.items() if name != "adversarial"})

    def domain_losses(self, batch: Batch, rows_NB: Tensor, logits_NC: Tensor) -> dict[str, Tensor]:
        confusion = class_confusion(logits_NC[batch.num_source :], self.config.temperature)
        return super().domain_losses(batch, rows_NB, logits_NC) | {"confusion": confusion}
