"""Pretraining on the source, then adaptation in cycles: label the target, train on mixed batches, look at the result.

The trainer knows a method only by its protocol, and the target only as images. Where it stands is `Position` plus tensors; all
randomness is a function of the seed and the place, so that going on from a checkpoint gives what going on at once would have.
"""

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from certvol.acceleration import evaluation_batch, uses_bf16
from certvol.config import Config
from certvol.data.batches import CyclePlan, hold_out
from certvol.errors import Interrupted, RunFailed, UserError
from certvol.inference import Outputs, evaluating, mixed_precision, run_batches
from certvol.methods.protocol import AdaptationMethod, Batch
from certvol.nn import norm
from certvol.nn.backbones import has_pretrained_weights
from certvol.nn.norm import SOURCE, TARGET
from certvol.reporting import Reporter
from certvol.seeding import numpy_generator
from certvol.selection import SELECTORS, choose_mode, label_free_scores, sign_of_spreading
from certvol.stopping import StopSignal
from certvol.training import history
from certvol.training.checkpoint import Checkpoints, State
from certvol.training.choice import Choice
from certvol.training.delivery import Delivery, decide
from certvol.training.distributed import Team, gathered
from certvol.training.guard import GUARDS_SCORE, Guard, Scores
from certvol.training.labeller import Labeller
from certvol.training.pace import Pace
from certvol.training.planner import Planner
from certvol.training.position import Position
from certvol.training.pseudo_labels import Filed
from certvol.training.run_folder import Journal, RunFolder
from certvol.training.schedule import adaptation_rate, pretraining_rate, stage_of, steps_of_run, steps_per_cycle
from certvol.training.state import RunState
from certvol.training.stepper import Stepper
from certvol.training.views import Batches
from certvol.training.weights import WeightFiles

Indices = NDArray[np.int64]
PRETRAIN_CYCLE = 50  # steps planned at a time in pretraining
STATISTICS_BATCHES = 16  # of target images, for the first estimate of the target's statistics
TRIAL_MODES: tuple[norm.Mode, ...] = ("mixed", "per_domain")


class Trainer:
    def __init__(
        self,
        run: RunFolder,
        config: Config,
        method: AdaptationMethod,
        views: Batches,
        source_labels: Indices,
        reporter: Reporter,
        about: dict[str, Any],
        fingerprints: dict[str, str],
        stop_signal: StopSignal,
        team: Team | None = None,
    ) -> None:
        self.run, self.config, self.method, self.views = run, config, method, views
        self.network, self.team = method.network, team or Team()
        self.settings, self.seed = config.training, config.training.seed
        self.reporter, self.stop_signal = reporter, stop_signal
        self.fingerprints = fingerprints  # of both domains' images, which must not change between two parts of a run
        self.device = views.device
        self.bf16 = uses_bf16(self.settings, self.network, self.device)
        self.num_classes = self.network.num_classes
        self.cycle_steps = steps_per_cycle(self.settings, self.num_classes)
        self.eval_batch = evaluation_batch(self.device)

        kept, self.held_out = hold_out(source_labels, self.num_classes, config.data.holdout, self.seed)
        self.source_labels = source_labels
        self.planner = Planner(self.settings, kept, source_labels, self.num_classes, len(views.target), method.batches)
        everything = numpy_generator(self.seed, "watched").permutation(len(views.target))
        self.watched = everything[: config.guard.images]
        mixed = numpy_generator(self.seed, "watched.source").permutation(self.held_out)
        self.watched_source = mixed[: max(1, config.guard.images // 2)]

        self.guard = Guard(config.guard)
        chosen = SELECTORS if config.guard.keep == "all" else (config.guard.select,)
        # The guard keeps the best by its own score anyway.
        self.choice = Choice(tuple(name for name in chosen if name not in ("last", GUARDS_SCORE)))
        run.checkpoints.keeps_previous = self.settings.checkpoint_previous
        self.journal: Journal = run.journal
        self.stepper = Stepper(method, views, self.settings, self.team, self.bf16)
        self.state = RunState(method, self.stepper, self.guard, self.choice)
        self.weights = WeightFiles(method, about, writes=self.team.main)
        self.labeller = Labeller(method, views, self.settings, self.team, self.bf16, self.eval_batch)
        self.saved_at = time.monotonic()
        self.pace: Pace | None = None
        self.warned: set[str] = set()

    @property
    def position(self) -> Position:
        return self.state.position

    # --- the course of a run -------------------------------------------------------------------------------------------

    def fit(self) -> Delivery:
        """From wherever the run stands to the delivered model, which `method` then holds."""
        self._resume()
        if self.device.type == "cpu" and self.network.trained_part != "head":
            model = self.config.model
            self.pace = Pace(self._steps_left(), has_pretrained_weights(model.backbone, model.weights), self.reporter)
        if self.position.phase == "pretrain":
            self._pretrain()
            self._start_teacher()
            self._look(
                0, SOURCE
            )  # a step may have ruined the model after its loss was taken: better known before it is kept
            self._check_weights()
            self.run.check_present()
            self.weights.write(self.run.pretrained)
            self._begin_adaptation()
        if self.position.phase == "trial":
            self._choose_mode()
        self._drop_trials()
        if self.position.phase == "adapt":
            if self.method.closed_form:
                self._fit_features()
            else:
                self._adapt(self.settings.cycles * self.method.stages)
            if self.config.guard.action != "warn":
                self.position.collapse = self.guard.signs  # no cycle follows that patience could wait for
            self.position.phase = "done"
            self._save()
        return self._deliver()

    def _steps_left(self) -> int:
        position, pretraining = self.position, self.position.phase == "pretrain"
        done = position.step + position.cycle * (PRETRAIN_CYCLE if pretraining else self.cycle_steps)
        return steps_of_run(self.settings, self.method) - done - (0 if pretraining else self.settings.pretrain_steps)

    def _pretrain(self) -> None:
        steps = self.settings.pretrain_steps
        self.reporter.start("pretraining", steps, self.position.cycle * PRETRAIN_CYCLE + self.position.step)
        while self.position.cycle * PRETRAIN_CYCLE < steps:
            first = self.position.cycle * PRETRAIN_CYCLE
            if self.state.plan is None:
                self.state.plan = self.planner.pretraining(
                    self.position.cycle, first, min(PRETRAIN_CYCLE, steps - first)
                )
            self._train_cycle(self.state.plan, first, (0, steps), lambda progress: pretraining_rate(self.settings))
            self._save_if_due()
        self.reporter.finish()

    def _begin_adaptation(self) -> None:
        self.position.cycle = self.position.step = 0
        if not self.method.adapts or self.settings.cycles == 0:
            self.position.phase = "done"
        elif self.config.model.norm == "auto" and self.network.has_batch_norm:
            self.position.phase = "trial"
            self._side_state("start").save(self._state())
        else:
            self.position.phase = "adapt"
            self._start_in_mode()
        self._save()

    def _start_in_mode(self) -> None:
        """A look at the pretrained model, then statistics of the mode, and a fresh optimiser where the settings ask for one."""
        self._start_teacher()
        outputs = self._look(0, SOURCE)
        self.guard.start(self._scores(outputs))
        self.choice.start()
        self.journal.log_scores(0, self.guard.pretrained, outputs.probabilities_NC)
        self._take_up_mode()
        if self.settings.fresh_optimizer:
            self.stepper.new_optimizer()

    def _take_up_mode(self) -> None:
        """Statistics of the mode, for a pretrained model that knows the source's alone."""
        self.network.domains.mode = self.position.mode
        if self.network.domains.apart:
            norm.copy_source_to_target(self.method)
            order = numpy_generator(self.seed, "statistics").permutation(len(self.views.target))
            images = order[: STATISTICS_BATCHES * self.settings.batch_size]
            if len(images) > 1:  # one image alone has no statistics: the source's then stay
                even = math.ceil(len(images) / math.ceil(len(images) / self.settings.batch_size))
                with self.network.rows_of(domain=TARGET), mixed_precision(self.device, self.bf16):
                    batches = self.views.test_batches(TARGET, images, even)
                    # Through the head too: a method's own may have layers with statistics.
                    norm.estimate_target_statistics(
                        self.method, batches, lambda images: self.method.logits(self.network.features(images))
                    )
            self.stepper.even_out()
        self._start_teacher()

    def _start_teacher(self) -> None:
        if self.method.teacher is not None:
            self.method.teacher.start()

    def _choose_mode(self) -> None:
        """Runs the first cycles in each normalisation mode, and goes on from where the better one stands."""
        cycles = min(self.config.guard.trial_cycles, max(1, self.settings.cycles // 2))
        scores = self.position.trial_scores
        for mode in TRIAL_MODES:
            if mode in scores:
                continue
            self.journal = self.run.trial_journal(mode)
            if self.position.trial != mode:
                self._restore(self._side_state("start"))
                self.position.trial, self.position.mode, self.position.trial_scores = mode, mode, scores
                self.journal.cut({})
                self._start_in_mode()
            self._adapt(cycles)
            scores[mode] = None if self.position.collapse else self.guard.last["mutual_information"]
            self._side_state(f"trial-{mode}").save(self._state())
            self._save()
        chosen = TRIAL_MODES[choose_mode(scores["mixed"], scores["per_domain"], self.num_classes)]
        words = ", ".join(
            f"{mode} {'collapsed' if (s := scores[mode]) is None else f'{s:.3f}'}" for mode in TRIAL_MODES
        )
        self.reporter.say(f"normalisation statistics: {chosen} (mutual information after a short trial: {words})")
        self._restore(self._side_state(f"trial-{chosen}"))
        self.position.trial, self.position.trial_scores = None, scores
        self.journal = self.run.journal
        self.journal.adopt(self.run.trial_journal(chosen))
        self.position.phase = "adapt"
        self._save()

    def _drop_trials(self) -> None:
        """States and weights of trials that are over, also where a kill came before: the chosen ones are the run's own now."""
        sides = [self._side_state(side) for side in ("start", *(f"trial-{mode}" for mode in TRIAL_MODES))]
        kept = [file for mode in TRIAL_MODES for file in self.run.trial_journal(mode).kept_weights()]
        left = self.team.main and bool(kept or [side for side in sides if side.folder.exists()])
        if self.team.agree(1 if left else None) is None:
            return
        self._save()  # once more: with all that gone, the checkpoint before the newest must not need it
        for side in sides:
            side.remove()
        for file in kept if self.team.main else ():
            file.unlink(missing_ok=True)

    def _adapt(self, until_cycle: int) -> None:
        what = "adapting" if self.position.trial is None else f"trial of {self.position.trial}"
        done = self.position.cycle * self.cycle_steps + self.position.step
        self.reporter.start(what, until_cycle * self.cycle_steps, done)
        while self.position.cycle < until_cycle and not self.position.collapse:
            cycle, first = self.position.cycle, self.position.cycle * self.cycle_steps
            started = time.monotonic()
            if self.state.plan is None:
                self.state.plan, filed = self._plan_cycle(cycle)
                self.run.note_time({"cycle": cycle, "labelled": filed.walked, "seconds": time.monotonic() - started})
            _, *bounds = stage_of(cycle, self.settings.cycles)
            begin, end = (bound * self.cycle_steps for bound in bounds)
            planned = time.monotonic()
            self._train_cycle(
                self.state.plan, first, (begin, end), lambda progress: adaptation_rate(self.settings, progress)
            )
            trained = time.monotonic()
            self._end_cycle()
            ended = time.monotonic()
            parts = {"seconds": ended - started, "training": trained - planned, "looking": ended - trained}
            self.run.note_time({"cycle": cycle, **parts})
            self._save_if_due()
        self.reporter.finish()

    def _fit_features(self) -> None:
        """The one cycle of a method in closed form. Every process does the same."""
        self._stop_if_asked()
        kept = np.sort(np.concatenate(self.planner.source_pools))
        self.reporter.start("fitting", 1)
        source = self._test_features(SOURCE, kept)
        target = self._test_features(TARGET, np.arange(len(self.views.target)))
        with evaluating(self.method, TARGET):
            self.method.fit_features(source, torch.from_numpy(self.source_labels[kept]), target)
        self.reporter.advance(1)
        self.reporter.finish()
        self.position.cycle = 1
        self._end_cycle()

    def _test_features(self, domain: int, images: Indices) -> torch.Tensor:
        """By the domain's own statistics, on the CPU."""
        with evaluating(self.method, domain):
            batches = self.views.test_batches(domain, images, self.eval_batch)
            return torch.cat([self.network.features(batch) for batch in batches]).cpu()

    def _end_cycle(self) -> None:
        cycle = self.position.cycle
        outputs = self._look(cycle)
        scores = self._scores(outputs)
        signs, best = self.guard.look(cycle, scores)
        self.journal.log_scores(cycle, {**scores, "collapsed": bool(signs)}, outputs.probabilities_NC)
        if best:
            self._keep_weights(GUARDS_SCORE)
        for name in [] if signs else self.choice.look(cycle, scores, outputs.probabilities_NC):
            self._keep_weights(name)
        if signs:
            self._warn_once(f"cycle {cycle}: {'; '.join(signs)}", "collapse")
        if self.guard.alarmed and self.config.guard.action != "warn":
            self.position.collapse = signs

    def _deliver(self) -> Delivery:
        position = self.position
        of_source: norm.Mode = "frozen" if self.network.domains.mode == "frozen" else "mixed"
        if self.method.teacher is not None:
            self.method.teacher.hand_over()
            self.method.teacher = None
        if not self.method.adapts or self.settings.cycles == 0:
            self.network.domains.mode = of_source
            return Delivery("pretrained", "this run does not adapt", of_source)
        if position.collapse and self.config.guard.action == "stop":
            raise RunFailed(
                f"adaptation collapsed at cycle {position.cycle} ({'; '.join(position.collapse)}); the pretrained model is kept "
                f"in {self.run.pretrained}. Another `model.norm` or a lower `training.learning_rate` may help"
            )
        if not position.collapse and (sign := sign_of_spreading(self.guard.last, self.guard.pretrained)) is not None:
            self.reporter.warn(sign)
        delivery, score = decide(self.config.guard.select, position, self.guard, self.choice, of_source)
        if delivery.model != "last":
            self.team.wait()
            self.weights.load(self.run.pretrained if score is None else self.run.journal.best_weights(score))
        self.network.domains.mode = delivery.mode
        return delivery

    # --- a cycle -------------------------------------------------------------------------------------------------------

    def _plan_cycle(self, cycle: int) -> tuple[CyclePlan, Filed]:
        """Labels the target for it first: nothing is changed before the last moment at which the run may be stopped."""
        first, steps = cycle * self.cycle_steps, self.cycle_steps
        if self.method.labels_whole_target:
            stage, begin, _ = stage_of(cycle, self.settings.cycles)
            if self.state.labelled is None or self.method.stages == 1 or cycle == begin:
                pools = self.planner.source_pools
                survey = self.labeller.survey(cycle, stage, pools, self._stop_if_asked)
                self.state.note(self.labeller.by_method(survey))
                if stage > 0 and cycle == begin:
                    self._start_stage()
            if self.state.labelled is None:
                raise AssertionError("the target has been labelled above")
            labels_N = self.state.labelled.labels_N.cpu().numpy()
            plan, filed = self.planner.labelled_adaptation(cycle, first, steps, labels_N)
        else:
            plan, filed = self.planner.adaptation(cycle, first, steps, self.labeller, self._stop_if_asked)
        in_use = int((filed.counts_C > 0).sum())
        if in_use < max(2, self.num_classes / 2):
            self._warn_once(f"cycle {cycle + 1}: pseudo-labels fall onto {in_use} of {self.num_classes} classes", "few")
        return plan, filed

    def _start_stage(self) -> None:
        """From the pretrained weights again, with the labels that the stage before has left."""
        self.weights.load(self.run.pretrained)
        self._take_up_mode()
        self.stepper.new_optimizer()

    def _stop_if_asked(self) -> None:
        """All processes together. What is in memory now is what a resumed run goes on from."""
        if (signal := self.team.agree(self.stop_signal())) is not None:
            self._save()
            self.team.part()
            raise Interrupted(f"stopped; go on with `certvol adapt --resume {self.run.path}`", 128 + signal)

    def _train_cycle(
        self, plan: CyclePlan, first: int, bounds: tuple[int, int], rate: Callable[[float], float]
    ) -> None:
        """`first`: place of the plan's first step in the phase; `bounds`: of the part of it whose progress is counted."""
        self.method.train()
        adapting = self.position.phase != "pretrain"
        while self.position.step < plan.steps:
            index, place = self.position.step, first + self.position.step
            progress = (place - bounds[0]) / max(1, bounds[1] - bounds[0])
            learning_rate = rate(progress)
            terms, batch = self.stepper.step(plan, index, place, progress, adapting, learning_rate)
            self.position.step += 1
            self.reporter.advance(1)
            if self.pace is not None:
                self.pace.step()
            whole = self.position.step == plan.steps
            if (place + 1) % self.settings.log_every == 0 or whole:
                self._log(terms, batch, place, learning_rate)
                if not whole:
                    self._save_if_due()
            self._stop_if_asked()
        self.position.cycle, self.position.step, self.state.plan = self.position.cycle + 1, 0, None

    def _log(self, terms: dict[str, Tensor], batch: Batch, place: int, learning_rate: float) -> None:
        """The only place where training waits for the device."""
        values = self.stepper.averaged(terms, batch)
        self._check_finite(values, place)
        watched = history.medians(batch)
        adapting = self.position.phase != "pretrain"
        line: dict[str, Any] = {
            "phase": "adapt" if adapting else "pretrain",
            "cycle": self.position.cycle + 1 if adapting else 0,
            "step": place + 1,
            "lr": learning_rate,
            "loss": sum(self.method.term_weights.get(name, 1.0) * value for name, value in values.items()),
            **values,
            **watched,
        }
        self.journal.log(line)
        self.reporter.note(history.in_words(line["loss"], watched))
        for kind, warning in history.sigma_warnings(watched, self.num_classes).items():
            self._warn_once(f"step {place + 1}: {warning}", kind)

    def _check_finite(self, values: dict[str, float], place: int) -> None:
        for name, value in values.items():
            if not math.isfinite(value):
                raise RunFailed(self._ruined(f"at step {place + 1} of {self.position.phase} loss term `{name}` is"))

    def _ruined(self, what: str) -> str:
        kept = f" The last good state is in {self.run.checkpoints.folder}." if self.run.checkpoints.exist else ""
        return (
            f"{what} no longer finite: lower `training.learning_rate` (now {self.settings.learning_rate:g}) or set "
            f"`training.grad_clip 10`.{kept}"
        )

    # --- looking at the model ------------------------------------------------------------------------------------------

    def predict(self, domain: int, images_N: Indices, statistics: int, exact: bool = False) -> Outputs:
        """`statistics`: whose normalisation to use, where domains are kept apart. `exact`: in full precision."""
        batches = self.views.test_batches(domain, images_N[self.team.share(len(images_N))], self.eval_batch)
        outputs = gathered(run_batches(self.method, batches, statistics, self.bf16 and not exact), self.team)
        numbers = [outputs.probabilities_NC, *([outputs.sigma_N] if outputs.sigma_N is not None else [])]
        if not all(np.isfinite(values).all() for values in numbers):
            raise RunFailed(self._ruined("the model's predictions are"))
        return outputs

    def _look(self, cycle: int, statistics: int = TARGET) -> Outputs:
        outputs = self.predict(TARGET, self.watched, statistics)
        if cycle == 0:
            self.state.pretrained_NC = outputs.probabilities_NC
        return outputs

    def _scores(self, outputs: Outputs) -> Scores:
        right = None
        # What is fitted in closed form classifies the target by the target's own mean and scale: of the source it tells nothing.
        fitted = self.method.closed_form and self.position.cycle > 0
        if len(self.watched_source) > 0 and not fitted:
            predicted = self.predict(SOURCE, self.watched_source, SOURCE).labels_N
            right = float((predicted == self.source_labels[self.watched_source]).mean())
        if self.state.pretrained_NC is None:
            raise AssertionError("scores are taken against the pretrained model's predictions")
        scores = label_free_scores(outputs.probabilities_NC, self.state.pretrained_NC, right)
        if outputs.sigma_N is not None:
            scores["sigma"] = float(np.median(outputs.sigma_N))
        return scores

    def _warn_once(self, text: str, key: str) -> None:
        if key not in self.warned:
            self.warned.add(key)
            self.reporter.warn(text)

    # --- state ---------------------------------------------------------------------------------------------------------

    def _side_state(self, name: str) -> Checkpoints:
        return Checkpoints(self.run.checkpoints.folder / name, self.team.main)

    def _state(self) -> State:
        return self.state.checkpoint(
            {
                "fingerprints": self.fingerprints,
                "journal": self.run.journal.lengths(),
                "trial_journal": self.run.trial_journal(self.position.mode).lengths(),
            }
        )

    def _restore(self, checkpoints: Checkpoints) -> State | None:
        """To the newest whole state in `checkpoints`, which a side state must have."""
        self.team.wait()
        state, warnings = checkpoints.load()
        for warning in warnings:
            self.reporter.warn(warning)
        if state is None:
            if checkpoints is self.run.checkpoints:
                return None
            raise RunFailed(f"a state of this run is missing or torn in {checkpoints.folder}; start the run anew")
        try:
            self._take(state)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
            raise RunFailed(
                f"the checkpoint in {checkpoints.folder} is not one of this run ({type(error).__name__}: {error}); "
                "start the run anew"
            ) from None
        return state

    def _take(self, state: State) -> None:
        self.weights.forget_kept()
        self.state.take(state)
        lengths = [length for name in ("journal", "trial_journal") for length in state.facts[name].values()]
        if not all(isinstance(length, int) and length >= 0 for length in lengths):
            raise ValueError("its lengths of the journals are none")
        if set(state.facts["fingerprints"]) != set(self.fingerprints):
            raise ValueError("its facts are others")

    def _resume(self) -> None:
        state = self._restore(self.run.checkpoints)
        if state is None:
            self.run.journal.cut({})
            return
        for domain, fingerprint in self.fingerprints.items():
            if state.facts["fingerprints"][domain] != fingerprint:
                raise UserError(
                    f"the {domain} images have changed since the run {self.run.path} began: put them back as they were, or "
                    "start a new run"
                )
        self.run.journal.cut(state.facts["journal"])
        if self.position.trial is not None:
            self.run.trial_journal(self.position.trial).cut(state.facts["trial_journal"])
        self.reporter.say(
            f"going on from {self.position.phase}, cycle {self.position.cycle}, step {self.position.step}"
        )

    def _check_weights(self) -> None:
        """Before anything is written that others build on."""
        if not self.weights.finite:
            raise RunFailed(self._ruined("the model's weights are"))

    def _keep_weights(self, selector: str) -> None:
        self._check_weights()
        self.weights.keep(self.journal.best_weights(selector))

    def _save(self) -> None:
        self._check_weights()
        self.run.check_present()
        try:
            self.weights.write_kept()
            self.run.checkpoints.save(self._state())
        except OSError as error:
            raise UserError(
                f"cannot write the checkpoint: {error.strerror or error}; the one before it is kept. When the cause is mended, "
                f"go on with `certvol adapt --resume {self.run.path}`"
            ) from None
        self.saved_at = time.monotonic()

    def _save_if_due(self) -> None:
        due = self.team.main and time.monotonic() - self.saved_at > self.settings.checkpoint_seconds
        if self.team.agree(1 if due else None) is not None:
            self._save()
