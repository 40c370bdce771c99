"""Serve batches of both domains on the training device: views of images or extracted features.

A view is what the network sees of an image: augmented for training, the centre for testing. The
views of features are drawn at extraction, and training picks one of them per image.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sized

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from certvol.data import SOURCE, TARGET
from certvol.data.augment import (
    InputFormat,
    WarpParameters,
    centre_view,
    draw_parameters,
    train_view,
)
from certvol.data.store import PixelStore
from certvol.settings import AugmentConfig

Indices = NDArray[np.int64]


class Views(ABC):
    """The interface through which training and prediction read views of both domains."""

    source: Sized
    target: Sized
    device: torch.device

    @abstractmethod
    def training_batch(
        self, whole_N: Indices, rows: Indices, num_source: int, generator: torch.Generator
    ) -> Tensor:
        """Return random views of the rows `rows` of the batch `whole_N`.

        The first `num_source` rows are source images, the others target images. `generator` draws
        views for the whole batch, so that a row gets the same view whatever the other rows are.
        """

    @abstractmethod
    def target_view(self, images_N: Indices, generator: torch.Generator | None) -> Tensor:
        """Return a random view of target images, or without a generator their test view."""

    @abstractmethod
    def test_view(self, domain: int, images_N: Indices) -> Tensor: ...

    def test_batches(self, domain: int, images_N: Indices, batch_size: int) -> Iterator[Tensor]:
        for start in range(0, len(images_N), batch_size):
            yield self.test_view(domain, images_N[start : start + batch_size])


class ImageViews(Views):
    """Views of decoded images; `fused` augments training batches by a compiled kernel."""

    def __init__(
        self,
        source: PixelStore,
        target: PixelStore,
        info: InputFormat,
        config: AugmentConfig,
        fused: bool = False,
    ) -> None:
        self.source: PixelStore = source
        self.target: PixelStore = target
        self.info, self.config, self.fused, self.device = info, config, fused, source.device

    def training_batch(
        self, whole_N: Indices, rows: Indices, num_source: int, generator: torch.Generator
    ) -> Tensor:
        images_N = whole_N[rows]
        parts = (self.source, images_N[:num_source]), (self.target, images_N[num_source:])
        pixels = [store.gather(images) for store, images in parts if len(images)]
        parameters = draw_parameters(len(whole_N), self.config, generator)
        if len(rows) < len(whole_N):
            parameters = parameters[torch.from_numpy(rows)]
        return self._augmented(torch.cat(pixels), parameters, self.fused)

    def _augmented(
        self, pixels_NSSC: Tensor, parameters: WarpParameters, fused: bool = False
    ) -> Tensor:
        if not self.config.enabled:
            return centre_view(pixels_NSSC, self.info)
        return train_view(pixels_NSSC, parameters, self.info, fused)

    def target_view(self, images_N: Indices, generator: torch.Generator | None) -> Tensor:
        if generator is None:
            return self.test_view(TARGET, images_N)
        parameters = draw_parameters(len(images_N), self.config, generator)
        return self._augmented(self.target.gather(images_N), parameters)

    def test_view(self, domain: int, images_N: Indices) -> Tensor:
        pixels_NSSC = (self.source if domain == SOURCE else self.target).gather(images_N)
        return centre_view(pixels_NSSC, self.info)


class FeatureStore:
    """The features of one domain, images x views x D.

    Image i is row `rows[i]`, and its view 0 is the test view. Features are kept on a GPU if they
    fit into `device_share` of its free memory.
    """

    def __init__(
        self,
        features: NDArray[np.float32],
        rows: Indices,
        device: torch.device,
        device_share: float = 0.0,
    ) -> None:
        self.features, self.rows, self.device = features, rows, device
        self.resident: Tensor | None = None
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
            if features.nbytes <= device_share * free:
                self.resident = torch.from_numpy(np.ascontiguousarray(features)).to(device)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def views(self) -> int:
        return int(self.features.shape[1])

    def gather(self, images_N: Indices, shares_N: NDArray[np.float64] | None = None) -> Tensor:
        """Return N x D features on the device: views picked by numbers in [0, 1), or test views."""
        rows_N, views_N = self.rows[images_N], np.zeros(len(images_N), np.int64)
        if shares_N is not None:
            views_N = (shares_N * self.views).astype(np.int64)
        if self.resident is None:
            return torch.from_numpy(self.features[rows_N, views_N]).to(self.device)
        rows, views = (torch.from_numpy(index).to(self.device) for index in (rows_N, views_N))
        return self.resident[rows, views]


class FeatureViews(Views):
    """Views of features."""

    def __init__(self, source: FeatureStore, target: FeatureStore) -> None:
        self.source: FeatureStore = source
        self.target: FeatureStore = target
        self.device = source.device

    def training_batch(
        self, whole_N: Indices, rows: Indices, num_source: int, generator: torch.Generator
    ) -> Tensor:
        images_N, shares_N = whole_N[rows], _draw(len(whole_N), generator)[rows]
        parts = (self.source, slice(0, num_source)), (self.target, slice(num_source, None))
        return torch.cat(
            [
                store.gather(images_N[part], shares_N[part])
                for store, part in parts
                if len(images_N[part])
            ]
        )

    def target_view(self, images_N: Indices, generator: torch.Generator | None) -> Tensor:
        shares_N = None if generator is None else _draw(len(images_N), generator)
        return self.target.gather(images_N, shares_N)

    def test_view(self, domain: int, images_N: Indices) -> Tensor:
        return (self.source if domain == SOURCE else self.target).gather(images_N)


def _draw(count: int, generator: torch.Generator) -> NDArray[np.float64]:
    """Draw a number in [0, 1) for each image of a batch."""
    return np.asarray(torch.rand(count, generator=generator, dtype=torch.float64).numpy())
