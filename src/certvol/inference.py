"""From a model and images to logits, probabilities and sigma. The trainer labels with it, `predict` predicts with it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from certvol.methods.protocol import AdaptationMethod

BATCHES_ON_DEVICE = 16  # of outputs, before they go to the host


@dataclass(frozen=True)
class Outputs:
    """Of N images, on the CPU."""

    probabilities_NC: NDArray[np.float32]
    sigma_N: NDArray[np.float32] | None

    @property
    def labels_N(self) -> NDArray[np.int64]:
        return np.asarray(np.argmax(self.probabilities_NC, axis=1))

    @property
    def confidence_N(self) -> NDArray[np.float32]:
        return np.asarray(self.probabilities_NC.max(axis=1))


@contextmanager
def evaluating(method: AdaptationMethod, domain: int) -> Iterator[None]:
    """Inside: no gradients, stored statistics of `domain`, no dropout; a teacher, where there is one, in charge."""
    was_training = method.training
    method.eval()
    try:
        with (
            method.teacher.in_charge() if method.teacher else nullcontext(),
            torch.inference_mode(),
            method.network.rows_of(domain=domain),
        ):
            yield
    finally:
        method.train(was_training)


def mixed_precision(device: torch.device, bf16: bool) -> torch.autocast:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16)


def mc_dropout_probabilities(
    method: AdaptationMethod, features_ND: Tensor, passes: int, dropout: float, seed: int
) -> Tensor:
    """Mean over `passes` of the classifier with dropout on: the backbone runs once, the head many times."""
    devices = [features_ND.device] if features_ND.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        total = torch.zeros(())
        for number in range(passes):
            probabilities = method.logits(features_ND, dropout).float().softmax(dim=1)
            total = probabilities if number == 0 else total + probabilities
    return total / passes


class _HostRows:
    """Rows that batches leave on the device, moved to the host every few batches: memory there stays bounded, and the device
    seldom waits."""

    def __init__(self) -> None:
        self.waiting: list[Tensor] = []
        self.moved: list[Tensor] = []

    def append(self, rows: Tensor) -> None:
        self.waiting.append(rows)
        if len(self.waiting) == BATCHES_ON_DEVICE:
            self._move()

    def _move(self) -> None:
        self.moved.append(torch.cat(self.waiting).float().cpu())
        self.waiting.clear()

    def whole(self) -> NDArray[np.float32] | None:
        """None where there were none."""
        if self.waiting:
            self._move()
        return torch.cat(self.moved).numpy() if self.moved else None


def run_batches(
    method: AdaptationMethod,
    batches: Iterator[Tensor],
    domain: int,
    bf16: bool = False,
    head: Callable[[Tensor, int], Tensor] | None = None,
) -> Outputs:
    """`batches`: normalised images on the model's device. `head`: (features, number of the batch) -> probabilities."""
    probabilities, sigmas = _HostRows(), _HostRows()
    with evaluating(method, domain):
        for number, images_NCHW in enumerate(batches):
            with mixed_precision(images_NCHW.device, bf16):
                features_ND = method.network.features(images_NCHW)
                if head is None:
                    probabilities.append(method.logits(features_ND).float().softmax(dim=1))
                else:
                    probabilities.append(head(features_ND, number))
                sigma_N = method.sigma(features_ND)
            if sigma_N is not None:
                sigmas.append(sigma_N)
    found_NC = probabilities.whole()
    return Outputs(
        np.empty((0, method.network.num_classes), np.float32) if found_NC is None else found_NC, sigmas.whole()
    )
