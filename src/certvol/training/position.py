"""Where a run stands."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from certvol.nn import norm

PHASES = Literal["pretrain", "trial", "adapt", "done"]


@dataclass
class Position:
    """Where a run stands. `cycle` and `step` count what is done: of the phase, and of the cycle under way."""

    phase: PHASES = "pretrain"
    mode: norm.Mode = "mixed"
    cycle: int = 0
    step: int = 0
    trial: str | None = None
    """The normalisation mode on trial."""
    trial_scores: dict[str, float | None] = field(default_factory=dict)
    """Of each normalisation mode tried; None where it collapsed."""
    collapse: list[str] = field(default_factory=list)
    """Signs in words, where the guard ended adaptation."""

    def check(self) -> None:
        """ValueError where a file said what no run says. The modes become parts of paths."""
        modes = get_args(norm.Mode)
        counts = (self.cycle, self.step)
        if (
            self.phase not in get_args(PHASES)
            or self.mode not in modes
            or self.trial not in (None, *modes)
            or not all(isinstance(count, int) and count >= 0 for count in counts)
            or not isinstance(self.trial_scores, dict)
            or not all(isinstance(score, float | int | None) for score in self.trial_scores.values())
            or not isinstance(self.collapse, list)
        ):
            raise ValueError("its position is none that a run has")
