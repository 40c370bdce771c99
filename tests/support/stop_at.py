"""A stop request in the middle of a run."""

from certvol.progress import StopSignal


class StopAt(StopSignal):
    """Ask training to stop after its n-th step."""

    def __init__(self, step: int, number: int = 15) -> None:
        self.left, self.number = step, number

    def __call__(self) -> int | None:
        self.left -= 1
        return self.number if self.left == 0 else None
