"""A teacher: the exponential moving average of a model, which labels the target in its place."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Teacher(nn.Module):
    """Follow all parameters of `student`, and the buffers (statistics) of its part `network`.

    The teacher is a sub-module of its student, so it moves, is saved and is resumed with it. Its
    weights are buffers without gradients. The student's other buffers are shared by both.
    """

    def __init__(self, student: nn.Module, network: nn.Module, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self._followed = [student, network]  # a list hides them from the teacher's own sub-modules
        self._pairs: list[tuple[Tensor, Tensor]] = []
        for name, tensor in self._student_tensors().items():
            self.register_buffer(own_name(name), tensor.detach().clone())

    def _student_tensors(self) -> dict[str, Tensor]:
        student, network = self._followed
        return {**dict(student.named_parameters()), **dict(network.named_buffers(prefix="network"))}

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._pairs = []  # a move also replaces the student's buffers
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _paired(self) -> list[tuple[Tensor, Tensor]]:
        """Return (own, student's) tensors, found once: a search takes longer than the averaging."""
        if not self._pairs:
            own, tensors = dict(self.named_buffers()), self._student_tensors()
            self._pairs = [(own[own_name(name)], tensor) for name, tensor in tensors.items()]
        return self._pairs

    @torch.no_grad()
    def start(self) -> None:
        """Copy the present student."""
        for own, student in self._paired():
            own.copy_(student)

    @torch.no_grad()
    def follow(self) -> None:
        """Take one step towards the student, in place and on tensors alone."""
        floats = [pair for pair in self._paired() if pair[0].is_floating_point()]
        own_floats, student_floats = zip(*floats, strict=True)
        torch._foreach_lerp_(own_floats, student_floats, 1 - self.decay)
        for own, student in self._paired():
            if not own.is_floating_point():
                own.copy_(student)

    def _swap(self) -> None:
        for own, student in self._paired():
            own.data, student.data = student.data, own.data
        torch.clear_autocast_cache()  # it holds copies of the weights from before the swap

    @contextmanager
    def in_charge(self) -> Iterator[None]:
        """Compute with the teacher's weights inside the context, without gradients."""
        self._swap()
        try:
            with torch.no_grad():
                yield
        finally:
            self._swap()

    @torch.no_grad()
    def hand_over(self) -> None:
        """Give the student the teacher's weights."""
        for own, student in self._paired():
            student.copy_(own)


def own_name(name: str) -> str:
    """Return the name of the teacher's copy of a tensor: a buffer's name must not have dots."""
    return name.replace(".", "/")
