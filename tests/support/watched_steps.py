"""Look at every optimiser step of a run before it is taken."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from certvol.data.batches import CyclePlan
from certvol.training.step import Stepper


@dataclass(frozen=True)
class Step:
    """The arguments of `Stepper.step`."""

    plan: CyclePlan
    index: int
    place: int
    progress: float
    adapting: bool
    rate: float


def watch_steps(monkeypatch: pytest.MonkeyPatch, look: Callable[[Stepper, Step], None]) -> None:
    """Call `look` before every step."""
    step = Stepper.step

    def watched(self: Stepper, *given: Any) -> Any:
        look(self, Step(*given))
        return step(self, *given)

    monkeypatch.setattr(Stepper, "step", watched)
