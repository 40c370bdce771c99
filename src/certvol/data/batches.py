"""Which images a cycle's batches hold: half source and half target, class-balanced or plain.

A balanced batch visits some classes, taken from concatenated random permutations so that each class is visited equally often,
with the same number of images per class from either domain. A class is drawn without replacement across the cycle and
reshuffled when it is used up. Source images stand in for a class that has no pseudo-labelled image. A plain batch takes the
images of either domain as a shuffle brings them, whatever their class.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from certvol.seeding import numpy_generator

Indices = NDArray[np.int64]
LEAST_TO_HOLD_OUT = 5  # images of a class


@dataclass(frozen=True)
class BatchShape:
    classes: int
    per_domain: int
    """Images of one class and domain."""

    @property
    def size(self) -> int:
        return self.classes * self.per_domain * 2


def batch_shape(batch_size: int, num_classes: int) -> BatchShape:
    """As many classes as leave each 4 + 4 images; at least one."""
    classes = max(1, min(num_classes, batch_size // 8))
    return BatchShape(classes, max(1, batch_size // 2 // classes))


def class_visits(num_classes: int, per_batch: int, first_step: int, steps: int, seed: int, stream: str) -> Indices:
    """Classes of each step's batch, steps x per_batch: a window into the endless row of permutations."""
    start, stop = first_step * per_batch, (first_step + steps) * per_batch
    rounds = range(start // num_classes, -(-stop // num_classes))
    row = [numpy_generator(seed, stream, number).permutation(num_classes) for number in rounds]
    offset = start - rounds.start * num_classes
    return np.concatenate(row)[offset : offset + stop - start].reshape(steps, per_batch)


@dataclass(frozen=True)
class CyclePlan:
    """Every image of every step of a cycle. Rows are ordered source first, stand-ins included; `num_source` counts them."""

    images_SN: Indices
    labels_SN: Indices
    num_source_S: Indices

    @property
    def steps(self) -> int:
        return len(self.images_SN)

    def check(self, num_source: int, num_target: int, num_classes: int) -> None:
        """ValueError where a plan that was read from a file is none for these images."""
        images, labels, counts = self.images_SN, self.labels_SN, self.num_source_S
        if (
            images.dtype.kind != "i"
            or images.ndim != 2
            or images.shape != labels.shape
            or counts.shape != images.shape[:1]
        ):
            raise ValueError("its plan has other shapes")
        of_source = np.arange(images.shape[1]) < counts[:, None]
        most = np.where(of_source, num_source, num_target)
        if not (((images >= 0) & (images < most)).all() and ((labels >= 0) & (labels < num_classes)).all()):
            raise ValueError("its plan is about other images")


class _Drawer:
    """Hands out a class's images without replacement: first in the order given, then in fresh random orders."""

    def __init__(self, pool: Indices, rng: np.random.Generator) -> None:
        """An empty pool has nothing to take."""
        self.pool, self.rng, self.left = pool, rng, pool

    def take(self, count: int) -> Indices:
        taken = self.left[:count]
        self.left = self.left[count:]
        if len(taken) < count and len(self.pool) == 0:
            raise ValueError("a class without images cannot be drawn from")
        while len(taken) < count:
            self.left = self.rng.permutation(self.pool)
            missing = count - len(taken)
            taken = np.concatenate([taken, self.left[:missing]])
            self.left = self.left[missing:]
        return taken


def by_class(labels: Indices, num_classes: int) -> list[Indices]:
    """Positions of each class, in order."""
    order = np.argsort(labels, kind="stable")
    bounds = np.searchsorted(labels[order], np.arange(num_classes + 1))
    return [order[bounds[c] : bounds[c + 1]] for c in range(num_classes)]


def plan_source_cycle(
    source: Sequence[Indices], visits_SK: Indices, shape: BatchShape, rng: np.random.Generator
) -> CyclePlan:
    """Pretraining: all images of a class come from the source."""
    drawers = [_Drawer(rng.permutation(pool), rng) for pool in source]
    count = 2 * shape.per_domain
    images = np.stack([np.concatenate([drawers[c].take(count) for c in classes]) for classes in visits_SK])
    labels = np.repeat(visits_SK, count, axis=1)
    return CyclePlan(images, labels, np.full(len(visits_SK), shape.size, dtype=np.int64))


def plan_mixed_cycle(
    source: Sequence[Indices],
    target: Sequence[Indices],
    visits_SK: Indices,
    shape: BatchShape,
    rng: np.random.Generator,
) -> CyclePlan:
    """Adaptation. `target`: images filed under each pseudo-label, in an order that is random already."""
    source_drawers = [_Drawer(rng.permutation(pool), rng) for pool in source]
    target_drawers = [_Drawer(pool, rng) for pool in target]
    images, labels, num_source = [], [], []
    for classes in visits_SK:
        absent = [c for c in classes if len(target[c]) == 0]
        present = [c for c in classes if len(target[c]) > 0]
        source_classes = [*classes, *absent]
        rows = [source_drawers[c].take(shape.per_domain) for c in source_classes]
        rows += [target_drawers[c].take(shape.per_domain) for c in present]
        images.append(np.concatenate(rows))
        labels.append(np.repeat(np.array([*source_classes, *present]), shape.per_domain))
        num_source.append(len(source_classes) * shape.per_domain)
    return CyclePlan(np.stack(images), np.stack(labels), np.array(num_source, dtype=np.int64))


def draw_plain(pool: Indices, steps: int, per_step: int, rng: np.random.Generator) -> Indices:
    """Images of each step's plain batch, without replacement until the pool is used up; none of an empty pool."""
    if len(pool) == 0:
        return np.empty((steps, 0), dtype=np.int64)
    return _Drawer(rng.permutation(pool), rng).take(steps * per_step).reshape(steps, per_step)


def plan_plain_cycle(
    source: Indices,
    source_labels: Indices,
    target_SN: Indices,
    target_labels: Indices,
    batch_size: int,
    rng: np.random.Generator,
) -> CyclePlan:
    """`target_SN`: the target images that were drawn; source images fill the batch. Labels are found by an image's number."""
    steps, of_target = target_SN.shape
    source_SN = draw_plain(source, steps, batch_size - of_target, rng)
    images = np.concatenate([source_SN, target_SN], axis=1)
    labels = np.concatenate([source_labels[source_SN], target_labels[target_SN]], axis=1)
    return CyclePlan(images, labels, np.full(steps, source_SN.shape[1], dtype=np.int64))


def images_needed(visits_SK: Indices, num_classes: int, shape: BatchShape) -> Indices:
    """How many target images of each class the cycle will draw."""
    return np.bincount(visits_SK.ravel(), minlength=num_classes) * shape.per_domain


def hold_out(labels: Indices, num_classes: int, share: float, seed: int, most: int = 2048) -> tuple[Indices, Indices]:
    """(kept for training, held out): the same share of every class, none of a class with fewer than five images."""
    rng = numpy_generator(seed, "holdout")
    held = []
    for positions in by_class(labels, num_classes):
        count = max(1, int(share * len(positions))) if share > 0 and len(positions) >= LEAST_TO_HOLD_OUT else 0
        held.append(rng.permutation(positions)[:count])
    out = np.sort(np.concatenate(held)) if held else np.empty(0, dtype=np.int64)
    if len(out) > most:
        out = np.sort(rng.permutation(out)[:most])
    return np.setdiff1d(np.arange(len(labels)), out), out
