"""The processes of one run, as torchrun starts them. Alone, every call here is a copy or nothing."""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from certvol.environment import pick_device
from certvol.inference import Outputs


@dataclass(frozen=True)
class Team:
    rank: int = 0
    size: int = 1

    @property
    def main(self) -> bool:
        """The one that writes."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """This process's part of `count` things: contiguous, in the order of ranks, equal but for one."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def gather(self, rows: NDArray[np.generic]) -> NDArray[np.generic]:
        """The rows of all processes, in the order of ranks."""
        if self.size == 1:
            return rows
        parts: list[NDArray[np.generic]] = [rows] * self.size
        dist.all_gather_object(parts, rows)
        return np.concatenate(parts)

    def average(self, tensors: Iterable[Tensor]) -> None:
        """In place, over all processes. What is the same in all of them stays so to the last bit."""
        if self.size == 1:
            return
        kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for alike in kinds.values():
            own = torch.cat([tensor.flatten() for tensor in alike])
            mains = own.clone()
            dist.broadcast(mains, src=0)
            difference = own - mains
            dist.all_reduce(difference)
            parts = torch.split(mains + difference / self.size, [tensor.numel() for tensor in alike])
            for tensor, part in zip(alike, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def copy_from_main(self, tensors: Iterable[Tensor]) -> None:
        """In place: what processes have computed alike, but perhaps not to the last bit."""
        if self.size == 1:
            return
        for tensor in tensors:
            dist.broadcast(tensor, src=0)

    def agree(self, value: int | None) -> int | None:
        """The highest value that any process brings, so that all do the same; None where none brings one."""
        if self.size == 1:
            return value
        highest = torch.tensor(-1 if value is None else value)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        return None if highest < 0 else int(highest)

    def wait(self) -> None:
        """Until all are here: what the main process wrote before can be read after."""
        if self.size > 1:
            dist.all_reduce(torch.zeros(1))

    def part(self) -> None:
        """At the end, when all are here: a process that leaves early would tear the others' connections."""
        if self.size > 1:
            with contextlib.suppress(RuntimeError):  # another has left already: nothing is lost any more
                self.wait()
            dist.destroy_process_group()


def join_team(device_name: str) -> tuple[Team, torch.device]:
    """The team that torchrun's variables tell of, and this process's device."""
    device = pick_device(device_name)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Team(), device
    if device.type == "cuda":
        device = pick_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # Numbers that steer the run travel over gloo, so that they never wait for the GPU.
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return Team(dist.get_rank(), dist.get_world_size()), device


def gathered(outputs: Outputs, team: Team) -> Outputs:
    """Of all processes' shares, in order."""
    if team.size == 1:
        return outputs
    sigma_N = None if outputs.sigma_N is None else np.asarray(team.gather(outputs.sigma_N), dtype=np.float32)
    return Outputs(np.asarray(team.gather(outputs.probabilities_NC), dtype=np.float32), sigma_N)
