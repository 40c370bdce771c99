"""The range of a setting, beside its default: `weight: float = bounded(1.0, least=0)`."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Bounds:
    above: float | None = None
    least: float | None = None
    below: float | None = None
    most: float | None = None

    def fault(self, value: float) -> str | None:
        """In words what it should be; None where it is. Nothing is within bounds that is no number."""
        if self.above is not None and not value > self.above:
            return f"should be above {self.above:g}"
        if self.least is not None and not value >= self.least:
            return "should not be negative" if self.least == 0 else f"should be {self.least:g} or more"
        if self.below is not None and not value < self.below:
            return f"should be below {self.below:g}"
        if self.most is not None and not value <= self.most:
            return f"should be at most {self.most:g}"
        return None


def bounded(
    default: Number,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float | None = None,
) -> Number:
    """A field of a dataclass. `above` and `below` are outside the range, `least` and `most` inside."""
    return field(default=default, metadata={"bounds": Bounds(above, least, below, most)})


def bounds_of(settings: Any) -> Iterator[tuple[str, Bounds]]:
    """By field, of a dataclass or an instance of one."""
    for each in dataclasses.fields(settings):
        if "bounds" in each.metadata:
            yield each.name, each.metadata["bounds"]
