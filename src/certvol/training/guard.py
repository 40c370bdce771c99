"""The collapse guard: watches label-free scores per cycle, and remembers the best healthy one."""

from dataclasses import dataclass, field
from typing import Any

from certvol.config import GuardConfig
from certvol.selection import signs_of_collapse

Scores = dict[str, float | None]
GUARDS_SCORE = "mutual_information"


@dataclass
class Guard:
    config: GuardConfig
    pretrained: Scores = field(default_factory=dict)
    """Scores of the model that adaptation starts from."""
    last: Scores = field(default_factory=dict)
    """Scores of the newest cycle."""
    collapsed_in_a_row: int = 0
    best_cycle: int | None = None
    best_score: float = float("-inf")

    def start(self, pretrained: Scores) -> None:
        self.pretrained, self.last, self.collapsed_in_a_row = pretrained, pretrained, 0
        self.best_cycle, self.best_score = None, float("-inf")

    def look(self, cycle: int, scores: Scores) -> tuple[list[str], bool]:
        """(signs of collapse in words, whether this is the best healthy cycle so far)."""
        self.last = scores
        if signs := self.signs:
            self.collapsed_in_a_row += 1
            return signs, False
        self.collapsed_in_a_row = 0
        score = scores[GUARDS_SCORE]
        better = score is not None and score >= self.best_score  # among equals the newest, as with every score
        if better and score is not None:
            self.best_cycle, self.best_score = cycle, score
        return [], better

    @property
    def signs(self) -> list[str]:
        """Of collapse in the newest cycle, in words."""
        return signs_of_collapse(self.last, self.pretrained, self.config.spread, self.config.source_accuracy)

    @property
    def alarmed(self) -> bool:
        return self.collapsed_in_a_row >= self.config.patience

    def facts(self) -> dict[str, Any]:
        return {
            "pretrained": self.pretrained,
            "last": self.last,
            "collapsed_in_a_row": self.collapsed_in_a_row,
            "best_cycle": self.best_cycle,
            "best_score": self.best_score if self.best_cycle is not None else None,
        }

    def restore(self, facts: dict[str, Any]) -> None:
        self.pretrained, self.last = facts["pretrained"], facts["last"]
        self.collapsed_in_a_row = facts["collapsed_in_a_row"]
        self.best_cycle = facts["best_cycle"]
        self.best_score = float("-inf") if facts["best_score"] is None else facts["best_score"]
