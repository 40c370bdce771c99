"""Weights of a run in files of their own: the pretrained model, and the best cycles by each score."""

import math
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.utils import get_total_norm

from certvol.methods.protocol import AdaptationMethod
from certvol.training.checkpoint import load_into, read_tensors, write_tensors


class WeightFiles:
    """Where there is a teacher, its weights are the ones written: labels and scores come from them."""

    def __init__(self, method: AdaptationMethod, about: Mapping[str, Any], writes: bool) -> None:
        """`writes`: False for a process that leaves writing to another."""
        self.method, self.about, self.writes = method, about, writes
        self.unwritten: dict[Path, dict[str, Tensor]] = {}
        """Of best cycles since the last checkpoint: written with the next, which is the first to build on them."""

    @property
    def finite(self) -> bool:
        weights = [w for w in self.method.state_dict().values() if w.is_floating_point() and w.numel() > 0]
        return bool(get_total_norm(weights, norm_type=math.inf).isfinite())

    def _copied(self) -> dict[str, Tensor]:
        with self.method.teacher.in_charge() if self.method.teacher else nullcontext():
            return {k: v.clone() for k, v in self.method.state_dict().items() if not k.startswith("teacher.")}

    def keep(self, path: Path) -> None:
        """Those of now, in memory until `write_kept`."""
        if self.writes:
            self.unwritten[path] = self._copied()

    def forget_kept(self) -> None:
        self.unwritten.clear()

    def write_kept(self) -> None:
        while self.unwritten:
            path, weights = self.unwritten.popitem()
            write_tensors(path, weights, self.about)

    def write(self, path: Path) -> None:
        if self.writes:
            write_tensors(path, self._copied(), self.about)

    def load(self, path: Path) -> None:
        """A teacher starts there too."""
        teacher, self.method.teacher = self.method.teacher, None
        load_into(self.method, read_tensors(path), path.name)
        self.method.teacher = teacher
        if teacher is not None:
            teacher.start()
