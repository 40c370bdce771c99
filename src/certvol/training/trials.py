"""Run trials for `model.norm auto`: a few cycles in each norm mode; continue from the best one.

`mixed` and `per_domain` start from the same pretrained model. If the backbone has pretrained
weights, `frozen` is tried too. That trial pretrains again, from the weights that the run started
with and with their statistics: a model that learnt with batch statistics does not fit stored ones.
"""

from typing import TYPE_CHECKING

from certvol.nn import norm
from certvol.nn.backbones import has_pretrained_weights
from certvol.progress import percent
from certvol.scores.validators import (
    NEARLY_ALL,
    ModeScores,
    drop_modes_that_lost_source,
    norm_margin,
    preferred_mode,
)
from certvol.training.keeper import PRETRAINED

if TYPE_CHECKING:
    from certvol.training.trainer import Trainer

INITIAL, START, START_FROZEN = "initial", "start", "start-frozen"


class Trials:
    """The trials of one run. `modes` are the candidates; empty if there is nothing to choose."""

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
        """Run the trials that are left, then continue from the end of the best one."""
        trainer, keeper = self.trainer, self.trainer.keeper
        guard, cycles = trainer.config.guard, trainer.config.training.cycles
        count = min(guard.trial_cycles, max(1, cycles // 2))
        for mode in self.modes:
            if mode not in trainer.position.trial_scores:
                self._run(mode, count)
        scores = trainer.position.trial_scores
        healthy = drop_modes_that_lost_source(scores, guard.source_accuracy)
        chosen = preferred_mode(healthy, trainer.num_classes)
        trainer.reporter.say(self._in_words(chosen, healthy, count))
        if chosen == "frozen":
            keeper.restore(START_FROZEN, trainer.state)
            keeper.keep_weights(PRETRAINED, trainer.method)
        keeper.restore(f"trial-{chosen}", trainer.state)
        position = trainer.position
        position.trial, position.phase = None, "adapt"
        position.trial_scores = scores
        keeper.end_trials(chosen, replace=chosen == "frozen")
        trainer.save()

    def _run(self, mode: norm.Mode, cycles: int) -> None:
        trainer, keeper = self.trainer, self.trainer.keeper
        scores = trainer.position.trial_scores
        try:
            self._train(mode, cycles)
            position, last = trainer.position, trainer.choice.last
            scores[mode] = None if position.collapse else dict(last)
            keeper.save_as(f"trial-{mode}", trainer.state)
        except FloatingPointError as error:
            if mode != "frozen":
                raise
            # The user did not ask for this mode, so its failure must not end the run.
            trainer.reporter.warn(f"norm mode frozen is left out: {error}")
            keeper.restore(START, trainer.state)
            scores[mode] = None
            trainer.position.trial_scores = scores
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
            if not own_start:
                trainer.start_in_norm_mode()
        if trainer.position.phase == "pretrain":
            trainer.network.domains.mode = mode
            outputs = trainer.pretrain()
            keeper.save_as(START_FROZEN, trainer.state)
            trainer.position.phase, trainer.position.cycle = "trial", 0
            trainer.start_in_norm_mode(outputs)
        trainer.adapt(cycles)

    def _in_words(self, chosen: norm.Mode, healthy: ModeScores, cycles: int) -> str:
        words, classes = [], self.trainer.num_classes
        for mode, scores in healthy.items():
            found = self.trainer.position.trial_scores[mode]
            if found is None:
                words.append(f"{mode} collapsed")
            elif scores is None:
                accuracy = percent(found["source_accuracy"], 0)
                words.append(f"{mode} out: {accuracy} % correct on held-out source images")
            else:
                words.append(
                    f"{mode} {found['entropy']:.2f}, {found['mutual_information']:.2f}, "
                    f"{found['classes_in_use']:.1f}"
                )
        others = "the other" if len(self.modes) == 2 else "the others"
        return (
            f"norm mode `{chosen}` chosen after {cycles} trial cycles. Entropy, mutual information "
            f"and classes in use: {'; '.join(words)}. A mode that fits the target more closely is "
            f"chosen only if it leads {others} by {norm_margin(classes):.2g} in entropy, or in "
            f"mutual information with at least {NEARLY_ALL * classes:.1f} classes in use."
        )
