"""Plan a run: its steps, its learning rate, and which images each step of a cycle gets."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from certvol.data import Indices
from certvol.data.batches import (
    CyclePlan,
    Mixture,
    Pool,
    batch_shape,
    by_class,
    class_visits,
    draw_plain,
    images_needed,
    plan_mixed_cycle,
    plan_plain_cycle,
    plan_source_cycle,
    plan_weighted_cycle,
)
from certvol.data.sources import Origins
from certvol.data.target_prior import Shares, TargetPrior
from certvol.methods._base import AdaptationMethod
from certvol.randomness import numpy_generator
from certvol.settings import TrainingConfig
from certvol.training.pseudo_labels._labeller import Labeller
from certvol.training.pseudo_labels._pools import Pools


def adaptation_rate(config: TrainingConfig, progress: float) -> float:
    """Return the learning rate at `progress` (0 to 1) of adaptation."""
    given = config.adapt_learning_rate
    start = config.learning_rate if given is None else given
    if config.schedule == "constant":
        return start
    return start / float((1 + 10 * progress) ** config.schedule_exponent)


def steps_per_cycle(config: TrainingConfig, num_classes: int) -> int:
    """Return the steps per cycle; 0 stands for the authors' rule, 5 * ceil(classes / 16)."""
    return config.cycle_steps if config.cycle_steps > 0 else 5 * -(-num_classes // 16)


def steps_of_run(config: TrainingConfig, method: AdaptationMethod) -> int:
    """Return the steps of both phases; trials of norm modes are not counted."""
    stages = method.stages if method.adapts and not method.closed_form else 0
    per_cycle = steps_per_cycle(config, method.network.num_classes)
    return config.pretrain_steps + stages * config.cycles * per_cycle


def stage_of(cycle: int, cycles: int) -> tuple[int, int, int]:
    """Return the stage of a cycle, its first cycle and the one after its last.

    Every stage has `cycles` cycles.
    """
    number = cycle // cycles
    return number, number * cycles, (number + 1) * cycles


@dataclass(frozen=True, eq=False)
class SourceRows:
    """The source images to train on."""

    kept: Indices
    labels: Indices
    """Labels of all source images, held-out ones included."""
    origins: Origins | None = None
    """None if there is one source."""

    def pool(self, images: Indices) -> Pool:
        """Return images to draw from, so that each source gets its share."""
        if self.origins is None:
            return images
        return Mixture(self.origins.split(images), self.origins.shares_O)


class Planner:
    """Plans the steps of both phases.

    The `prior` says which classes adaptation visits; `usual` are the method's batches of
    adaptation, for `training.batches auto`.
    """

    def __init__(
        self,
        settings: TrainingConfig,
        source: SourceRows,
        prior: TargetPrior,
        num_target: int,
        usual: Literal["balanced", "plain"] = "balanced",
    ) -> None:
        self.settings, self.seed = settings, settings.seed
        self.num_classes, self.num_target = len(prior.allowed_C), num_target
        self.source, kept = source, source.kept
        positions = by_class(source.labels[kept], self.num_classes)
        self.source_pools = [kept[positions_N] for positions_N in positions]
        self.class_pools = [source.pool(images) for images in self.source_pools]
        self.whole_pool = source.pool(kept)
        self.adapted_classes = np.flatnonzero(prior.allowed_C)
        self.shape = batch_shape(settings.batch_size, self.num_classes)
        self.adapted_shape = batch_shape(settings.batch_size, len(self.adapted_classes))
        self.power = settings.class_power
        self.plain = (usual if settings.batches == "auto" else settings.batches) == "plain"

    @property
    def trained_shares_C(self) -> NDArray[np.float64]:
        """The shares of the classes among the images of pretraining."""
        return self._source_shares(plain=self.settings.batches == "plain")

    @property
    def adapted_shares_C(self) -> NDArray[np.float64]:
        """The shares of the classes among the source images of adaptation."""
        return self._source_shares(self.plain)

    def _source_shares(self, plain: bool) -> NDArray[np.float64]:
        if not plain:
            return np.full(self.num_classes, 1 / self.num_classes)
        whole, labels = self.whole_pool, self.source.labels
        parts, shares = ([whole], [1.0]) if not isinstance(whole, Mixture) else whole.present()
        shares_PC = [
            share * np.bincount(labels[part], minlength=self.num_classes) / len(part)
            for part, share in zip(parts, shares, strict=True)
        ]
        return np.asarray(np.sum(shares_PC, axis=0))

    def pretraining(self, cycle: int, first_step: int, steps: int) -> CyclePlan:
        rng = numpy_generator(self.seed, "pretrain.batches", cycle)
        if self.settings.batches == "plain":
            nothing = np.empty((steps, 0), dtype=np.int64)
            return self._plain(nothing, nothing[0], rng)
        visits_SK = class_visits(
            self.num_classes, self.shape.classes, first_step, steps, self.seed, "pretrain.classes"
        )
        return plan_source_cycle(self.class_pools, visits_SK, self.shape, rng)

    def adaptation(
        self,
        cycle: int,
        first_step: int,
        steps: int,
        labeller: Labeller,
        between_chunks: Callable[[], None],
    ) -> tuple[CyclePlan, Pools]:
        """Label the target images that these steps draw, and plan the steps."""
        rng = numpy_generator(self.seed, "adapt.batches", cycle)
        if self.plain:
            target_SN = self._draw_target(np.arange(self.num_target), steps, rng)
            pools = labeller.label_images(cycle, np.unique(target_SN), between_chunks)
            labels_N = pools.labels_of(self.num_target)
            if (labels_N[target_SN] < 0).any():  # the rule left images out: draw from the others
                target_SN = self._draw_target(np.flatnonzero(labels_N >= 0), steps, rng)
            return self._plain(target_SN, labels_N, rng), pools
        visits_SK = self._visits(first_step, steps)
        needed_C = images_needed(visits_SK, self.num_classes, self.adapted_shape)
        if self.power > 0:  # shares decide, and those of random images are as good as any
            pools = labeller.label_some(cycle, int(needed_C.sum()), between_chunks)
        else:
            pools = labeller.label(cycle, needed_C, between_chunks)
        return self._balanced(pools, visits_SK, rng), pools

    def labelled_adaptation(
        self, cycle: int, first_step: int, steps: int, labels_N: Indices
    ) -> tuple[CyclePlan, Pools]:
        """Plan the steps from labels of all target images; -1 leaves an image out."""
        rng = numpy_generator(self.seed, "adapt.batches", cycle)
        order = numpy_generator(self.seed, "label.order", cycle).permutation(self.num_target)
        by_label = [order[labels_N[order] == label] for label in range(self.num_classes)]
        pools = Pools(by_label, self.num_target)
        if self.plain:
            target_SN = self._draw_target(np.flatnonzero(labels_N >= 0), steps, rng)
            return self._plain(target_SN, labels_N, rng), pools
        visits_SK = self._visits(first_step, steps)
        return self._balanced(pools, visits_SK, rng), pools

    def _visits(self, first_step: int, steps: int) -> Indices:
        count, per_batch = len(self.adapted_classes), self.adapted_shape.classes
        visits_SK = class_visits(count, per_batch, first_step, steps, self.seed, "adapt.classes")
        return np.asarray(self.adapted_classes[visits_SK])

    def _balanced(self, pools: Pools, visits_SK: Indices, rng: np.random.Generator) -> CyclePlan:
        source, target, shape = self.class_pools, pools.by_class, self.adapted_shape
        if self.power == 0:
            return plan_mixed_cycle(source, target, visits_SK, shape, rng)
        return plan_weighted_cycle(source, target, visits_SK, shape, self.power, rng)

    def _draw_target(self, pool: Indices, steps: int, rng: np.random.Generator) -> Indices:
        return draw_plain(pool, steps, self.settings.batch_size // 2, rng)

    def _plain(self, target_SN: Indices, labels_N: Indices, rng: np.random.Generator) -> CyclePlan:
        size = self.settings.batch_size
        labels_S = self.source.labels
        return plan_plain_cycle(self.whole_pool, labels_S, target_SN, labels_N, size, rng)


@dataclass(frozen=True, eq=False)
class PriorShift:
    """Shifts a method's decisions towards the target prior; nothing if the prior says nothing.

    Pretraining, adaptation and a fit in closed form may see the source's classes in different
    shares. The shift of each phase's model divides by its own, and is saved with its weights.
    """

    method: AdaptationMethod
    prior: TargetPrior
    planner: Planner
    device: torch.device

    def for_start(self, continued: bool) -> None:
        """Set the shift of the model before adaptation.

        A `continued` run starts from the end of another run's adaptation.
        """
        shares_C = self.prior.shares_C
        if shares_C is not None:
            self.method.target_shares_C = torch.from_numpy(shares_C).float().to(self.device)
        self._divide_by(self._adapted_C if continued else self.planner.trained_shares_C)

    def for_adaptation(self) -> None:
        """Set the shift of the model that adaptation trains."""
        self._divide_by(self._adapted_C)

    def for_fit(self, labels_S: Tensor) -> None:
        """Set the shift of a method in closed form that is fitted to rows of these labels."""
        if self.method.keeps_source_shares:
            counts_C = np.bincount(labels_S.numpy(), minlength=self.planner.num_classes)
            self._divide_by(counts_C / counts_C.sum())

    def contradiction(self, predict: Callable[[], NDArray[np.int64]]) -> str | None:
        """Warn if predictions that the method makes without the prior contradict it."""
        shift_C = self.method.prior_shift_C
        if shift_C is None:
            return None
        self.method.prior_shift_C = None
        labels_N = predict()
        self.method.prior_shift_C = shift_C
        predicted_C = np.bincount(labels_N, minlength=self.planner.num_classes) / len(labels_N)
        return self.prior.contradiction(predicted_C)

    @property
    def _adapted_C(self) -> Shares:
        planner = self.planner
        if self.method.source_free:
            return planner.trained_shares_C
        return planner.adapted_shares_C

    def _divide_by(self, trained_C: Shares) -> None:
        shift_C = self.prior.shift(trained_C)
        self.method.prior_shift_C = None if shift_C is None else shift_C.to(self.device)
