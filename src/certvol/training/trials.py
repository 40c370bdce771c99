"""The trial of norm modes for `model.norm auto`: run the first cycles in each, continue from the best.

`mixed` and `per_domain` start from the same pretrained model. If the backbone has pretrained
weights, `frozen` is tried too. That trial pretrains again, from the weights that the run started
with and with their statistics: a model that learnt with batch statistics does not fit stored ones.
"""

from typing import TYPE_CHECKING

from certvol.nn import norm
from certvol.nn.backbones import has_pretrained_weights
from certvol.progress import percent
from certvol.scores.validators import keeps_source, norm_margin, preferred_mode
from certvol.training.keeper import PRETRAINED

if TYPE_CHECKING:
    from certvol.training.trainer import Trainer

TRIAL_VALIDATOR = "entropy"
INITIAL, START, START_FROZEN = "initial", "start", "start-frozen"


class Trials:
    """`modes` are the candidates; there are none without a choice to make."""

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer, config = trainer, trainer.config
        method, model = trainer.method, config.model
        adapts = method.adapts and not method.closed_form and config.training.cycles > 0
        self.modes: tuple[norm.Mode, ...] = ()
        if model.norm == "auto" and method.network.has_batch_norm and adapts:
            pretrained = has_pretrained_weights(model.backbone, model.weights)
            self.modes = ("mixed", "per_domain", *(("frozen",) if pretrained else ()))

    @property
    def pretrains_again(self) -> bool:
        return "frozen" in self.modes

    def choose(self) -> None:
        """Run the trials that are left, then go back to the end of the best one."""
        trainer, keeper = self.trainer, self.trainer.keeper
        guard, cycles = trainer.config.guard, trainer.config.training.cycles
        count = min(guard.trial_cycles, max(1, cycles // 2))
        for mode in self.modes:
            if mode not in trainer.position.trial_scores:
                self._run(mode, count)
        scores = trainer.position.trial_scores
        accuracies = trainer.position.trial_accuracies
        healthy = keeps_source(scores, accuracies, guard.source_accuracy)
        chosen = next(
            mode for mode in self.modes if mode == preferred_mode(healthy, trainer.num_classes)
        )
        trainer.reporter.say(self._in_words(chosen, healthy, count))
        if chosen == "frozen":
            keeper.restore(START_FROZEN, trainer.state)
            keeper.keep_weights(PRETRAINED, trainer.method)
        keeper.restore(f"trial-{chosen}", trainer.state)
        position = trainer.position
        position.trial, position.phase = None, "adapt"
        position.trial_scores, position.trial_accuracies = scores, accuracies
        keeper.end_trials(chosen, replace=chosen == "frozen")
        trainer.save()

    def _run(self, mode: norm.Mode, cycles: int) -> None:
        trainer, keeper = self.trainer, self.trainer.keeper
        scores, accuracies = trainer.position.trial_scores, trainer.position.trial_accuracies
        try:
            self._train(mode, cycles)
            position, last = trainer.position, trainer.choice.last
            scores[mode] = None if position.collapse else last[TRIAL_VALIDATOR]
            accuracies[mode] = last["source_accuracy"]
            keeper.save_as(f"trial-{mode}", trainer.state)
        except FloatingPointError as error:
            if mode != "frozen":
                raise
            # Nobody asked for this candidate, so it must not end the run.
            trainer.reporter.warn(f"norm mode frozen is left out: {error} no longer finite")
            keeper.restore(START, trainer.state)
            scores[mode] = accuracies[mode] = None
            trainer.position.trial_scores = scores
            trainer.position.trial_accuracies = accuracies
        trainer.save()

    def _train(self, mode: norm.Mode, cycles: int) -> None:
        trainer, keeper, own_start = self.trainer, self.trainer.keeper, mode == "frozen"
        fresh = trainer.position.trial != mode
        keeper.begin_trial(mode, fresh)
        if fresh:
            before = trainer.position
            keeper.restore(INITIAL if own_start else START, trainer.state)
            position = trainer.position
            position.trial = position.mode = mode
            position.trial_scores = before.trial_scores
            position.trial_accuracies = before.trial_accuracies
            if not own_start:
                trainer.start_in_norm_mode()
        if trainer.position.phase == "pretrain":
            trainer.network.domains.mode = mode
            trainer.pretrain()
            keeper.save_as(START_FROZEN, trainer.state)
            trainer.position.phase, trainer.position.cycle = "trial", 0
            trainer.start_in_norm_mode()
        trainer.adapt(cycles)

    def _in_words(self, chosen: norm.Mode, healthy: dict[str, float | None], cycles: int) -> str:
        position, words = self.trainer.position, []
        for mode in healthy:
            score, accuracy = position.trial_scores[mode], position.trial_accuracies[mode]
            if score is None:
                words.append(f"{mode} collapsed")
            elif healthy[mode] is None:
                words.append(
                    f"{mode} out: {percent(accuracy, 0)} % right on held-out source images"
                )
            else:
                words.append(f"{mode} {score:.3f}")
        later = "per_domain" if len(self.modes) == 2 else "each"
        margin = norm_margin(self.trainer.num_classes)
        return (
            f"norm mode: {chosen} (mean entropy after {cycles} trial cycles: "
            f"{', '.join(words)}; {later} must be {margin:.2g} lower)"
        )
