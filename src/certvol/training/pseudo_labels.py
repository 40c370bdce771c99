"""Pseudo-labels for the target images that a cycle will draw.

The target is walked in a fresh random order and each image filed under its label, until every class has what the cycle needs.
The first n images filed under a class are a uniform draw from all that carry its label, so the batches are distributed as if
everything had been labelled. A class that is still empty after the whole walk is proven absent.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Filed:
    pools: list[Indices]
    """Images of each class, in the order of the walk."""
    walked: int
    """How many images were labelled."""

    @property
    def counts_C(self) -> Indices:
        return np.array([len(pool) for pool in self.pools], dtype=np.int64)

    def labels_of(self, num_images: int) -> Indices:
        """By the image's number; -1 for those that were not labelled."""
        labels_N = np.full(num_images, -1, dtype=np.int64)
        for label, pool in enumerate(self.pools):
            labels_N[pool] = label
        return labels_N


def file_by_label(
    label_chunk: Callable[[Indices, int], Indices],
    order: Indices,
    needed_C: Indices,
    chunk_size: int,
    everything: bool = False,
) -> Filed:
    """`label_chunk`: (images, number of the chunk) -> their labels. `needed_C`: images that the cycle draws of each class."""
    found: list[list[int]] = [[] for _ in needed_C]
    walked = 0
    for number, start in enumerate(range(0, len(order), chunk_size)):
        images = order[start : start + chunk_size]
        for image, label in zip(images.tolist(), label_chunk(images, number).tolist(), strict=True):
            found[label].append(image)
        walked += len(images)
        if not everything and all(len(pool) >= need for pool, need in zip(found, needed_C, strict=True)):
            break
    return Filed([np.array(pool, dtype=np.int64) for pool in found], walked)
