"""Serve batches of both domains on the training device: views of images or extracted features.

A view is what the network sees of an image: augmented for training, the centre for testing. The
views of features are drawn at extraction, and training picks one of them per image.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from certvol.data import SOURCE, TARGET, Indices
from certvol.data.augment import (
    InputFormat,
    WarpParameters,
    centre_view,
    draw_parameters,
    train_view,
)
from certvol.data.store import Store
from certvol.settings import AugmentConfig


class Views(ABC):
    """The interface through which training and prediction read views of both domains."""

    def __init__(self, source: Store, target: Store) -> None:
        self.source, self.target, self.device = source, target, source.device

    def store(self, domain: int) -> Store:
        return self.source if domain == SOURCE else self.target

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
        source: Store,
        target: Store,
        info: InputFormat,
        config: AugmentConfig,
        fused: bool = False,
    ) -> None:
        super().__init__(source, target)
        self.info, self.config, self.fused = info, config, fused

    def training_batch(
        self, whole_N: Indices, rows: Indices, num_source: int, generator: torch.Generator
    ) -> Tensor:
        source_N, target_N = np.split(whole_N[rows], [num_source])
        pixels = [self.source.gather(source_N), self.target.gather(target_N)]
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
        return centre_view(self.store(domain).gather(images_N), self.info)


class FeatureViews(Views):
    """Views of features."""

    def training_batch(
        self, whole_N: Indices, rows: Indices, num_source: int, generator: torch.Generator
    ) -> Tensor:
        source_N, target_N = np.split(whole_N[rows], [num_source])
        source_draws, target_draws = np.split(_draw(len(whole_N), generator)[rows], [num_source])
        source_ND = _picked(self.source, source_N, source_draws)
        return torch.cat([source_ND, _picked(self.target, target_N, target_draws)])

    def target_view(self, images_N: Indices, generator: torch.Generator | None) -> Tensor:
        if generator is None:
            return self.test_view(TARGET, images_N)
        return _picked(self.target, images_N, _draw(len(images_N), generator))

    def test_view(self, domain: int, images_N: Indices) -> Tensor:
        return self.store(domain).gather(images_N, np.zeros(len(images_N), np.int64))


def _draw(count: int, generator: torch.Generator) -> NDArray[np.float64]:
    """Draw a number in [0, 1) for each image of a batch."""
    return np.asarray(torch.rand(count, generator=generator, dtype=torch.float64).numpy())


def _picked(store: Store, images_N: Indices, draws_N: NDArray[np.float64]) -> Tensor:
    """Return one view of each image, picked by a number in [0, 1)."""
    return store.gather(images_N, (draws_N * store.views).astype(np.int64))
