"""Pretraining on the source, then adaptation in cycles: label the target, train on mixed batches, look at the result.

The trainer knows a method only by its protocol, and the target only as images. Where it stands is `Position` plus tensors; all
randomness is a function of the seed and the place, so that going on from a checkpoint gives what going on at once would have.
"""

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from certvol.config import Config
from certvol.data.batches import (
    CyclePlan,
    batch_shape,
    by_class,
    class_visits,
    hold_out,
    images_needed,
    plan_mixed_cycle,
    plan_source_cycle,
)
from certvol.errors import Interrupted, RunFailed, UserError
from certvol.inference import Outputs, evaluating, mixed_precision, run_batches
from certvol.methods.protocol import AdaptationMethod, Batch
from certvol.nn import norm
from certvol.nn.norm import SOURCE, TARGET
from certvol.reporting import Reporter
from certvol.seeding import numpy_generator
from certvol.selection import choose_mode, label_free_scores, sign_of_spreading
from certvol.stopping import StopSignal
from certvol.training.checkpoint import (
    Checkpoints,
    State,
    load_into,
    optimizer_tensors,
    read_tensors,
    restore_optimizer,
    with_prefix,
    without_prefix,
    write_tensors,
)
from certvol.training.distributed import Team, gathered
from certvol.training.guard import Guard, Scores
from certvol.training.labeller import Labeller
from certvol.training.position import Delivery, Position
from certvol.training.pseudo_labels import Filed
from certvol.training.run_folder import Journal, RunFolder
from certvol.training.schedule import adaptation_rate, pretraining_rate, steps_per_cycle
from certvol.training.stepper import Stepper
from certvol.training.views import Batches

Indices = NDArray[np.int64]
PRETRAIN_CYCLE = 50  # steps planned at a time in pretraining
STATISTICS_BATCHES = 16  # of target images, for the first estimate of the target's statistics
TRIAL_MODES: tuple[norm.Mode, ...] = ("mixed", "per_domain")
DEAD_SIGMA = 1e-3
LARGEST_SIGMA = 3.0  # times log C, which is the most that the losses ask for
CPU_EVALUATION_BATCH, GPU_EVALUATION_BATCH = 256, 1024


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
        self.reporter, self.about, self.stop_signal = reporter, about, stop_signal
        self.fingerprints = fingerprints  # of both domains' images, which must not change between two parts of a run
        self.device = views.device
        self.bf16 = self.settings.precision == "bf16" or (
            self.settings.precision == "auto" and self.device.type == "cuda" and torch.cuda.is_bf16_supported()
        )
        self.num_classes = self.network.num_classes
        self.shape = batch_shape(self.settings.batch_size, self.num_classes)
        self.cycle_steps = steps_per_cycle(self.settings, self.num_classes)
        self.eval_batch = GPU_EVALUATION_BATCH if self.device.type == "cuda" else CPU_EVALUATION_BATCH

        kept, self.held_out = hold_out(source_labels, self.num_classes, config.data.holdout, self.seed)
        self.source_labels = source_labels
        self.source_pools = [kept[positions] for positions in by_class(source_labels[kept], self.num_classes)]
        everything = numpy_generator(self.seed, "watched").permutation(len(views.target))
        self.watched = everything[: config.guard.images]

        self.position = Position(mode=self.network.domains.mode)
        self.guard = Guard(config.guard)
        self.journal: Journal = run.journal
        self.plan: CyclePlan | None = None
        self.pretrained_NC: NDArray[np.float32] | None = None
        self.stepper = Stepper(method, views, self.settings, self.team, self.bf16)
        self.labeller = Labeller(method, views, self.settings, self.team, self.bf16, self.eval_batch)
        self.saved_at = time.monotonic()
        self.warned: set[str] = set()

    # --- the course of a run -------------------------------------------------------------------------------------------

    def fit(self) -> Delivery:
        """From wherever the run stands to the delivered model, which `method` then holds."""
        self._resume()
        if self.position.phase == "pretrain":
            self._pretrain()
            self._look(
                0, SOURCE
            )  # a step may have ruined the model after its loss was taken: better known before it is kept
            self._write_weights(self.run.pretrained)
            self._begin_adaptation()
        if self.position.phase == "trial":
            self._choose_mode()
        if self.position.phase == "adapt":
            if self.method.closed_form:
                self._fit_features()
            else:
                self._adapt(self.settings.cycles)
            self.position.phase = "done"
            self._save()
        return self._deliver()

    def _pretrain(self) -> None:
        steps = self.settings.pretrain_steps
        self.reporter.start("pretraining", steps)
        self.reporter.advance(self.position.cycle * PRETRAIN_CYCLE + self.position.step)
        while self.position.cycle * PRETRAIN_CYCLE < steps:
            first = self.position.cycle * PRETRAIN_CYCLE
            if self.plan is None:
                rng = numpy_generator(self.seed, "pretrain.batches", self.position.cycle)
                visits_SK = self._visits(first, min(PRETRAIN_CYCLE, steps - first), "pretrain.classes")
                self.plan = plan_source_cycle(self.source_pools, visits_SK, self.shape, rng)
            self._train_cycle(self.plan, first, steps, lambda progress: pretraining_rate(self.settings))
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
        outputs = self._look(0, SOURCE)
        self.guard.start(self._scores(outputs))
        self.journal.log_scores(0, self.guard.pretrained, outputs.probabilities_NC)
        self.network.domains.mode = self.position.mode
        if self.network.domains.apart:
            norm.copy_source_to_target(self.network.backbone)
            order = numpy_generator(self.seed, "statistics").permutation(len(self.views.target))
            images = order[: STATISTICS_BATCHES * self.settings.batch_size]
            if len(images) > 1:  # one image alone has no statistics: the source's then stay
                even = math.ceil(len(images) / math.ceil(len(images) / self.settings.batch_size))
                with self.network.rows_of(domain=TARGET), mixed_precision(self.device, self.bf16):
                    batches = self.views.test_batches(TARGET, images, even)
                    norm.estimate_target_statistics(self.network.backbone, batches)
        if self.settings.fresh_optimizer:
            self.stepper.new_optimizer()

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
        self._save()  # twice: with the trials' states gone, the checkpoint before the newest must not need them
        for side in ("start", *(f"trial-{mode}" for mode in TRIAL_MODES)):
            self._side_state(side).remove()

    def _adapt(self, until_cycle: int) -> None:
        total = self.settings.cycles * self.cycle_steps
        what = "adapting" if self.position.trial is None else f"trial of {self.position.trial}"
        self.reporter.start(what, (until_cycle - self.position.cycle) * self.cycle_steps)
        self.reporter.advance(self.position.step)
        while self.position.cycle < until_cycle and not self.position.collapse:
            cycle, first = self.position.cycle, self.position.cycle * self.cycle_steps
            started = time.monotonic()
            if self.plan is None:
                visits_SK = self._visits(first, self.cycle_steps, "adapt.classes")
                filed = self._label(cycle, visits_SK)
                rng = numpy_generator(self.seed, "adapt.batches", cycle)
                self.plan = plan_mixed_cycle(self.source_pools, filed.pools, visits_SK, self.shape, rng)
                self.run.note_time({"cycle": cycle, "labelled": filed.walked, "seconds": time.monotonic() - started})
            self._train_cycle(self.plan, first, total, lambda progress: adaptation_rate(self.settings, progress))
            self._end_cycle()
            self.run.note_time({"cycle": cycle, "seconds": time.monotonic() - started})
            self._save_if_due()
        self.reporter.finish()

    def _fit_features(self) -> None:
        """The one cycle of a method in closed form. Every process does the same."""
        self._stop_if_asked()
        kept = np.sort(np.concatenate(self.source_pools))
        self.reporter.start("fitting", 1)
        with evaluating(self.method, TARGET):
            source, target = (
                torch.cat(
                    [self.network.features(batch) for batch in self.views.test_batches(domain, images, self.eval_batch)]
                )
                for domain, images in ((SOURCE, kept), (TARGET, np.arange(len(self.views.target))))
            )
            self.method.fit_features(source.cpu(), torch.from_numpy(self.source_labels[kept]), target.cpu())
        self.reporter.advance(1)
        self.reporter.finish()
        self.position.cycle = 1
        self._end_cycle()

    def _end_cycle(self) -> None:
        cycle = self.position.cycle
        outputs = self._look(cycle)
        scores = self._scores(outputs)
        self.journal.log_scores(cycle, scores, outputs.probabilities_NC)
        signs, best = self.guard.look(cycle, scores)
        if best:
            self._write_weights(self.journal.best_weights)
        if signs:
            self._warn_once(f"cycle {cycle}: {'; '.join(signs)}", "collapse")
        if self.guard.alarmed and self.config.guard.action != "warn":
            self.position.collapse = signs

    def _deliver(self) -> Delivery:
        position, last = self.position, self.position.cycle
        of_source: norm.Mode = "frozen" if self.network.domains.mode == "frozen" else "mixed"
        if not self.method.adapts or self.settings.cycles == 0:
            self.network.domains.mode = of_source
            return Delivery("pretrained", "this run does not adapt", of_source)
        if not position.collapse:
            if (sign := sign_of_spreading(self.guard.last, self.guard.pretrained)) is not None:
                self.reporter.warn(sign)
            return Delivery("last", f"cycle {last}, the last one", position.mode)
        reason = "; ".join(position.collapse)
        if self.config.guard.action == "stop":
            raise RunFailed(
                f"adaptation collapsed at cycle {last} ({reason}); the pretrained model is kept in {self.run.pretrained}. "
                "Another `model.norm` or a lower `training.learning_rate` may help"
            )
        self.team.wait()
        if self.guard.best_cycle is not None:
            load_into(self.method, read_tensors(self.run.journal.best_weights), self.run.journal.best_weights.name)
            why = f"adaptation collapsed at cycle {last} ({reason}); this is cycle {self.guard.best_cycle}, the best before"
            return Delivery(f"cycle {self.guard.best_cycle}", why, position.mode)
        load_into(self.method, read_tensors(self.run.pretrained), self.run.pretrained.name)
        self.network.domains.mode = of_source
        return Delivery(
            "pretrained", f"adaptation collapsed at cycle {last} ({reason}) and no cycle was healthy", of_source
        )

    # --- a cycle -------------------------------------------------------------------------------------------------------

    def _visits(self, first_step: int, steps: int, stream: str) -> Indices:
        return class_visits(self.num_classes, self.shape.classes, first_step, steps, self.seed, stream)

    def _label(self, cycle: int, visits_SK: Indices) -> Filed:
        filed = self.labeller.label(cycle, images_needed(visits_SK, self.num_classes, self.shape), self._stop_if_asked)
        in_use = int((filed.counts_C > 0).sum())
        if in_use < max(2, self.num_classes / 2):
            self._warn_once(f"cycle {cycle + 1}: pseudo-labels fall onto {in_use} of {self.num_classes} classes", "few")
        return filed

    def _stop_if_asked(self) -> None:
        """All processes together. What is in memory now is what a resumed run goes on from."""
        if (signal := self.team.agree(self.stop_signal())) is not None:
            self._save()
            self.team.part()
            raise Interrupted(f"stopped; go on with `certvol adapt --resume {self.run.path}`", 128 + signal)

    def _train_cycle(self, plan: CyclePlan, first: int, total: int, rate: Callable[[float], float]) -> None:
        self.method.train()
        adapting = self.position.phase != "pretrain"
        while self.position.step < plan.steps:
            index, place = self.position.step, first + self.position.step
            progress = place / max(1, total)
            learning_rate = rate(progress)
            terms, batch = self.stepper.step(plan, index, place, progress, adapting, learning_rate)
            self.position.step += 1
            self.reporter.advance(1)
            whole = self.position.step == plan.steps
            if (place + 1) % self.settings.log_every == 0 or whole:
                self._log(terms, batch, place, learning_rate)
                if not whole:
                    self._save_if_due()
            self._stop_if_asked()
        self.position.cycle, self.position.step, self.plan = self.position.cycle + 1, 0, None
        self.team.average(norm.statistics(self.network.backbone))

    def _log(self, terms: dict[str, Tensor], batch: Batch, place: int, learning_rate: float) -> None:
        """The only place where training waits for the device."""
        values = self.stepper.averaged(terms, batch)
        self._check_finite(values, place)
        adapting = self.position.phase != "pretrain"
        line: dict[str, Any] = {
            "phase": "adapt" if adapting else "pretrain",
            "cycle": self.position.cycle + 1 if adapting else 0,
            "step": place + 1,
            "lr": learning_rate,
            "loss": sum(self.method.term_weights.get(name, 1.0) * value for name, value in values.items()),
            **values,
        }
        notes = [f"loss {line['loss']:.2f}"]
        for name, value_N in batch.watched.items():
            for domain, rows in (("source", value_N[: batch.num_source]), ("target", value_N[batch.num_source :])):
                median = float(rows.float().median()) if len(rows) > 0 else None
                line[f"{name}_{domain}"] = median
                if median is not None:
                    notes.append(f"{name if domain == 'source' else ''} {median:.2f} {domain}".strip())
                    if name == "sigma" and median > LARGEST_SIGMA * math.log(self.num_classes):
                        self._warn_once(
                            f"step {place + 1}: sigma of the {domain} has grown to {median:.1f}, far above its largest target "
                            f"log C = {math.log(self.num_classes):.1f}; a lower `training.learning_rate` may help",
                            "large sigma",
                        )
                    if name == "sigma" and median < DEAD_SIGMA:
                        self._warn_once(
                            f"step {place + 1}: sigma of the {domain} has collapsed to {median:.1e}, so it carries no certainty; "
                            "a lower `training.learning_rate` may help",
                            "sigma",
                        )
        self.journal.log(line)
        self.reporter.note(" ".join(notes))

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
            self.pretrained_NC = outputs.probabilities_NC
        return outputs

    def _scores(self, outputs: Outputs) -> Scores:
        right = None
        if len(self.held_out) > 0:
            predicted = self.predict(SOURCE, self.held_out, SOURCE).labels_N
            right = float((predicted == self.source_labels[self.held_out]).mean())
        if self.pretrained_NC is None:
            raise AssertionError("scores are taken against the pretrained model's predictions")
        scores = label_free_scores(outputs.probabilities_NC, self.pretrained_NC, right)
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
        tensors = {**with_prefix("method", self.method.state_dict()), **optimizer_tensors(self.stepper.optimizer)}
        if self.plan is not None:
            plan = {f.name: torch.from_numpy(getattr(self.plan, f.name)) for f in dataclasses.fields(self.plan)}
            tensors |= with_prefix("plan", plan)
        if self.pretrained_NC is not None:
            tensors["pretrained_NC"] = torch.from_numpy(self.pretrained_NC)
        facts = {
            "position": dataclasses.asdict(self.position),
            "guard": self.guard.facts(),
            "fingerprints": self.fingerprints,
            "journal": self.run.journal.lengths(),
            "trial_journal": self.run.trial_journal(self.position.mode).lengths(),
        }
        return State(tensors, facts)

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
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise RunFailed(
                f"the checkpoint in {checkpoints.folder} is not one of this run ({type(error).__name__}: {error}); "
                "start the run anew"
            ) from None
        return state

    def _take(self, state: State) -> None:
        self.position = Position(**state.facts["position"])
        self.position.check()
        self.guard.restore(state.facts["guard"])
        self.network.domains.mode = self.position.mode
        load_into(self.method, without_prefix("method", state.tensors), "the checkpoint")
        restore_optimizer(self.stepper.new_optimizer(), state.tensors)
        plan = without_prefix("plan", state.tensors)
        self.plan = CyclePlan(**{name: tensor.numpy() for name, tensor in plan.items()}) if plan else None
        pretrained = state.tensors.get("pretrained_NC")
        self.pretrained_NC = None if pretrained is None else pretrained.numpy()
        if self.plan is not None:
            self.plan.check(len(self.views.source), len(self.views.target), self.num_classes)
        if set(state.facts["fingerprints"]) != set(self.fingerprints) or not isinstance(state.facts["journal"], dict):
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
        weights = [tensor for tensor in self.method.state_dict().values() if tensor.is_floating_point()]
        if not bool(torch.stack([tensor.isfinite().all() for tensor in weights]).all()):
            raise RunFailed(self._ruined("the model's weights are"))

    def _write_weights(self, path: Path) -> None:
        self._check_weights()
        self.run.check_present()
        if self.team.main:
            write_tensors(path, self.method.state_dict(), self.about)

    def _save(self) -> None:
        self._check_weights()
        self.run.check_present()
        self.team.average(norm.statistics(self.network.backbone))
        try:
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
