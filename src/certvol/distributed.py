"""The processes of one run, as torchrun starts them.

A run in one process is a team of one: the same calls then return at once.
"""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from certvol.device import pick_device
from certvol.progress import place_in_team


@dataclass(frozen=True)
class Team:
    rank: int = 0
    size: int = 1

    @property
    def main(self) -> bool:
        """True in the process that writes the files."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """Return this process's part of `count` items.

        Parts are contiguous, in the order of ranks, and differ by at most one in length.
        """
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def gather(self, rows: NDArray[np.generic]) -> NDArray[np.generic]:
        """Return the rows of all processes, in the order of ranks."""
        if self.size == 1:
            return rows
        parts: list[NDArray[np.generic]] = [rows] * self.size
        dist.all_gather_object(parts, rows)
        return np.concatenate(parts)

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Average tensors across processes, in place; equal ones keep every bit."""
        if self.size == 1:
            return
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for group in kinds.values():
            own = torch.cat([tensor.flatten() for tensor in group])
            main = own.clone()
            dist.broadcast(main, src=0)
            difference = own - main
            dist.all_reduce(difference)
            sizes = [tensor.numel() for tensor in group]
            parts = torch.split(main + difference / self.size, sizes)
            for tensor, part in zip(group, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def copy_from_main(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors, which rounding may have made different, by those of the main process."""
        if self.size == 1:
            return
        for tensor in tensors:
            dist.broadcast(tensor, src=0)

    def agree(self, value: int | None) -> int | None:
        """Return the highest value that any process has, so that all do the same."""
        if self.size == 1:
            return value
        highest = torch.tensor(-1 if value is None else value)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        return None if highest < 0 else int(highest)

    def wait(self) -> None:
        """Wait for all processes: what the main one wrote before can be read afterwards."""
        if self.size > 1:
            dist.all_reduce(torch.zeros(1))

    def leave(self) -> None:
        """Shut down together: a process that leaves early would break the others' connections."""
        if self.size > 1:
            with contextlib.suppress(RuntimeError):  # another process has left already
                self.wait()
            dist.destroy_process_group()


def join_team(device_name: str) -> tuple[Team, torch.device]:
    """Return the team that torchrun's environment variables describe, and this process's device."""
    device = pick_device(device_name)
    if place_in_team()[1] == 1:
        return Team(), device
    if device.type == "cuda":
        device = pick_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # Use gloo for the numbers that steer a run, so that they never wait for the GPU.
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return Team(dist.get_rank(), dist.get_world_size()), device
