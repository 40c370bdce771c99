"""Being asked to stop in the middle of a run."""

from certvol.stopping import StopSignal


class StopAt(StopSignal):
    """A stop signal at the n-th time it is asked: training asks after every step."""

    def __init__(self, step: int, number: int = 15) -> None:
        self.left, self.number = step, number

    def __call__(self) -> int | None:
        self.left -= 1
        return self.number if self.left == 0 else None
