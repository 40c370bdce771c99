"""Keep images or features in the memory from which the training device reads them fastest."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from certvol.data import Indices

PINNED_SHARE = 0.5  # of the machine's free memory


def _free_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(
            int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")
        )
    except (OSError, StopIteration):
        return 0


class Store:
    """The uint8 images of one domain, N x S x S x 3, or its float32 features, N x views x D.

    Image i is `data[rows[i]]`. View 0 of its features is the test view. `place` says where the data
    are: `gpu`, `pinned` (page-locked RAM) or `file` (a memory map).
    """

    def __init__(
        self, data: NDArray[Any], rows: Indices, device: torch.device, device_share: float
    ) -> None:
        self.data, self.rows, self.device = data, rows, device
        self.resident: Tensor | None = None
        self.place = "file"
        size = len(rows) * data[:1].nbytes
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
            if size <= device_share * free:
                self.resident, self.place = self._load(device), "gpu"
            elif size <= PINNED_SHARE * _free_memory():
                self.resident, self.place = self._load(torch.device("cpu")).pin_memory(), "pinned"

    def _load(self, device: torch.device) -> Tensor:
        """Copy block by block, in the domain's order, without holding the whole set twice."""
        shape = (len(self.rows), *self.data.shape[1:])
        dtype = torch.from_numpy(np.empty(0, self.data.dtype)).dtype
        resident = torch.empty(shape, dtype=dtype, device=device)
        for start in range(0, len(self.rows), 1024):
            block = self.data[self.rows[start : start + 1024]]
            resident[start : start + len(block)] = torch.from_numpy(block)
        return resident

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def views(self) -> int:
        """The number of views, if these are features."""
        return int(self.data.shape[1])

    def gather(self, images_N: Indices, views_N: Indices | None = None) -> Tensor:
        """Return images, or these views of their features, on the training device."""
        views = () if views_N is None else (views_N,)
        if self.resident is None:
            return torch.from_numpy(self.data[self.rows[images_N], *views]).to(self.device)
        place = self.resident.device
        index = [torch.from_numpy(each).to(place, non_blocking=True) for each in (images_N, *views)]
        return self.resident[*index].to(self.device, non_blocking=True)
