"""Pretrain on the source, then adapt in cycles: label the target, train, score the result.

The trainer knows a method and a pseudo-label rule only by their protocols, the target only as
unlabelled images, and files not at all: a `Keeper` saves what must be saved. All randomness is a
function of the seed and the position in the run, so a resumed run draws what it would have drawn.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch

from certvol.data import Indices
from certvol.data.batches import CyclePlan, hold_out
from certvol.data.reviewed import ReviewedLabels
from certvol.data.sources import Origins
from certvol.data.target_prior import TargetPrior
from certvol.data.views import Views
from certvol.distributed import Team
from certvol.errors import Interrupted, RunFailed
from certvol.methods._base import AdaptationMethod
from certvol.nn.acceleration import uses_bf16
from certvol.nn.backbones import has_pretrained_weights
from certvol.nn.norm import SOURCE, TARGET
from certvol.predict.forward import Outputs, domain_at_start, evaluating, mode_at_start
from certvol.progress import Reporter, Silent, StopSignal, percent
from certvol.scores.validators import pretraining_warning, spreading_warning
from certvol.settings import Config
from certvol.training.cycle_labels import CycleLabels
from certvol.training.keeper import PRETRAINED, Keeper
from certvol.training.log import Pace, TrainingLog
from certvol.training.model_choice import Delivery, ModelChoice, Scores, Watch, check_finite
from certvol.training.planner import (
    Planner,
    PriorShift,
    SourceRows,
    adaptation_rate,
    stage_of,
    steps_of_run,
    steps_per_cycle,
)
from certvol.training.pseudo_labels import chosen_rule
from certvol.training.pseudo_labels._labeller import Labeller
from certvol.training.state import Position, RunState
from certvol.training.step import Stepper
from certvol.training.trials import INITIAL, START, Trials


@dataclass(frozen=True, eq=False)
class Task:
    """The method to train, its inputs and its settings."""

    config: Config
    method: AdaptationMethod
    views: Views
    source_labels: Indices
    prior: TargetPrior
    """What is known about the target's classes."""
    team: Team
    pretrain_cycle: int = 50
    """Steps of pretraining that are planned at a time."""
    reviewed: ReviewedLabels | None = None
    """Labels of target images that a person gave to train on."""
    origins: Origins | None = None
    """The sources of the source images; None if there is one."""


class Trainer:
    """The loop over phases and cycles."""

    def __init__(
        self,
        task: Task,
        keeper: Keeper | None = None,
        reporter: Reporter | None = None,
        stop_signal: StopSignal | None = None,
    ) -> None:
        self.task, self.config, self.settings = task, task.config, task.config.training
        self.method, self.network = task.method, task.method.network
        self.views, self.device, self.team = task.views, task.views.device, task.team
        self.keeper, self.reporter = keeper or Keeper(), reporter or Silent()
        self.stop_signal = stop_signal or StopSignal()
        self.num_classes = self.network.num_classes
        self.start_domain = domain_at_start(self.config)
        self.cycle_steps = steps_per_cycle(self.settings, self.num_classes)
        self.log = TrainingLog(self.method, self.keeper, self.reporter)
        self.pace: Pace | None = None

        method, views, settings, team = self.method, self.views, self.settings, self.team
        labels, prior, share = task.source_labels, task.prior, self.config.data.holdout
        kept, held_out = hold_out(labels, self.num_classes, share, settings.seed)
        held_out = held_out[prior.allowed_C[labels[held_out]]]
        source = SourceRows(kept, labels, task.origins)
        self.planner = Planner(settings, source, prior, len(views.target), method.batches)
        self.prior_shift = PriorShift(method, prior, self.planner, self.device)
        self.prior_shift.for_start(continued=self.config.model.start is not None)
        self.watch = Watch(method, views, held_out, labels, self.config, team)
        reviewed, rule = task.reviewed, chosen_rule(self.config)
        self.labeller = Labeller(method, views, settings, team, rule, reviewed)
        bf16 = uses_bf16(settings, self.network, self.device)
        self.stepper = Stepper(method, views, settings, team, bf16, reviewed)
        self.choice = ModelChoice(self.config.guard, prior.classes_expected)
        self.state = RunState(method, self.stepper, self.choice)
        self.trials = Trials(self)
        self.labels = CycleLabels(self)

    @property
    def position(self) -> Position:
        return self.state.position

    # --- the phases

    def fit(self) -> Delivery:
        """Train from the present position to the end; `method` then holds the delivered model."""
        try:
            self._fit()
        except FloatingPointError as error:
            kept = self.keeper.last_good_state
            raise RunFailed(
                f"{error}; lower `training.learning_rate` (now {self.settings.learning_rate:g}) or "
                "set `training.grad_clip 10`"
                f"{'; ' if kept else ''}{kept}"
            ) from None
        return self._deliver()

    def _fit(self) -> None:
        if self.keeper.resume(self.state):
            at = self.position
            self.reporter.say(f"resuming from {at.phase}, cycle {at.cycle}, step {at.step}")
        elif self.trials.pretrains_again:
            self.keeper.save_as(INITIAL, self.state)
        if self.device.type == "cpu" and self.network.trained_part != "head":
            model = self.config.model
            pretrained = has_pretrained_weights(model.backbone, model.weights)
            self.pace = Pace(
                self._steps_left(), pretrained, self.reporter, may_settle=self.labels.may_settle
            )
        if self.position.phase == "pretrain" and self.position.trial is None:
            outputs = self.pretrain()
            self.keeper.keep_weights(PRETRAINED, self.method)
            self._begin_adaptation(outputs)
        if self.position.phase == "trial" or self.position.trial is not None:
            self.trials.choose()
        self.keeper.drop_trials(self.state)
        if self.position.phase == "adapt":
            if self.method.closed_form:
                self._fit_features()
            else:
                self.adapt(self.settings.cycles * self.method.stages)
            if self.config.guard.action != "warn":
                # This is the last cycle, so there is nothing to wait for.
                self.position.collapse = self.choice.final_signs(self.method.closed_form)
            self.position.phase = "done"
            self.save()

    def _steps_left(self) -> int:
        position, pretraining = self.position, self.position.phase == "pretrain"
        per_cycle = self.task.pretrain_cycle if pretraining else self.cycle_steps
        done = position.step + position.cycle * per_cycle
        done += 0 if pretraining else self.settings.pretrain_steps
        twice = self.trials.pretrains_again and pretraining and position.trial is None
        again = self.settings.pretrain_steps if twice else 0
        return steps_of_run(self.settings, self.method) + again - done

    def pretrain(self) -> Outputs:
        """Train on the source; return the outputs, checked: the last step may have ruined them."""
        steps, size = self.settings.pretrain_steps, self.task.pretrain_cycle
        position = self.position
        done = position.cycle * size + position.step
        again = "" if position.trial is None else f" for the trial of {position.trial}"
        self.reporter.start(f"pretraining{again}", steps, done)
        while (first := position.cycle * size) < steps:
            if self.state.plan is None:
                count = min(size, steps - first)
                self.state.plan = self.planner.pretraining(position.cycle, first, count)
            self._train_cycle(self.state.plan, first, (0, steps))
            self._finish_plan()
            self._save_if_due()
        self.reporter.finish()
        self.stepper.start_teacher()
        outputs = self.watch.target(self.start_domain)
        check_finite(self.method)
        return outputs

    def _begin_adaptation(self, outputs: Outputs) -> None:
        self.position.cycle = self.position.step = 0
        if not self.method.adapts or self.settings.cycles == 0:
            self.position.phase = "done"
            self.choice.start({"source_accuracy": self.watch.source_accuracy()})
        elif self.trials.modes:
            self.position.phase = "trial"
            self.keeper.save_as(START, self.state)
        else:
            self.position.phase = "adapt"
            self.start_in_norm_mode(outputs)
        self.save()

    def start_in_norm_mode(self, outputs: Outputs | None = None) -> None:
        """Score the pretrained model by its `outputs`, then prepare adaptation in a norm mode."""
        self.stepper.start_teacher()
        outputs = self.watch.target(self.start_domain) if outputs is None else outputs
        self.state.pretrained_NC = outputs.probabilities_NC
        scores = self._scores(outputs)
        self.choice.start(scores)
        self.state.watched_N = outputs.labels_N
        self.keeper.log_scores(0, scores, outputs.probabilities_NC)
        warning = self.prior_shift.contradiction(
            lambda: self.watch.target(self.start_domain).labels_N
        )
        if warning is not None:
            self.log.warn_once("prior", warning)
        self.prior_shift.for_adaptation()
        if self.config.model.start is None:
            self.stepper.set_norm_mode(self.position.mode)
        # Every stage of a method with stages starts without momentum, so the first does too.
        if self.settings.fresh_optimizer or self.method.stages > 1:
            self.stepper.new_optimizer()

    def adapt(self, until_cycle: int) -> None:
        """Train to the end of this cycle, or until a collapse or labels that stop changing."""
        position, steps = self.position, self.cycle_steps
        what = "adapting" if position.trial is None else f"trial of {position.trial}"
        self.reporter.start(what, until_cycle * steps, position.cycle * steps + position.step)
        while position.cycle < until_cycle and not position.collapse:
            cycle, started = position.cycle, time.monotonic()
            if self.state.plan is None and position.settled is None:
                self.labels.plan(cycle)
            if self.state.plan is None:
                break
            _, begin, end = stage_of(cycle, self.settings.cycles)
            planned = time.monotonic()
            self._train_cycle(self.state.plan, cycle * steps, (begin * steps, end * steps))
            trained = time.monotonic()
            if cycle + 1 < until_cycle:
                self.labels.survey_ahead(cycle + 1)
            surveyed = time.monotonic()
            self._finish_plan()
            self._end_cycle()
            ended = time.monotonic()
            parts = {"training": trained - planned, "looking": ended - surveyed}
            self.keeper.note_time({"cycle": cycle, "seconds": ended - started, **parts})
            self._save_if_due()
        self.reporter.finish()
        if position.settled is not None:
            self.reporter.say(
                f"adaptation settled at cycle {position.cycle}: {percent(position.settled)} % of "
                "pseudo-labels changed"
            )

    def _fit_features(self) -> None:
        """Run the one cycle of a method in closed form; every process does the same."""
        self.stop_if_asked()
        kept = np.sort(np.concatenate(self.planner.source_pools))
        self.reporter.start("fitting", 1)
        source_SD = self.watch.features(SOURCE, kept, self.stop_if_asked)
        every_N = np.arange(len(self.views.target))
        target_TD = self.watch.features(TARGET, every_N, self.stop_if_asked)
        labels_S = torch.from_numpy(self.task.source_labels[kept])
        if (reviewed := self.task.reviewed) is not None:
            source_SD = torch.cat([source_SD, target_TD[reviewed.images_R]])
            labels_S = torch.cat([labels_S, torch.from_numpy(reviewed.labels_R)])
            target_TD = target_TD[np.setdiff1d(np.arange(len(target_TD)), reviewed.none_U)]
        allowed_S = torch.from_numpy(self.task.prior.allowed_C)[labels_S]
        source_SD, labels_S = source_SD[allowed_S], labels_S[allowed_S]
        self.prior_shift.for_fit(labels_S)
        with evaluating(self.method, TARGET):
            self.method.fit_features(source_SD, labels_S, target_TD)
        self.reporter.advance(1)
        self.reporter.finish()
        self.position.cycle = 1
        self._end_cycle()

    def _deliver(self) -> Delivery:
        position, guard = self.position, self.config.guard
        self._judge_pretraining()
        source_mode = mode_at_start(self.config, self.network.domains.mode)
        if self.method.teacher is not None:
            self.method.teacher.hand_over()
            self.method.teacher = None
        if not self.method.adapts or self.settings.cycles == 0:
            self.network.domains.mode = source_mode
            return Delivery(PRETRAINED, "this run does not adapt", source_mode)
        if position.collapse and guard.action == "stop":
            raise RunFailed(
                f"adaptation collapsed at cycle {position.cycle} ({'; '.join(position.collapse)}); "
                "the pretrained model is kept. Try another `model.norm` or a lower "
                "`training.learning_rate`"
            )
        sign = spreading_warning(self.choice.last, self.choice.pretrained)
        if sign is not None and not position.collapse:
            self.reporter.warn(sign)
        delivery, validator = self.choice.deliver(
            position.cycle,
            position.collapse,
            position.settled is not None,
            position.mode,
            source_mode,
        )
        if delivery.model != "last":
            self.keeper.load_weights(validator or PRETRAINED, self.method)
        self.network.domains.mode = delivery.mode
        return delivery

    def _judge_pretraining(self) -> None:
        """Warn if pretraining failed. This comes at the end of a run, where users see it."""
        if self.settings.pretrain_steps > 0:
            accuracy = self.choice.pretrained.get("source_accuracy")
            images = len(self.watch.source_images)
            warning = pretraining_warning(accuracy, images, self.num_classes)
            if warning is not None:
                self.reporter.warn(warning)

    # --- a cycle

    def _train_cycle(self, plan: CyclePlan, first: int, bounds: tuple[int, int]) -> None:
        """Train the rest of a plan. `first` is the number, within the phase, of its first step.

        Progress runs from 0 at the first of the `bounds` to 1 at the second.
        """
        self.method.train()
        position, settings = self.position, self.settings
        adapting, begin, end = position.phase != "pretrain", *bounds
        while position.step < plan.steps:
            index, place = position.step, first + position.step
            progress = (place - begin) / max(1, end - begin)
            rate = adaptation_rate(settings, progress) if adapting else settings.learning_rate
            terms, batch = self.stepper.step(plan, index, place, progress, adapting, rate)
            position.step += 1
            self.reporter.advance(1)
            if self.pace is not None:
                self.pace.step()
            is_last = position.step == plan.steps
            if (place + 1) % settings.log_every == 0 or is_last:
                values = self.stepper.averaged(terms, batch)
                self.log.step(values, batch, position.cycle, place + 1, rate)
                if not is_last:
                    self._save_if_due()
            self.stop_if_asked()

    def _finish_plan(self) -> None:
        position = self.position
        position.cycle, position.step, self.state.plan = position.cycle + 1, 0, None

    def _scores(self, outputs: Outputs) -> Scores:
        if self.state.pretrained_NC is None:
            raise AssertionError("the pretrained model is scored first")
        fitted = self.method.closed_form and self.position.cycle > 0
        return self.watch.scores(outputs, self.state.pretrained_NC, fitted)

    def _end_cycle(self) -> None:
        cycle = self.position.cycle
        ahead = self.labels.ahead_for(cycle)
        outputs = self.watch.target() if ahead is None else self.watch.surveyed(ahead.survey)
        self.labels.note_predictions(outputs.labels_N)
        scores = self._scores(outputs)
        best = self.choice.note_cycle(cycle, scores, outputs.probabilities_NC)
        signs = self.choice.signs_of_collapse()
        line = {**scores, "collapsed": bool(signs)}
        self.keeper.log_scores(cycle, line, outputs.probabilities_NC)
        if best:
            check_finite(self.method)
        for validator in best:
            self.keeper.keep_weights(validator, self.method)
        if signs:
            self.log.warn_once("collapse", f"cycle {cycle}: {'; '.join(signs)}")
        if self.choice.has_collapsed and self.config.guard.action != "warn":
            self.position.collapse = signs

    # --- saving and stopping

    def save(self) -> None:
        check_finite(self.method)
        self.keeper.save(self.state)

    def _save_if_due(self) -> None:
        if self.keeper.is_save_due:
            self.save()

    def stop_if_asked(self) -> None:
        """Stop all processes together, with the present state saved."""
        if (signal := self.team.agree(self.stop_signal())) is not None:
            self.save()
            self.team.leave()
            raise Interrupted("stopped", 128 + signal)
