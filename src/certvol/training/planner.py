"""Which images each step of a cycle gets, by the settings, and which target images must be labelled for it."""

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from certvol.config import TrainingConfig
from certvol.data.batches import (
    CyclePlan,
    batch_shape,
    by_class,
    class_visits,
    draw_plain,
    images_needed,
    plan_mixed_cycle,
    plan_plain_cycle,
    plan_source_cycle,
)
from certvol.seeding import numpy_generator
from certvol.training.labeller import Labeller
from certvol.training.pseudo_labels import Filed

Indices = NDArray[np.int64]


class Planner:
    """`kept`: the source images to train on; `source_labels`: of all source images; `num_target`: how many target images;
    `usual`: the batches of adaptation by this method, where the settings leave them open."""

    def __init__(
        self,
        settings: TrainingConfig,
        kept: Indices,
        source_labels: Indices,
        num_classes: int,
        num_target: int,
        usual: Literal["balanced", "plain"] = "balanced",
    ) -> None:
        self.settings, self.seed, self.num_classes, self.num_target = settings, settings.seed, num_classes, num_target
        self.kept, self.source_labels = kept, source_labels
        self.source_pools = [kept[positions] for positions in by_class(source_labels[kept], num_classes)]
        self.shape = batch_shape(settings.batch_size, num_classes)
        self.plain_pretraining = settings.batches == "plain"
        self.plain = (usual if settings.batches == "auto" else settings.batches) == "plain"

    def _visits(self, first_step: int, steps: int, stream: str) -> Indices:
        return class_visits(self.num_classes, self.shape.classes, first_step, steps, self.seed, stream)

    def pretraining(self, cycle: int, first_step: int, steps: int) -> CyclePlan:
        rng = numpy_generator(self.seed, "pretrain.batches", cycle)
        if self.plain_pretraining:
            nothing = np.empty((steps, 0), dtype=np.int64)
            return plan_plain_cycle(self.kept, self.source_labels, nothing, nothing[0], self.settings.batch_size, rng)
        visits_SK = self._visits(first_step, steps, "pretrain.classes")
        return plan_source_cycle(self.source_pools, visits_SK, self.shape, rng)

    def adaptation(
        self, cycle: int, first_step: int, steps: int, labeller: Labeller, between_chunks: Callable[[], None]
    ) -> tuple[CyclePlan, Filed]:
        """Labels, by the model as it is, as many target images as these steps will draw."""
        rng = numpy_generator(self.seed, "adapt.batches", cycle)
        if self.plain:
            target_SN = self._draw_target(np.arange(self.num_target), steps, rng)
            filed = labeller.label_images(cycle, np.unique(target_SN), between_chunks)
            return self._plain(target_SN, filed.labels_of(self.num_target), rng), filed
        visits_SK = self._visits(first_step, steps, "adapt.classes")
        filed = labeller.label(cycle, images_needed(visits_SK, self.num_classes, self.shape), between_chunks)
        return plan_mixed_cycle(self.source_pools, filed.pools, visits_SK, self.shape, rng), filed

    def labelled_adaptation(
        self, cycle: int, first_step: int, steps: int, labels_N: Indices
    ) -> tuple[CyclePlan, Filed]:
        """`labels_N`: of all target images; those below 0 are left out."""
        rng = numpy_generator(self.seed, "adapt.batches", cycle)
        order = numpy_generator(self.seed, "label.order", cycle).permutation(self.num_target)
        filed = Filed([order[labels_N[order] == label] for label in range(self.num_classes)], self.num_target)
        if self.plain:
            return self._plain(self._draw_target(np.flatnonzero(labels_N >= 0), steps, rng), labels_N, rng), filed
        visits_SK = self._visits(first_step, steps, "adapt.classes")
        return plan_mixed_cycle(self.source_pools, filed.pools, visits_SK, self.shape, rng), filed

    def _draw_target(self, pool: Indices, steps: int, rng: np.random.Generator) -> Indices:
        return draw_plain(pool, steps, self.settings.batch_size // 2, rng)

    def _plain(self, target_SN: Indices, labels_N: Indices, rng: np.random.Generator) -> CyclePlan:
        size = self.settings.batch_size
        return plan_plain_cycle(self.kept, self.source_labels, target_SN, labels_N, size, rng)
