"""Which cycle's model a run delivers where it is asked to choose: the best healthy one by label-free scores."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from certvol.selection import DIRECTION, SELECTORS, agreement
from certvol.training.guard import Scores


@dataclass
class Choice:
    """The best cycle so far by each of `names`. Among equals the newest: a score may have reached all that it can."""

    names: tuple[str, ...]
    best: dict[str, tuple[int, float]] = field(default_factory=dict)
    """(cycle, its score), more is better."""
    sum_NC: NDArray[np.float32] | None = None
    """Of all cycles' probabilities, for `ensv`; `kept_NC`: those of its best cycle."""
    kept_NC: NDArray[np.float32] | None = None

    def start(self) -> None:
        self.best, self.sum_NC, self.kept_NC = {}, None, None

    def look(self, cycle: int, scores: Scores, probabilities_NC: NDArray[np.float32]) -> list[str]:
        """The names by which this cycle is the best so far."""
        won = []
        for name in self.names:
            if name == "ensv":
                better = self._agrees_more(cycle, probabilities_NC)
            else:
                value = scores.get(name)
                score = None if value is None else DIRECTION[name] * value
                better = score is not None and score >= self.best.get(name, (0, float("-inf")))[1]
                if better and score is not None:
                    self.best[name] = (cycle, score)
            won += [name] if better else []
        return won

    def _agrees_more(self, cycle: int, probabilities_NC: NDArray[np.float32]) -> bool:
        """Weights of two cycles are at hand, those kept and the newest: which one agrees more with the mean of all so far?"""
        self.sum_NC = probabilities_NC.copy() if self.sum_NC is None else self.sum_NC + probabilities_NC
        score = agreement(probabilities_NC, self.sum_NC)
        kept = None if self.kept_NC is None else agreement(self.kept_NC, self.sum_NC)
        if kept is not None and kept > score:
            self.best["ensv"] = (self.best["ensv"][0], kept)
            return False
        self.best["ensv"], self.kept_NC = (cycle, score), probabilities_NC
        return True

    def facts(self) -> dict[str, Any]:
        return {name: [cycle, score] for name, (cycle, score) in self.best.items()}

    def tensors(self) -> dict[str, Tensor]:
        kept = {"sum_NC": self.sum_NC, "kept_NC": self.kept_NC}
        return {name: torch.from_numpy(array) for name, array in kept.items() if array is not None}

    def restore(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        if not set(facts) <= set(SELECTORS):
            raise ValueError("its choice of a checkpoint is none that there is")
        self.best = {name: (int(cycle), float(score)) for name, (cycle, score) in facts.items()}
        self.sum_NC = tensors["sum_NC"].numpy() if "sum_NC" in tensors else None
        self.kept_NC = tensors["kept_NC"].numpy() if "kept_NC" in tensors else None
