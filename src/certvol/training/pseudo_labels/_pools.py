"""Label only the target images that a cycle will draw.

The target is labelled in a fresh random order, and each image goes into the pool of its label,
until every pool has what the cycle needs. The first n images of a pool are a uniform draw from all
images with that label, so batches are distributed as if everything had been labelled. A pool that
is still empty when the whole target is labelled proves that the class is absent.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from certvol.data import Indices


@dataclass(frozen=True)
class Pools:
    """Labelled target images by class, in the order in which they were labelled."""

    by_class: list[Indices]
    labelled: int
    """The number of labelled images, including those that were left out."""

    @property
    def counts_C(self) -> Indices:
        return np.array([len(pool) for pool in self.by_class], dtype=np.int64)

    def labels_of(self, num_images: int) -> Indices:
        """Return a label per image; -1 for those that are in no pool."""
        labels_N = np.full(num_images, -1, dtype=np.int64)
        for label, pool in enumerate(self.by_class):
            labels_N[pool] = label
        return labels_N


def fill_pools(
    label_chunk: Callable[[Indices, int], Callable[[], Indices]],
    order: Indices,
    needed_C: Indices,
    chunk_size: int,
    everything: bool = False,
) -> Pools:
    """Label the images in `order`, chunk by chunk, until each class has `needed_C` images.

    `label_chunk` takes images and the chunk's number and returns a function that waits for their
    labels: several chunks can be under way on a GPU. A label of -1 leaves an image out.
    """
    found: list[list[int]] = [[] for _ in needed_C]
    # An image has one label, so label at least as many images as the classes need in all.
    least = len(order) if everything else min(int(needed_C.sum()), len(order))
    waiting: list[tuple[Indices, Callable[[], Indices]]] = []
    labelled = 0
    for number, start in enumerate(range(0, len(order), chunk_size)):
        images = order[start : start + chunk_size]
        waiting.append((images, label_chunk(images, number)))
        labelled += len(images)
        if labelled < least:
            continue
        for chunk, labels in waiting:
            for image, label in zip(chunk.tolist(), labels().tolist(), strict=True):
                if label >= 0:
                    found[label].append(image)
        waiting.clear()
        enough = all(len(pool) >= need for pool, need in zip(found, needed_C, strict=True))
        if enough and not everything:
            break
    return Pools([np.array(pool, dtype=np.int64) for pool in found], labelled)
