"""Norm modes: the statistics that a BatchNorm layer uses.

`mixed`       one set, of the whole batch, as in an ordinary layer
`per_domain`  one set per domain, in training, labelling and prediction; shared affine parameters
`dsbn`        the same, with affine parameters per domain too
`frozen`      the statistics of the pretrained weights, never changed

All modes share one layer with one layout of weights, so the mode can change after pretraining. Rows
of a training batch are ordered source first; the network's `Domains` holds their number, or the
domain of a whole evaluation batch.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from certvol.data import SOURCE as SOURCE
from certvol.data import TARGET as TARGET

Mode = Literal["mixed", "per_domain", "dsbn", "frozen"]


@dataclass
class Domains:
    """The mode and the domains of the passing rows, shared by all layers of a network."""

    mode: Mode = "mixed"
    num_source: int | None = None
    """Source rows of a training batch; None: all rows belong to the domain `whole_batch`."""
    whole_batch: int = SOURCE
    synchronised: bool = False
    """True: training uses statistics over the rows of all processes."""

    @property
    def apart(self) -> bool:
        """True if the domains have separate statistics."""
        return self.mode in ("per_domain", "dsbn")


class DomainBatchNorm(nn.Module):
    """BatchNorm with two sets of statistics; modes with domains use the second for the target.

    A batch with one value per channel has no statistics. The stored ones normalise it, unchanged.
    """

    running_mean_2C: Tensor
    running_var_2C: Tensor

    def __init__(self, layer: nn.BatchNorm1d | nn.BatchNorm2d, domains: Domains) -> None:
        super().__init__()
        if layer.running_mean is None or layer.running_var is None or layer.weight is None:
            raise ValueError(
                "only BatchNorm with running statistics and affine parameters has domains"
            )
        self.domains = domains
        self.eps = layer.eps
        self.momentum = 0.1 if layer.momentum is None else layer.momentum
        affine_sets = 2 if domains.mode == "dsbn" else 1
        self.weight_SC = nn.Parameter(layer.weight.detach().repeat(affine_sets, 1))
        self.bias_SC = nn.Parameter(layer.bias.detach().repeat(affine_sets, 1))
        self.register_buffer("running_mean_2C", layer.running_mean.detach().repeat(2, 1))
        self.register_buffer("running_var_2C", layer.running_var.detach().repeat(2, 1))

    def forward(self, x: Tensor) -> Tensor:
        domains, split = self.domains, self.domains.num_source
        synchronised = self.training and domains.synchronised
        if not domains.apart:
            return self._normalise(x, SOURCE)
        if split is None:
            return self._normalise(x, domains.whole_batch)
        # A process without rows of a domain still takes part in statistics of all processes.
        if split in (0, len(x)) and not synchronised:
            return self._normalise(x, TARGET if split == 0 else SOURCE)
        halves = self.training and x.ndim == 4 and 2 * split == len(x) and not synchronised
        if halves and torch.compiler.is_compiling():
            return self.normalise_halves(x)
        return torch.cat([self._normalise(x[:split], SOURCE), self._normalise(x[split:], TARGET)])

    def _normalise(self, rows: Tensor, domain: int) -> Tensor:
        affine = min(domain, len(self.weight_SC) - 1)
        mean_C, var_C = self.running_mean_2C[domain], self.running_var_2C[domain]
        weight_C, bias_C = self.weight_SC[affine], self.bias_SC[affine]
        training = self.training and self.domains.mode != "frozen"
        if training and self.domains.synchronised:
            return self._synchronised(rows, mean_C, var_C, weight_C, bias_C)
        training = training and rows.numel() > rows.shape[1]
        momentum, eps = self.momentum, self.eps
        return F.batch_norm(rows, mean_C, var_C, weight_C, bias_C, training, momentum, eps)

    def _synchronised(
        self, x: Tensor, mean_C: Tensor, var_C: Tensor, weight_C: Tensor, bias_C: Tensor
    ) -> Tensor:
        """Normalise with mean and variance of all processes' rows, gradients included.

        A process without rows takes part too, because the others wait for it. If no process has
        rows, the statistics do not change.
        """
        with torch.autocast(x.device.type, enabled=False):
            values = x.float()
            shape, others = (1, -1, *[1] * (x.ndim - 2)), (0, *range(2, x.ndim))
            per_channel = values.new_full((1,), values.numel() / values.shape[1])
            # Differences from the running mean, equal in all processes, keep digits of large means.
            off = values - mean_C.reshape(shape)
            sums = [off.sum(dim=others), off.square().sum(dim=others), per_channel]
            total = _sum_over_processes(torch.cat(sums))
            moves, count = self.momentum * (total[-1] > 0), total[-1].clamp_min(1)
            off_mean_C, off_square_C = (total[:-1] / count).chunk(2)
            batch_var_C = (off_square_C - off_mean_C.square()).clamp_min(0)
            scale_C = weight_C * (batch_var_C + self.eps).rsqrt()
            centred = off - off_mean_C.reshape(shape)
            out = centred * scale_C.reshape(shape) + bias_C.reshape(shape)
            with torch.no_grad():
                var_C.lerp_(batch_var_C * count / (count - 1).clamp_min(1), moves)
                mean_C.add_(moves * off_mean_C)
        return out.to(x.dtype)

    def normalise_halves(self, x: Tensor) -> Tensor:
        """Normalise a training batch of equal halves in a form that a compiler fuses.

        Slices and copies would prevent that.
        """
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


def _sum_over_processes(values: Tensor) -> Tensor:
    from torch.distributed.nn.functional import all_reduce

    total: Tensor = all_reduce(values)  # type: ignore[no-untyped-call]
    return total


def install(backbone: nn.Module, domains: Domains) -> int:
    """Replace every BatchNorm2d in place and return their number.

    timm fuses dropout and activation into some of them; these then follow as layers of their own.
    """
    found = [(path, m) for path, m in backbone.named_modules() if isinstance(m, nn.BatchNorm2d)]
    for path, layer in found:
        own: nn.Module = DomainBatchNorm(layer, domains)
        parts = (getattr(layer, "drop", None), getattr(layer, "act", None))
        fused = [part for part in parts if isinstance(part, nn.Module)]
        parent, _, name = path.rpartition(".")
        new = nn.Sequential(own, *fused) if fused else own
        setattr(backbone.get_submodule(parent), name, new)
    return len(found)


def domain_layers(backbone: nn.Module) -> Iterator[DomainBatchNorm]:
    return (module for module in backbone.modules() if isinstance(module, DomainBatchNorm))


@contextmanager
def stored_statistics(module: nn.Module) -> Iterator[None]:
    """Inside the context, normalise as in prediction, and leave the statistics as they are."""
    training = [layer for layer in domain_layers(module) if layer.training]
    try:
        for layer in training:
            layer.training = False
        yield
    finally:
        for layer in training:
            layer.training = True


@torch.no_grad()
def copy_source_to_target(backbone: nn.Module) -> None:
    """Start the target's statistics and affine parameters at the source's."""
    for layer in domain_layers(backbone):
        for pair in (layer.running_mean_2C, layer.running_var_2C, layer.weight_SC, layer.bias_SC):
            if len(pair) == 2:
                pair[TARGET] = pair[SOURCE]


@torch.no_grad()
def estimate_target_statistics(
    method: nn.Module, batches: Iterable[Tensor], forward: Callable[[Tensor], object]
) -> None:
    """Set the statistics to their average over batches of target images, weighted by size.

    Every process sees all images, so statistics are not synchronised.
    """
    layers = list(domain_layers(method))
    before = [(layer.momentum, layer.domains.synchronised) for layer in layers]
    was_training = method.training
    method.eval()
    seen = 0
    for images_NCHW in batches:
        seen += len(images_NCHW)
        for layer in layers:
            layer.train()
            layer.momentum, layer.domains.synchronised = len(images_NCHW) / seen, False
        forward(images_NCHW)
    for layer, (momentum, synchronised) in zip(layers, before, strict=True):
        layer.momentum, layer.domains.synchronised = momentum, synchronised
    method.train(was_training)
