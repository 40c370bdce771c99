"""Which model a run delivers: the last cycle's, unless the collapse guard or a validator chooses another."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from certvol.nn import norm
from certvol.scores.validators import DIRECTION, VALIDATORS, agreement, signs_of_collapse
from certvol.settings import GuardConfig

Scores = dict[str, float | None]
GUARD_VALIDATOR = "mutual_information"  # chooses among the healthy cycles after a collapse


@dataclass(frozen=True)
class Delivery:
    """The delivered model and the reason."""

    model: str
    """`last`, `cycle N` or `pretrained`."""
    why: str
    mode: norm.Mode
    """The norm mode that the model predicts with."""


class ModelChoice:
    """Watches the label-free scores of every cycle, and remembers the best healthy cycle by each validator.

    Among equals the newest cycle is the best: a score may have reached its maximum.
    """

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        asked = VALIDATORS if config.keep == "all" else (config.select,)
        self.validators = tuple(
            dict.fromkeys((GUARD_VALIDATOR, *(v for v in asked if v != "last")))
        )
        self.start({})

    def start(self, pretrained: Scores) -> None:
        """Begin adaptation from a model with these scores."""
        self.pretrained, self.last = pretrained, pretrained
        self.collapsed_in_a_row = 0
        self.best: dict[str, tuple[int, float]] = {}
        """Best cycle and its score by validator; a higher score is better."""
        self.sum_NC: NDArray[np.float32] | None = None
        """For `ensv`: the probabilities of all cycles, added up; `best_NC`: those of its best cycle."""
        self.best_NC: NDArray[np.float32] | None = None

    def look(self, cycle: int, scores: Scores, probabilities_NC: NDArray[np.float32]) -> list[str]:
        """Return the validators by which this cycle is the best so far; none if it has collapsed."""
        self.last = scores
        if self.signs_of_collapse():
            self.collapsed_in_a_row += 1
            return []
        self.collapsed_in_a_row = 0
        return [name for name in self.validators if self._is_best(name, cycle, probabilities_NC)]

    def _is_best(self, name: str, cycle: int, probabilities_NC: NDArray[np.float32]) -> bool:
        if name == "ensv":
            return self._agrees_more(cycle, probabilities_NC)
        value = self.last.get(name)
        if value is None or DIRECTION[name] * value < self.best.get(name, (0, -np.inf))[1]:
            return False
        self.best[name] = (cycle, DIRECTION[name] * value)
        return True

    def _agrees_more(self, cycle: int, probabilities_NC: NDArray[np.float32]) -> bool:
        """Compare this cycle with the best one so far: which agrees more with the mean of all?"""
        before = self.sum_NC
        self.sum_NC = probabilities_NC.copy() if before is None else before + probabilities_NC
        score = agreement(probabilities_NC, self.sum_NC)
        best = None if self.best_NC is None else agreement(self.best_NC, self.sum_NC)
        if best is not None and best > score:
            self.best["ensv"] = (self.best["ensv"][0], best)
            return False
        self.best["ensv"], self.best_NC = (cycle, score), probabilities_NC
        return True

    def signs_of_collapse(self) -> list[str]:
        """Return the signs of collapse in the newest cycle, in words."""
        config = self.config
        return signs_of_collapse(self.last, self.pretrained, config.spread, config.source_accuracy)

    @property
    def has_collapsed(self) -> bool:
        """Whether as many cycles in a row as `guard.patience` looked collapsed."""
        return self.collapsed_in_a_row >= self.config.patience

    def deliver(
        self,
        last: int,
        collapse: list[str],
        settled: bool,
        mode: norm.Mode,
        source_mode: norm.Mode,
    ) -> tuple[Delivery, str | None]:
        """Return the delivery, and the validator whose best weights are its model.

        `last` is the newest cycle, `collapse` the signs that ended adaptation, if labels that had
        `settled` did not; the pretrained model predicts with `source_mode`.
        """
        select = self.config.select
        validator = GUARD_VALIDATOR if select == "last" else select
        best = self.best.get(validator, (None,))[0]
        if not collapse:
            if select == "last" or best in (None, last):
                reason = "labels settled" if settled else "the last one"
                return Delivery("last", f"cycle {last}, {reason}", mode), None
            why = f"the best of {last} cycles by {select}"
            return Delivery(f"cycle {best}", why, mode), validator
        collapsed = f"adaptation collapsed at cycle {last} ({'; '.join(collapse)})"
        if self.config.action == "pretrained":
            why = f"{collapsed}, so the model before adaptation is safer"
            return Delivery("pretrained", why, source_mode), None
        if best is None:
            why = f"{collapsed} and no cycle was healthy"
            return Delivery("pretrained", why, source_mode), None
        why = f"{collapsed}; this is cycle {best}, the best before"
        return Delivery(f"cycle {best}", why, mode), validator

    # --- as part of a checkpoint

    def facts(self) -> dict[str, Any]:
        return {
            "pretrained": self.pretrained,
            "last": self.last,
            "collapsed_in_a_row": self.collapsed_in_a_row,
            "best": {name: [cycle, score] for name, (cycle, score) in self.best.items()},
        }

    def tensors(self) -> dict[str, Tensor]:
        arrays = {"sum_NC": self.sum_NC, "best_NC": self.best_NC}
        return {name: torch.from_numpy(a) for name, a in arrays.items() if a is not None}

    def restore(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        if not set(facts["best"]) <= set(VALIDATORS):
            raise ValueError("unknown validator in checkpoint")
        self.pretrained, self.last = dict(facts["pretrained"]), dict(facts["last"])
        self.collapsed_in_a_row = int(facts["collapsed_in_a_row"])
        self.best = {name: (int(cycle), float(s)) for name, (cycle, s) in facts["best"].items()}
        self.sum_NC = tensors["sum_NC"].numpy() if "sum_NC" in tensors else None
        self.best_NC = tensors["best_NC"].numpy() if "best_NC" in tensors else None
