"""Which model a run delivers when its adaptation is over, and why."""

from dataclasses import dataclass

from certvol.nn import norm
from certvol.training.choice import Choice
from certvol.training.guard import GUARDS_SCORE, Guard
from certvol.training.position import Position


@dataclass(frozen=True)
class Delivery:
    """`mode` is the normalisation that the model predicts with."""

    model: str
    """`last`, `cycle N` or `pretrained`."""
    why: str
    mode: norm.Mode


def decide(
    select: str, position: Position, guard: Guard, choice: Choice, of_source: norm.Mode
) -> tuple[Delivery, str | None]:
    """(what is delivered; of `cycle N` the score whose best weights it is).

    `select`: `last`, or the score that was asked to choose; `of_source`: the normalisation of the pretrained model.
    """
    last, mode = position.cycle, position.mode
    by_guard = select in ("last", GUARDS_SCORE)
    best = guard.best_cycle if by_guard else choice.best.get(select, (None,))[0]
    if not position.collapse:
        if select == "last" or best in (None, last):
            return Delivery("last", f"cycle {last}, the last one", mode), None
        return Delivery(f"cycle {best}", f"the best of {last} cycles by {select}", mode), select
    collapsed = f"adaptation collapsed at cycle {last} ({'; '.join(position.collapse)})"
    if best is None:
        return Delivery("pretrained", f"{collapsed} and no cycle was healthy", of_source), None
    delivery = Delivery(f"cycle {best}", f"{collapsed}; this is cycle {best}, the best before", mode)
    return delivery, GUARDS_SCORE if by_guard else select
