"""Keep decoded images in the memory from which the training device reads them fastest."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PINNED_SHARE = 0.5  # of the machine's free memory


def _free_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(
            int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")
        )
    except (OSError, StopIteration):
        return 0


class PixelStore:
    """The uint8 images of one domain; `place` says where they are.

    It is `gpu`, `pinned` (page-locked RAM) or `file` (a memory map).
    """

    def __init__(
        self,
        pixels: NDArray[np.uint8],
        rows: NDArray[np.int64],
        device: torch.device,
        device_share: float,
    ) -> None:
        self.pixels, self.rows, self.device = pixels, rows, device
        self.resident: Tensor | None = None
        self.place = "file"
        size = len(rows) * int(np.prod(pixels.shape[1:]))
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
            if size <= device_share * free:
                self.resident, self.place = self._load(device), "gpu"
            elif size <= PINNED_SHARE * _free_memory():
                self.resident, self.place = self._load(torch.device("cpu")).pin_memory(), "pinned"

    def _load(self, device: torch.device) -> Tensor:
        """Copy block by block, in the domain's order, without holding the whole set twice."""
        shape = (len(self.rows), *self.pixels.shape[1:])
        resident = torch.empty(shape, dtype=torch.uint8, device=device)
        for start in range(0, len(self.rows), 1024):
            block = self.pixels[self.rows[start : start + 1024]]
            resident[start : start + len(block)] = torch.from_numpy(block)
        return resident

    def __len__(self) -> int:
        return len(self.rows)

    def gather(self, images: NDArray[np.int64]) -> Tensor:
        """Return uint8 N x S x S x 3 on the training device."""
        if self.resident is None:
            return torch.from_numpy(self.pixels[self.rows[images]]).to(self.device)
        index = torch.from_numpy(images).to(self.resident.device, non_blocking=True)
        return self.resident[index].to(self.device, non_blocking=True)
