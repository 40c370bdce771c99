"""Where a run stands, and what it delivers."""

from dataclasses import dataclass, field
from typing import Literal

from certvol.nn import norm


@dataclass
class Position:
    """Where a run stands. `cycle` and `step` count what is done: of the phase, and of the cycle under way."""

    phase: Literal["pretrain", "trial", "adapt", "done"] = "pretrain"
    mode: norm.Mode = "mixed"
    cycle: int = 0
    step: int = 0
    trial: str | None = None
    """The normalisation mode on trial."""
    trial_scores: dict[str, float | None] = field(default_factory=dict)
    """Of each normalisation mode tried; None where it collapsed."""
    collapse: list[str] = field(default_factory=list)
    """Signs in words, where the guard ended adaptation."""


@dataclass(frozen=True)
class Delivery:
    """Which model a run delivers, and why. `mode` is the normalisation it predicts with."""

    model: str
    why: str
    mode: norm.Mode
