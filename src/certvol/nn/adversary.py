"""What tells the domains apart, and the layer that trains a network against it."""

from typing import Any

import torch
from torch import Tensor, nn


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
    """`x` itself; its gradient is multiplied by -coefficient, a scalar tensor on the device of `x`."""
    reversed_x: Tensor = _Reversal.apply(x, coefficient)  # type: ignore[no-untyped-call]
    return reversed_x


class _BatchNorm(nn.BatchNorm1d):
    """Of the batch's own statistics: the discriminator is of no use after training. One row alone has none, and passes."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, track_running_stats=False)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if len(input) > 1 else input


class DomainDiscriminator(nn.Module):
    """dim -> hidden -> hidden -> 1, with ReLU: a logit per row, high where it takes the row for a source image.

    Both domains should pass in one batch. Its normalisation never keeps them apart, whatever `model.norm` says: it would hide
    the very difference that is looked for.
    """

    def __init__(self, dim: int, hidden: int = 1024, batch_norm: bool = True, dropout: float = 0.0) -> None:
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
