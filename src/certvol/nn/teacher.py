"""A teacher: the exponential moving average of a model, which labels in the model's stead and learns from nothing else."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Teacher(nn.Module):
    """Follows all parameters of `student`, and the buffers (statistics) of its part `network`.

    A sub-module of its student: so it moves, is saved and is resumed with it. Its weights are buffers, without gradients. Other
    buffers of the student are no weights but notes, and stay the same whoever is in charge.
    """

    def __init__(self, student: nn.Module, network: nn.Module, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self._whose = [student, network]  # in a list, so that they are no sub-modules of their own part
        self._pairs: list[tuple[Tensor, Tensor]] = []
        for name, tensor in self._student_tensors().items():
            self.register_buffer(own_name(name), tensor.detach().clone())

    def _student_tensors(self) -> dict[str, Tensor]:
        student, network = self._whose
        return {**dict(student.named_parameters()), **dict(network.named_buffers(prefix="network"))}

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._pairs = []  # a move makes other tensors of the student's buffers too
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _paired(self) -> list[tuple[Tensor, Tensor]]:
        """(own, student's), found once: looking through all modules takes longer than the step of the average itself."""
        if not self._pairs:
            own = dict(self.named_buffers())
            self._pairs = [(own[own_name(name)], tensor) for name, tensor in self._student_tensors().items()]
        return self._pairs

    @torch.no_grad()
    def start(self) -> None:
        """As the student is now."""
        for own, student in self._paired():
            own.copy_(student)

    @torch.no_grad()
    def follow(self) -> None:
        """One step towards the student. On tensors alone, in place."""
        floats = [(own, student) for own, student in self._paired() if own.is_floating_point()]
        torch._foreach_lerp_([own for own, _ in floats], [student for _, student in floats], 1 - self.decay)
        for own, student in self._paired():
            if not own.is_floating_point():
                own.copy_(student)

    def _swap(self) -> None:
        for own, student in self._paired():
            own.data, student.data = student.data, own.data
        torch.clear_autocast_cache()  # it knows weights by the parameter, and would hand the one's to the other

    @contextmanager
    def in_charge(self) -> Iterator[None]:
        """Inside: the student computes with the teacher's weights. No gradients may be recorded there."""
        self._swap()
        try:
            with torch.no_grad():
                yield
        finally:
            self._swap()

    @torch.no_grad()
    def hand_over(self) -> None:
        """The student takes the teacher's weights."""
        for own, student in self._paired():
            student.copy_(own)


def own_name(name: str) -> str:
    """Of the teacher's copy of a student's tensor: a buffer's name has no dots."""
    return name.replace(".", "/")
