"""Optimisers: one entry of `OPTIMIZERS` each, whose name is a value of `training.optimizer`."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import SGD, AdamW, Optimizer

from certvol.settings import TrainingConfig

ADAMW_SECOND_BETA = 0.999
Groups = Iterable[dict[str, Any]]
Build = Callable[[Groups, TrainingConfig, bool, bool], Optimizer]
"""Takes parameter groups, settings, and whether steps are fused and recorded."""


def _sgd(groups: Groups, settings: TrainingConfig, fused: bool, recorded: bool) -> Optimizer:
    momentum, decay = settings.momentum, settings.weight_decay
    sgd = SGD(groups, momentum=momentum, nesterov=momentum > 0, weight_decay=decay, fused=fused)
    sgd.register_step_pre_hook(_start_momentum)
    return sgd


def _adamw(groups: Groups, settings: TrainingConfig, fused: bool, recorded: bool) -> Optimizer:
    betas, decay = (settings.momentum, ADAMW_SECOND_BETA), settings.weight_decay
    return AdamW(groups, betas=betas, weight_decay=decay, fused=fused, capturable=recorded)


def _start_momentum(optimizer: Optimizer, *arguments: Any) -> None:
    """Start with a momentum of 0 for weights that get their first gradient.

    A discriminator's weights get their first gradient when adaptation starts. A fused step of SGD
    needs the momentum of all weights or of none; a momentum of 0 does not change the step.
    """
    for group in optimizer.param_groups:
        for weight in group["params"] if group["momentum"] > 0 else ():
            state = optimizer.state[weight]
            if weight.grad is not None and state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(weight)


OPTIMIZERS: dict[str, Build] = {"sgd": _sgd, "adamw": _adamw}
