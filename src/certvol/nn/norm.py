"""Whose statistics a BatchNorm layer uses.

`mixed`       one set, of the whole batch: what an ordinary layer does
`per_domain`  a set for the source and one for the target, in training, labelling and prediction; shared affine parameters
`dsbn`        the same, with affine parameters of their own too
`frozen`      those the weights came with, never changed

All modes are one layer with one layout of weights, so that the mode can change after pretraining. Rows of a training batch
are ordered source first; the network's `Domains` says how many they are, or whose a whole evaluation batch is.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SOURCE, TARGET = 0, 1
Mode = Literal["mixed", "per_domain", "dsbn", "frozen"]


@dataclass
class Domains:
    """Shared by all layers of one network: the mode, and the domains of the rows that are passing through."""

    mode: Mode = "mixed"
    num_source: int | None = None
    """Training: how many rows, from the first, are source images. None: all rows are of domain `whole_batch`."""
    whole_batch: int = SOURCE
    synchronised: bool = False
    """Training: statistics over the rows of all processes."""

    @property
    def apart(self) -> bool:
        return self.mode in ("per_domain", "dsbn")


class DomainBatchNorm(nn.Module):
    """BatchNorm with two sets of statistics; the second is the target's where domains are kept apart.

    One value per channel has no statistics of its own: such a batch is normalised with the stored ones, which do not move.
    """

    running_mean_2C: Tensor
    running_var_2C: Tensor

    def __init__(self, layer: nn.BatchNorm1d | nn.BatchNorm2d, domains: Domains) -> None:
        super().__init__()
        if layer.running_mean is None or layer.running_var is None or layer.weight is None:
            raise ValueError(
                "a BatchNorm layer without running statistics or affine parameters cannot be split by domain"
            )
        self.domains = domains
        self.eps = layer.eps
        self.momentum = 0.1 if layer.momentum is None else layer.momentum
        affine_sets = 2 if domains.mode == "dsbn" else 1
        self.weight_SC = nn.Parameter(layer.weight.detach().repeat(affine_sets, 1))
        self.bias_SC = nn.Parameter(layer.bias.detach().repeat(affine_sets, 1))
        self.register_buffer("running_mean_2C", layer.running_mean.detach().repeat(2, 1))
        self.register_buffer("running_var_2C", layer.running_var.detach().repeat(2, 1))

    def _normalise(self, rows: Tensor, domain: int) -> Tensor:
        affine = min(domain, len(self.weight_SC) - 1)
        mean_C, var_C = self.running_mean_2C[domain], self.running_var_2C[domain]
        weight_C, bias_C = self.weight_SC[affine], self.bias_SC[affine]
        training = self.training and self.domains.mode != "frozen"
        if training and self.domains.synchronised:
            return _over_all_processes(rows, mean_C, var_C, weight_C, bias_C, self.momentum, self.eps)
        training = training and rows.numel() > rows.shape[1]  # one value alone has no statistics
        return F.batch_norm(rows, mean_C, var_C, weight_C, bias_C, training, self.momentum, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        if not self.domains.apart:
            return self._normalise(x, SOURCE)
        split = self.domains.num_source
        if split is None:
            return self._normalise(x, self.domains.whole_batch)
        # Where statistics are of all processes, one without rows of a domain still takes part: others may have some.
        if (split == 0 or split == x.shape[0]) and not (self.training and self.domains.synchronised):
            return self._normalise(x, TARGET if split == 0 else SOURCE)
        fusible = self.training and x.ndim == 4 and 2 * split == len(x) and not self.domains.synchronised
        if fusible and torch.compiler.is_compiling():
            return self.normalise_halves(x)
        return torch.cat([self._normalise(x[:split], SOURCE), self._normalise(x[split:], TARGET)])

    def normalise_halves(self, x: Tensor) -> Tensor:
        """The same for a training batch of as many source as target rows, in a form that a compiler fuses: no slice, no copy."""
        halves = x.float().reshape(2, len(x) // 2, *x.shape[1:])
        var_2C, mean_2C = torch.var_mean(halves, dim=(1, 3, 4), correction=0)
        count = halves.numel() // mean_2C.numel()
        with torch.no_grad():
            self.running_mean_2C.lerp_(mean_2C.detach(), self.momentum)
            self.running_var_2C.lerp_(var_2C.detach() * (count / max(1, count - 1)), self.momentum)
        scale_2C = self.weight_SC * (var_2C + self.eps).rsqrt()
        shift_2C = self.bias_SC - mean_2C * scale_2C
        out: Tensor = halves * scale_2C[:, None, :, None, None] + shift_2C[:, None, :, None, None]
        return out.flatten(0, 1).to(x.dtype)


def _over_all_processes(
    x: Tensor,
    running_mean_C: Tensor,
    running_var_C: Tensor,
    weight_C: Tensor,
    bias_C: Tensor,
    momentum: float,
    eps: float,
) -> Tensor:
    """Batch normalisation with the mean and variance of all processes' rows, gradients included.

    A share of zero rows takes part too, as the others wait for it. Where nobody has rows, nothing moves.
    """
    with torch.autocast(x.device.type, enabled=False):
        values = x.float()
        shape, others = (1, -1, *[1] * (x.ndim - 2)), (0, *range(2, x.ndim))
        per_channel = values.new_full((1,), values.numel() / values.shape[1])
        # About the running mean, which all processes share, so that no digits are lost where a mean is large.
        off = values - running_mean_C.reshape(shape)
        sums = _sum_over_processes(torch.cat([off.sum(dim=others), off.square().sum(dim=others), per_channel]))
        moves, count = momentum * (sums[-1] > 0), sums[-1].clamp_min(1)
        off_mean_C, off_square_C = (sums[:-1] / count).chunk(2)
        var_C = (off_square_C - off_mean_C.square()).clamp_min(0)
        with torch.no_grad():
            running_var_C.lerp_(var_C * count / (count - 1).clamp_min(1), moves)
        scale_C = weight_C * (var_C + eps).rsqrt()
        out: Tensor = (off - off_mean_C.reshape(shape)) * scale_C.reshape(shape) + bias_C.reshape(shape)
        with torch.no_grad():
            running_mean_C.add_(moves * off_mean_C)
    return out.to(x.dtype)


def _sum_over_processes(values: Tensor) -> Tensor:
    from torch.distributed.nn.functional import all_reduce

    total: Tensor = all_reduce(values)  # type: ignore[no-untyped-call]
    return total


def install(backbone: nn.Module, domains: Domains) -> int:
    """Replaces every BatchNorm2d in place and returns how many there were. What timm fuses into its layers stays behind them."""
    found = [
        (parent, name, child)
        for parent in backbone.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.BatchNorm2d)
    ]
    for parent, name, layer in found:
        own: nn.Module = DomainBatchNorm(layer, domains)
        fused = [
            part for part in (getattr(layer, "drop", None), getattr(layer, "act", None)) if isinstance(part, nn.Module)
        ]
        setattr(parent, name, nn.Sequential(own, *fused) if fused else own)
    return len(found)


def domain_layers(backbone: nn.Module) -> Iterator[DomainBatchNorm]:
    for module in backbone.modules():
        if isinstance(module, DomainBatchNorm):
            yield module


@torch.no_grad()
def copy_source_to_target(backbone: nn.Module) -> None:
    """The target's statistics, and affine parameters of its own, start where the source's are."""
    for layer in domain_layers(backbone):
        for pair in (layer.running_mean_2C, layer.running_var_2C, layer.weight_SC, layer.bias_SC):
            if len(pair) == 2:
                pair[TARGET] = pair[SOURCE]


@torch.no_grad()
def estimate_target_statistics(
    backbone: nn.Module, batches: Iterable[Tensor], forward: Callable[[Tensor], object] | None = None
) -> None:
    """Before the first target image is trained on: the average over `batches` of target images, by their sizes.

    `forward`: how images pass through all layers, where that is more than `backbone(images)`.
    Every process sees all of the images, so there is nothing to synchronise.
    """
    layers = list(domain_layers(backbone))
    synchronised = [layer.domains.synchronised for layer in layers]
    for layer in layers:
        layer.domains.synchronised = False
    momentum = [layer.momentum for layer in layers]
    was_training = backbone.training
    backbone.eval()
    seen = 0
    for images_NCHW in batches:
        seen += len(images_NCHW)
        for layer in layers:
            layer.train()
            layer.momentum = len(images_NCHW) / seen
        (forward or backbone)(images_NCHW)
    for layer, before, together in zip(layers, momentum, synchronised, strict=True):
        layer.momentum, layer.domains.synchronised = before, together
    backbone.train(was_training)
