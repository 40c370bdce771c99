"""How long a run will take, told once where that is hours on a CPU: few expect it, and there is a way that takes minutes."""

import time
from collections.abc import Callable

from certvol.reporting import Reporter

TIMED = 5  # steps, after a first one that also prepares
LONG = 3600.0  # seconds that are worth a word


class Pace:
    """`steps` are left to this run, as it starts or goes on; `pretrained`: its backbone has weights worth keeping as they are."""

    def __init__(
        self, steps: int, pretrained: bool, reporter: Reporter, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.steps, self.pretrained, self.reporter, self.clock = steps, pretrained, reporter, clock
        self.done, self.started = 0, 0.0

    def step(self) -> None:
        """After each step of training."""
        self.done += 1
        if self.done == 1:
            self.started = self.clock()
        elif self.done == 1 + TIMED:
            seconds = (self.clock() - self.started) / TIMED
            left = self.steps - self.done
            hours = seconds * left / 3600
            if seconds * left >= LONG:
                advice = (
                    ". `--model.train head` leaves the backbone as it is and takes minutes" if self.pretrained else ""
                )
                self.reporter.say(
                    f"a step takes {seconds:.1f} s on this CPU: at least {hours:.1f} hours for the {left:,} that are left{advice}"
                )
