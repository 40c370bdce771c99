"""A domain discriminator, gradient reversal, and the base class of methods that use them."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from certvol.methods._base import Batch
from certvol.methods._domain_loss import BottleneckMethod
from certvol.methods._losses import domain_confusion, ramp
from certvol.settings import setting


class _Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, coefficient: Tensor) -> Tensor:
        ctx.save_for_backward(coefficient)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (coefficient,) = ctx.saved_tensors
        return (gradients[0] * -coefficient).to(gradients[0].dtype), None


def reverse_gradient(x: Tensor, coefficient: Tensor) -> Tensor:
    """Return `x`; its gradient is multiplied by -coefficient, a scalar on the same device."""
    reversed_x: Tensor = _Reversal.apply(x, coefficient)  # type: ignore[no-untyped-call]
    return reversed_x


class _BatchNorm(nn.BatchNorm1d):
    """BatchNorm without running statistics, because a discriminator is not used after training.

    A single row has no statistics; it passes unchanged.
    """

    def __init__(self, dim: int) -> None:
        super().__init__(dim, track_running_stats=False)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if len(input) > 1 else input


class DomainDiscriminator(nn.Module):
    """Three linear layers with ReLU: a logit per row, high for a source image.

    Pass both domains in one batch. The normalisation ignores `model.norm`, because separate
    statistics would hide the difference between the domains.
    """

    def __init__(
        self, dim: int, hidden: int = 1024, batch_norm: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width in (dim, hidden):
            layers.append(nn.Linear(width, hidden))
            if batch_norm:
                layers.append(_BatchNorm(hidden))
            layers.append(nn.ReLU())
            if dropout > 0:
                layers.append(nn.Dropout(dropout))
        self.layers = nn.Sequential(*layers, nn.Linear(hidden, 1))

    def forward(self, rows_ND: Tensor) -> Tensor:
        logits_N: Tensor = self.layers(rows_ND).squeeze(1)
        return logits_N


class AdversarialMethod(BottleneckMethod):
    """A method whose bottleneck learns to confuse a discriminator, by a reversed gradient."""

    weighted: ClassVar[dict[str, str]] = {"adversarial": "weight"}
    ramps = True
    discriminator: DomainDiscriminator

    @dataclass(frozen=True, kw_only=True)
    class Config(BottleneckMethod.Config):
        reversal: float = setting(1.0, at_least=0, help="Final factor of the reversed gradient.")
        discriminator_width: int = setting(
            1024, above=0, at_most=2**16, help="Hidden units of the discriminator's layers."
        )
        discriminator_norm: bool = setting(True, help="Use BatchNorm in the discriminator.")

    def new_discriminator(self, dim: int, dropout: float = 0.0) -> DomainDiscriminator:
        hidden, batch_norm = self.config.discriminator_width, self.config.discriminator_norm
        return DomainDiscriminator(dim, hidden, batch_norm, dropout)

    def adversarial_loss(
        self, batch: Batch, rows_NB: Tensor, scale: float = 1.0, certainty_N: Tensor | None = None
    ) -> Tensor:
        """Return the discriminator's loss. `scale` multiplies the reversed gradient."""
        coefficient = scale * self.config.reversal * ramp(batch.progress)
        logits_N = self.discriminator(reverse_gradient(rows_NB, coefficient))
        return domain_confusion(logits_N, batch.num_source, certainty_N)
