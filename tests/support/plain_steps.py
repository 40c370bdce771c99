"""Optimiser steps of a method redone in plain PyTorch from the initial weights."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from certvol.methods._base import AdaptationMethod, Batch
from support.methods import fitted, make_batch

Weights = dict[str, Tensor]
LAMBDA = 2 / (1 + math.exp(-10 * 0.5)) - 1  # at the progress of the batches of tests
STEP: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "nesterov": True}


def features_of(weights: Weights, inputs: Tensor) -> Tensor:
    """Run the small CNN with the batch's statistics."""
    x = inputs
    convolutions = [
        name for name in weights if name.startswith("network.backbone") and weights[name].ndim == 4
    ]
    scales = [
        name
        for name in weights
        if name.startswith("network.backbone") and name.endswith("weight_SC")
    ]
    for convolution, scale, stride in zip(convolutions, scales, (2, 2, 2, 1), strict=True):
        x = F.conv2d(x, weights[convolution], stride=stride, padding=1)
        mean, variance = (
            x.mean((0, 2, 3), keepdim=True),
            x.var((0, 2, 3), keepdim=True, unbiased=False),
        )
        bias = weights[scale.replace("weight_SC", "bias_SC")]
        x = (x - mean) / torch.sqrt(variance + 1e-5) * weights[scale].view(1, -1, 1, 1) + bias.view(
            1, -1, 1, 1
        )
        x = torch.relu(x)
    return x.mean((2, 3))


def linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def common_logits(weights: Weights, features_ND: Tensor) -> Tensor:
    hidden = torch.relu(linear(weights, "network.classifier.hidden", features_ND))
    return linear(weights, "network.classifier.output", hidden)


def normalised(x_ND: Tensor, weight_D: Tensor, bias_D: Tensor) -> Tensor:
    return (x_ND - x_ND.mean(0)) / torch.sqrt(
        x_ND.var(0, unbiased=False) + 1e-5
    ) * weight_D + bias_D


def bottleneck_of(weights: Weights, features_ND: Tensor) -> Tensor:
    return torch.relu(_before_relu(weights, features_ND))


def rows_behind_bottleneck(weights: Weights, inputs: Tensor) -> Tensor:
    """Return the output of a bottleneck without ReLU."""
    return _before_relu(weights, features_of(weights, inputs))


def _before_relu(weights: Weights, features_ND: Tensor) -> Tensor:
    x = linear(weights, "network.classifier.bottleneck.linear", features_ND)
    norm = "network.classifier.bottleneck.norm"
    return normalised(x, weights[f"{norm}.weight_SC"][0], weights[f"{norm}.bias_SC"][0])


def adversarial(
    weights: Weights,
    rows_ND: Tensor,
    num_source: int,
    reversal: float,
    certainty_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the losses that the discriminator and the rows minimise: gradient reversal undone."""
    losses = []
    for own in (True, False):
        x = rows_ND.detach() if own else rows_ND
        used = {name: value if own else value.detach() for name, value in weights.items()}
        for layer in (0, 3):
            x = linear(used, f"discriminator.layers.{layer}", x)
            scale, bias = (
                used[f"discriminator.layers.{layer + 1}.{kind}"] for kind in ("weight", "bias")
            )
            x = torch.relu(normalised(x, scale, bias))
        source = torch.sigmoid(linear(used, "discriminator.layers.6", x)[:, 0])
        right = torch.cat([source[:num_source], 1 - source[num_source:]])
        certainty = torch.ones(len(right)) if certainty_N is None else certainty_N
        halves = [
            -(certainty[rows] * right[rows].log()).sum() / certainty[rows].sum()
            for rows in (slice(num_source), slice(num_source, None))
        ]
        losses.append((halves[0] + halves[1]) / 2)
    return losses[0], -reversal * losses[1]


def negative_log_likelihood(logits_NC: Tensor, labels_N: Tensor) -> Tensor:
    return -torch.log_softmax(logits_NC, -1)[torch.arange(len(labels_N)), labels_N].mean()


def assert_steps_are(
    method: AdaptationMethod,
    plain_loss: Callable[[Weights, Batch], Tensor],
    steps: int = 2,
    atol: float = 3e-6,
    **batch: bool,
) -> None:
    """Compare a method's weights after some steps with those that `plain_loss` gives.

    `plain_loss` computes a batch's whole loss from named weights, times k for weights that learn at
    k times the rate.
    """
    method.train()
    method.network.classifier.dropout = 0.0
    weights = {
        name: value.detach().clone().requires_grad_() for name, value in method.named_parameters()
    }
    before = {name: value.detach().clone() for name, value in weights.items()}
    parts = [
        {"params": [p], "lr": STEP["lr"] * method.rate_of(name)}
        for name, p in method.named_parameters()
    ]
    ours, theirs = torch.optim.SGD(parts, **STEP), torch.optim.SGD(weights.values(), **STEP)
    for step in range(steps):
        mine = fitted(method, make_batch(seed=step, **batch), step)
        ours.zero_grad()
        method.loss(method.loss_terms(mine)).backward()
        ours.step()
        if method.teacher is not None:
            method.teacher.follow()
        theirs.zero_grad()
        again = dataclasses.replace(mine, generator=make_batch(seed=step, **batch).generator)
        plain_loss(weights, again).backward()
        theirs.step()
    for name, value in method.named_parameters():
        assert torch.allclose(value, weights[name], atol=atol, rtol=1e-4), (
            name,
            (value - weights[name]).abs().max(),
        )
    assert any(not torch.allclose(before[name], weights[name], atol=1e-4) for name in weights)
