"""Batches of features in place of images: what a frozen backbone made of them before, or what a file of features holds."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from certvol.nn.norm import SOURCE

Indices = NDArray[np.int64]


class FeatureStore:
    """The features of one domain, images x views x D. Image i is row `rows[i]`; its view 0 is the test view."""

    def __init__(
        self, features: NDArray[np.float32], rows: Indices, device: torch.device, device_share: float = 0.0
    ) -> None:
        self.features, self.rows, self.device = features, rows, device
        self.resident: Tensor | None = None
        if device.type == "cuda" and features.nbytes <= device_share * torch.cuda.mem_get_info(device)[0]:
            self.resident = torch.from_numpy(np.ascontiguousarray(features)).to(device)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def views(self) -> int:
        return int(self.features.shape[1])

    def gather(self, images_N: Indices, views_N: Indices | None = None) -> Tensor:
        """N x D on the training device; without `views_N` of the test views."""
        rows_N, views_N = self.rows[images_N], np.zeros(len(images_N), np.int64) if views_N is None else views_N
        if self.resident is None:
            return torch.from_numpy(self.features[rows_N, views_N]).to(self.device)
        return self.resident[torch.from_numpy(rows_N).to(self.device), torch.from_numpy(views_N).to(self.device)]


class FeatureViews:
    """Serves what `Views` serves: a random view of an image is one of those that were extracted."""

    def __init__(self, source: FeatureStore, target: FeatureStore) -> None:
        self.source, self.target, self.device = source, target, source.device

    def training_batch(self, whole_N: Indices, rows: Indices, own_source: int, generator: torch.Generator) -> Tensor:
        """As `Views.training_batch`: a view depends on its place in the whole batch alone."""
        images_N, shares_N = whole_N[rows], _draw(len(whole_N), generator)[rows]
        features = []
        for store, part in ((self.source, slice(0, own_source)), (self.target, slice(own_source, None))):
            if len(images_N[part]) > 0:
                features.append(store.gather(images_N[part], _chosen(shares_N[part], store.views)))
        return torch.cat(features)

    def target_view(self, images_N: Indices, generator: torch.Generator | None) -> Tensor:
        if generator is None:
            return self.target.gather(images_N)
        return self.target.gather(images_N, _chosen(_draw(len(images_N), generator), self.target.views))

    def test_batches(self, domain: int, images_N: Indices, batch_size: int) -> Iterator[Tensor]:
        store = self.source if domain == SOURCE else self.target
        for start in range(0, len(images_N), batch_size):
            yield store.gather(images_N[start : start + batch_size])


def _draw(count: int, generator: torch.Generator) -> NDArray[np.float64]:
    """A number from 0 to below 1 for each image of a batch."""
    return np.asarray(torch.rand(count, generator=generator, dtype=torch.float64).numpy())


def _chosen(shares_N: NDArray[np.float64], views: int) -> Indices:
    return np.asarray((shares_N * views).astype(np.int64))
