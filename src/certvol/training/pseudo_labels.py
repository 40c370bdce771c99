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
    label_chunk: Callable[[Indices, int], Callable[[], Indices]],
    order: Indices,
    needed_C: Indices,
    chunk_size: int,
    everything: bool = False,
) -> Filed:
    """`label_chunk`: (images, number of the chunk) -> what gives their labels once they are asked for, so that chunks follow one
    another on a GPU without waiting. `needed_C`: images that the cycle draws of each class.
    """
    found: list[list[int]] = [[] for _ in needed_C]
    # An image has one label: whatever they are, at least as many must be walked as are needed in all.
    sure = len(order) if everything else int(needed_C.sum())
    waiting: list[tuple[Indices, Callable[[], Indices]]] = []
    walked = 0
    for number, start in enumerate(range(0, len(order), chunk_size)):
        images = order[start : start + chunk_size]
        waiting.append((images, label_chunk(images, number)))
        walked += len(images)
        if walked < min(sure, len(order)):
            continue
        for chunk, labels in waiting:
            for image, label in zip(chunk.tolist(), labels().tolist(), strict=True):
                found[label].append(image)
        waiting.clear()
        if not everything and all(len(pool) >= need for pool, need in zip(found, needed_C, strict=True)):
            break
    return Filed([np.array(pool, dtype=np.int64) for pool in found], walked)
