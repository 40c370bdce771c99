"""Batches of normalised images on the training device, from the decoded ones of both domains."""

from collections.abc import Iterator, Sized
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from certvol.config import AugmentConfig
from certvol.data.augment import WarpParameters, draw_parameters, test_view, train_view
from certvol.data.store import PixelStore
from certvol.nn.backbones import BackboneInfo
from certvol.nn.norm import SOURCE

Indices = NDArray[np.int64]


class Batches(Protocol):
    """What training asks of either kind of views: of images, or of features extracted before."""

    @property
    def device(self) -> torch.device: ...
    @property
    def source(self) -> Sized: ...
    @property
    def target(self) -> Sized: ...
    def training_batch(
        self, whole_N: Indices, rows: Indices, own_source: int, generator: torch.Generator
    ) -> Tensor: ...
    def target_view(self, images_N: Indices, generator: torch.Generator | None) -> Tensor: ...
    def test_batches(self, domain: int, images_N: Indices, batch_size: int) -> Iterator[Tensor]: ...


class Views:
    """`fused`: training batches are augmented by a compiled kernel."""

    def __init__(
        self, source: PixelStore, target: PixelStore, info: BackboneInfo, config: AugmentConfig, fused: bool = False
    ) -> None:
        self.source, self.target, self.info, self.config, self.fused = source, target, info, config, fused
        self.device = source.device

    def training_batch(self, whole_N: Indices, rows: Indices, own_source: int, generator: torch.Generator) -> Tensor:
        """Rows `rows` of the batch `whole_N`, of which the first `own_source` are of the source.

        `generator`, on the CPU, draws the views of the whole batch, so that a view depends on its place in it alone.
        """
        images_N = whole_N[rows]
        pixels = [self.source.gather(images_N[:own_source])] if own_source > 0 else []
        if own_source < len(images_N):
            pixels.append(self.target.gather(images_N[own_source:]))
        parameters = draw_parameters(len(whole_N), self.config, generator)
        if len(rows) < len(whole_N):
            parameters = parameters[torch.from_numpy(rows)]
        return self._augmented(torch.cat(pixels) if len(pixels) > 1 else pixels[0], parameters, self.fused)

    def _augmented(self, pixels_NHWC: Tensor, parameters: WarpParameters, fused: bool = False) -> Tensor:
        info = self.info
        return train_view(pixels_NHWC, parameters, info.image_size, info.mean, info.std, fused)

    def target_view(self, images_N: Indices, generator: torch.Generator | None) -> Tensor:
        """One view of target images: augmented where a generator is given, else the test view."""
        pixels = self.target.gather(images_N)
        if generator is not None:
            return self._augmented(pixels, draw_parameters(len(pixels), self.config, generator))
        return test_view(pixels, self.info.image_size, self.info.mean, self.info.std)

    def test_batches(self, domain: int, images_N: Indices, batch_size: int) -> Iterator[Tensor]:
        store = self.source if domain == SOURCE else self.target
        for start in range(0, len(images_N), batch_size):
            pixels = store.gather(images_N[start : start + batch_size])
            yield test_view(pixels, self.info.image_size, self.info.mean, self.info.std)
