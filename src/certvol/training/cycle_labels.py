"""Label the target for each cycle, and detect when the labels have stopped changing."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from certvol.data import Indices
from certvol.methods._base import Survey
from certvol.scores.validators import effective_number
from certvol.training.keeper import PRETRAINED
from certvol.training.planner import stage_of

if TYPE_CHECKING:
    from certvol.training.trainer import Trainer


@dataclass(frozen=True, eq=False)
class Ahead:
    """A survey of the target for a cycle that has not begun yet."""

    cycle: int
    survey: Survey
    seconds: float
    """The time that the survey took."""


class CycleLabels:
    """Makes the labels of each cycle and plans its batches from them."""

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer, self.settings = trainer, trainer.settings
        self.method, self.state = trainer.method, trainer.state
        self.labeller, self.planner = trainer.labeller, trainer.planner
        one_stage = self.method.stages == 1
        self.may_settle = self.settings.settled > 0 and one_stage and not self.method.ramps
        self.surveys_ahead = self.labeller.survey_predicts and one_stage
        self.ahead: Ahead | None = None

    def plan(self, cycle: int) -> None:
        """Label the target for a cycle and plan its batches, unless its labels have settled.

        The state changes only after the last point at which the run can be stopped.
        """
        trainer, ahead, started = self.trainer, self.ahead_for(cycle), time.monotonic()
        first, steps = cycle * trainer.cycle_steps, trainer.cycle_steps
        if self.labeller.labels_whole_target:
            labels_N = self._label_target(cycle)
            if self.state.position.settled is not None:
                return
            plan, pools = self.planner.labelled_adaptation(cycle, first, steps, labels_N)
        else:
            plan, pools = self.planner.adaptation(
                cycle, first, steps, self.labeller, trainer.stop_if_asked
            )
        if cycle == 0 and self.labeller.rule_compares:
            trainer.choice.expect(effective_number(pools.counts_C))
        self._warn_of_few_classes(cycle, pools.counts_C[trainer.task.prior.allowed_C])
        self.state.plan = plan
        seconds = time.monotonic() - started + (0.0 if ahead is None else ahead.seconds)
        trainer.keeper.note_time({"cycle": cycle, "labelled": pools.labelled, "seconds": seconds})

    def _warn_of_few_classes(self, cycle: int, counts_A: Indices) -> None:
        """Warn if the pseudo-labels leave out most of the classes that the target may have."""
        in_use, classes = int((counts_A > 0).sum()), len(counts_A)
        if in_use < min(classes, max(2, classes / 2)):
            self.trainer.log.warn_once(
                "few",
                f"cycle {cycle + 1}: pseudo-labels use only {in_use} of {classes} classes; if the "
                "target has more, lower `training.learning_rate` or compare with `--method "
                "source_only`",
            )

    def _label_target(self, cycle: int) -> Indices:
        """Label all target images in every cycle, or once per stage if a method has several.

        A new stage starts from the pretrained weights, with the labels of the stage before.
        """
        trainer, before = self.trainer, self.state.labelled
        stage, first_cycle, _ = stage_of(cycle, self.settings.cycles)
        if before is not None and self.method.stages > 1 and cycle != first_cycle:
            return _on_host(before.labels_N)
        labelled = self.labeller.label_target(self._survey(cycle, stage))
        self.state.set_labelled(labelled)
        if stage > 0:
            trainer.keeper.load_weights(PRETRAINED, self.method)
            trainer.prior_shift.for_adaptation()
            if trainer.config.model.start is None:
                trainer.stepper.set_norm_mode(self.state.position.mode)
            trainer.stepper.new_optimizer()
        if before is not None:
            changed = _share_changed(_on_host(before.labels_N), _on_host(labelled.labels_N))
            # Labels from clusters can settle before the classifier does.
            self._note_change(max(changed, self.state.position.changed))
        return _on_host(labelled.labels_N)

    def _survey(self, cycle: int, stage: int) -> Survey:
        ahead, self.ahead = self.ahead_for(cycle), None
        if ahead is not None:
            return ahead.survey
        pools, stop_if_asked = self.planner.source_pools, self.trainer.stop_if_asked
        return self.labeller.survey(cycle, stage, pools, stop_if_asked)

    def survey_ahead(self, cycle: int) -> None:
        """Survey the target for the next cycle now: the guard then needs no pass of its own.

        A run that is stopped during the survey resumes after the last step of the present plan.
        """
        if self.surveys_ahead:
            started = time.monotonic()
            survey = self._survey(cycle, 0)
            self.ahead = Ahead(cycle, survey, time.monotonic() - started)

    def ahead_for(self, cycle: int) -> Ahead | None:
        return self.ahead if self.ahead is not None and self.ahead.cycle == cycle else None

    def note_predictions(self, watched_N: Indices) -> None:
        """Compare a cycle's predictions of the watched images with those of the cycle before."""
        before_N, self.state.watched_N = self.state.watched_N, watched_N
        if before_N is not None:
            self.state.position.changed = _share_changed(before_N, watched_N)
            if not self.labeller.labels_whole_target:
                self._note_change(self.state.position.changed)

    def _note_change(self, changed: float) -> None:
        if self.may_settle:
            self.state.note_change(changed, self.settings.settled)


def _share_changed(before_N: Indices, now_N: Indices) -> float:
    return float((before_N != now_N).mean())


def _on_host(labels_N: Tensor) -> Indices:
    return np.asarray(labels_N.cpu().numpy())
