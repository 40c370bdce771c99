"""Plan which images the batches of a cycle hold: half source and half target, balanced or plain.

A balanced batch visits some classes and holds the same number of images per class from either
domain. Classes come from concatenated random permutations, so each is visited equally often. A
class's images are drawn without replacement across the cycle, and reshuffled when used up. Source
images stand in for a class without pseudo-labelled images. A weighted batch is balanced too, but
draws more target images of classes with more pseudo-labels. A plain batch takes the images of each
domain in shuffled order, whatever their class. Of several sources, each has its share of the source
images, in balanced batches of those of every class.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from certvol.data import Indices
from certvol.randomness import numpy_generator

LEAST_TO_HOLD_OUT = 5  # images of a class
MOST_HELD_OUT = 2048


@dataclass(frozen=True)
class BatchShape:
    """The classes of a balanced batch, and its images per class and domain."""

    classes: int
    per_domain: int

    @property
    def size(self) -> int:
        return self.classes * self.per_domain * 2


def batch_shape(batch_size: int, num_classes: int) -> BatchShape:
    """Choose as many classes as possible with 4 + 4 images each, but at least one."""
    classes = max(1, min(num_classes, batch_size // 8))
    return BatchShape(classes, max(1, batch_size // 2 // classes))


def class_visits(
    num_classes: int, per_batch: int, first_step: int, steps: int, seed: int, stream: str
) -> Indices:
    """Return the classes of each step's batch, a window into an endless row of permutations."""
    start, stop = first_step * per_batch, (first_step + steps) * per_batch
    rounds = range(start // num_classes, -(-stop // num_classes))
    row = [numpy_generator(seed, stream, number).permutation(num_classes) for number in rounds]
    offset = start - rounds.start * num_classes
    return np.concatenate(row)[offset : offset + stop - start].reshape(steps, per_batch)


@dataclass(frozen=True)
class CyclePlan:
    """The images of each step of a cycle.

    In a batch, source images come first, stand-ins included; `num_source_S` counts them.
    """

    images_SN: Indices
    labels_SN: Indices
    num_source_S: Indices

    @property
    def steps(self) -> int:
        return len(self.images_SN)

    def check(self, num_source: int, num_target: int, num_classes: int) -> None:
        """Raise ValueError if a plan that was read from a file does not fit these images."""
        images, labels, counts = self.images_SN, self.labels_SN, self.num_source_S
        integers = images.dtype.kind == "i" and images.ndim == 2
        if not integers or images.shape != labels.shape or counts.shape != images.shape[:1]:
            raise ValueError("the arrays of its plan have wrong shapes")
        is_source = np.arange(images.shape[1]) < counts[:, None]
        most = np.where(is_source, num_source, num_target)
        fits = (images >= 0) & (images < most) & (labels >= 0) & (labels < num_classes)
        if not fits.all():
            raise ValueError("its plan is about other images")


@dataclass(frozen=True, eq=False)
class Mixture:
    """The images of several sources, and each one's share of what is drawn."""

    parts: Sequence[Indices]
    shares_P: NDArray[np.float64]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def present(self) -> tuple[list[Indices], NDArray[np.float64]]:
        """Return the sources that have images, and their shares."""
        found = [number for number, part in enumerate(self.parts) if len(part)]
        shares_P = self.shares_P[found]
        return [self.parts[number] for number in found], shares_P / shares_P.sum()


Pool = Indices | Mixture


class _Drawer:
    """Draws images without replacement: first in the given order, then in new random orders."""

    def __init__(self, pool: Indices, rng: np.random.Generator) -> None:
        self.pool, self.rng, self.left = pool, rng, pool

    def draw(self, count: int) -> Indices:
        if count > 0 and len(self.pool) == 0:
            raise ValueError("a class without images cannot be drawn from")
        while len(self.left) < count:
            self.left = np.concatenate([self.left, self.rng.permutation(self.pool)])
        drawn, self.left = self.left[:count], self.left[count:]
        return drawn


class _MixedDrawer:
    """Draw images of several sources in turn, so that after each image the shares are right.

    A source without images has no share. The first to be drawn among equals is random.
    """

    def __init__(self, pool: Mixture, rng: np.random.Generator) -> None:
        parts, shares_P = pool.present()
        order_P = rng.permutation(len(parts))
        self.drawers = [_Drawer(rng.permutation(parts[number]), rng) for number in order_P]
        self.shares_P = shares_P[order_P]
        self.drawn_P = np.zeros(len(parts), dtype=np.int64)

    def draw(self, count: int) -> Indices:
        if count > 0 and not self.drawers:
            raise ValueError("a class without images cannot be drawn from")
        turn_N = np.empty(count, dtype=np.int64)
        for number in range(count):
            due_P = self.shares_P * (self.drawn_P.sum() + 1) - self.drawn_P
            turn_N[number] = due_P.argmax()
            self.drawn_P[turn_N[number]] += 1
        drawn_N = np.empty(count, dtype=np.int64)
        for part, drawer in enumerate(self.drawers):
            drawn_N[turn_N == part] = drawer.draw(int((turn_N == part).sum()))
        return drawn_N


def _drawer(pool: Pool, rng: np.random.Generator) -> _Drawer | _MixedDrawer:
    if isinstance(pool, Mixture):
        return _MixedDrawer(pool, rng)
    return _Drawer(rng.permutation(pool), rng)


def by_class(labels: Indices, num_classes: int) -> list[Indices]:
    """Return the positions of each class in ascending order."""
    order = np.argsort(labels, kind="stable")
    bounds = np.searchsorted(labels[order], np.arange(num_classes + 1))
    return [order[bounds[c] : bounds[c + 1]] for c in range(num_classes)]


def plan_source_cycle(
    source: Sequence[Pool], visits_SK: Indices, shape: BatchShape, rng: np.random.Generator
) -> CyclePlan:
    """Plan balanced batches of source images only, for pretraining."""
    images_SN, labels_SN = _draw_visited(source, visits_SK, 2 * shape.per_domain, rng)
    return CyclePlan(images_SN, labels_SN, np.full(len(visits_SK), shape.size, dtype=np.int64))


def _draw_visited(
    source: Sequence[Pool], visits_SK: Indices, per_class: int, rng: np.random.Generator
) -> tuple[Indices, Indices]:
    """Draw source images of the classes that each step visits; return them and their labels."""
    drawers = [_drawer(pool, rng) for pool in source]
    rows = [np.concatenate([drawers[c].draw(per_class) for c in step]) for step in visits_SK]
    return np.stack(rows), np.repeat(visits_SK, per_class, axis=1)


def plan_mixed_cycle(
    source: Sequence[Pool],
    target: Sequence[Indices],
    visits_SK: Indices,
    shape: BatchShape,
    rng: np.random.Generator,
) -> CyclePlan:
    """Plan balanced batches of both domains, for adaptation.

    `target` holds the images of each pseudo-label, in random order.
    """
    source_drawers = [_drawer(pool, rng) for pool in source]
    target_drawers = [_Drawer(pool, rng) for pool in target]
    images, labels, num_source = [], [], []
    for classes in visits_SK:
        absent = [c for c in classes if len(target[c]) == 0]
        present = [c for c in classes if len(target[c]) > 0]
        source_classes = [*classes, *absent]
        rows = [source_drawers[c].draw(shape.per_domain) for c in source_classes]
        rows += [target_drawers[c].draw(shape.per_domain) for c in present]
        images.append(np.concatenate(rows))
        labels.append(np.repeat(np.array([*source_classes, *present]), shape.per_domain))
        num_source.append(len(source_classes) * shape.per_domain)
    return CyclePlan(np.stack(images), np.stack(labels), np.array(num_source, dtype=np.int64))


def plan_weighted_cycle(
    source: Sequence[Pool],
    target: Sequence[Indices],
    visits_SK: Indices,
    shape: BatchShape,
    power: float,
    rng: np.random.Generator,
) -> CyclePlan:
    """Plan batches of balanced source images, and of target images by their pseudo-labels' shares.

    A class is drawn in proportion to its number of images to the power `power`: 1 draws all images
    equally often, a lower power draws rare classes more often. A class without images is not drawn.
    """
    steps, per_step = len(visits_SK), shape.classes * shape.per_domain
    source_SN, source_labels_SN = _draw_visited(source, visits_SK, shape.per_domain, rng)
    drawn_C = _weighted_counts([len(pool) for pool in target], power, steps * per_step, rng)
    of_target = zip(target, drawn_C, strict=True)
    images_M = np.concatenate([_Drawer(pool, rng).draw(count) for pool, count in of_target])
    labels_M = np.repeat(np.arange(len(target)), drawn_C)
    order_SN = rng.permutation(len(images_M)).reshape(steps, -1)
    return CyclePlan(
        np.concatenate([source_SN, images_M[order_SN]], axis=1),
        np.concatenate([source_labels_SN, labels_M[order_SN]], axis=1),
        np.full(steps, per_step, dtype=np.int64),
    )


def _weighted_counts(
    sizes: Sequence[int], power: float, total: int, rng: np.random.Generator
) -> Indices:
    """Return how often each class is drawn: `total` in all, or 0 if no class has images."""
    sizes_C = np.array(sizes, dtype=np.float64)
    weights_C = np.where(sizes_C > 0, sizes_C**power, 0.0)
    if weights_C.sum() == 0:
        return np.zeros(len(sizes_C), dtype=np.int64)
    expected_C = total * weights_C / weights_C.sum()
    counts_C: NDArray[np.int64] = np.floor(expected_C).astype(np.int64)
    left, rest_C = total - int(counts_C.sum()), expected_C - counts_C
    if left > 0:
        more = rng.choice(len(sizes_C), size=left, replace=False, p=rest_C / rest_C.sum())
        counts_C[more] += 1
    return counts_C


def draw_plain(pool: Pool, steps: int, per_step: int, rng: np.random.Generator) -> Indices:
    """Draw the images of each step's plain batch; an empty pool gives none."""
    if len(pool) == 0:
        return np.empty((steps, 0), dtype=np.int64)
    return _drawer(pool, rng).draw(steps * per_step).reshape(steps, per_step)


def plan_plain_cycle(
    source: Pool,
    source_labels: Indices,
    target_SN: Indices,
    target_labels: Indices,
    batch_size: int,
    rng: np.random.Generator,
) -> CyclePlan:
    """Plan plain batches of the target images `target_SN`, filled up with source images."""
    steps, num_target = target_SN.shape
    source_SN = draw_plain(source, steps, batch_size - num_target, rng)
    images = np.concatenate([source_SN, target_SN], axis=1)
    labels = np.concatenate([source_labels[source_SN], target_labels[target_SN]], axis=1)
    return CyclePlan(images, labels, np.full(steps, source_SN.shape[1], dtype=np.int64))


def images_needed(visits_SK: Indices, num_classes: int, shape: BatchShape) -> Indices:
    """Return how many target images of each class a cycle draws."""
    return np.bincount(visits_SK.ravel(), minlength=num_classes) * shape.per_domain


def hold_out(
    labels: Indices, num_classes: int, share: float, seed: int, most: int = MOST_HELD_OUT
) -> tuple[Indices, Indices]:
    """Return (kept for training, held out): a share of every class with at least five images."""
    rng = numpy_generator(seed, "holdout")
    held = []
    for positions in by_class(labels, num_classes):
        large = share > 0 and len(positions) >= LEAST_TO_HOLD_OUT
        count = max(1, int(share * len(positions))) if large else 0
        held.append(rng.permutation(positions)[:count])
    out = np.sort(np.concatenate(held))
    if len(out) > most:
        out = np.sort(rng.permutation(out)[:most])
    return np.setdiff1d(np.arange(len(labels)), out), out
