"""Declare a setting: default, range and help in one expression.

    batch_size: int = setting(128, at_least=4, help="Images per step, source and target together.")

The command line, the range checks, the comments in `config.yaml` and the settings page of the
documentation all read these declarations. The choices of a `Literal` are read from its type.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

LARGEST_INT, LARGEST_FLOAT = 2**62, 1e30  # of settings without a limit of their own


@dataclass(frozen=True)
class Range:
    """The range of a number; it excludes `above` and `below`, includes `at_least` and `at_most`."""

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None

    def fault(self, value: float) -> str | None:
        """Describe what the value should be; None if it is within the range.

        NaN is outside every range.
        """
        if self.above is not None and not value > self.above:
            return f"should be above {self.above:g}"
        if self.at_least is not None and not value >= self.at_least:
            if self.at_least == 0:
                return "should not be negative"
            return f"should be {self.at_least:g} or more"
        if self.below is not None and not value < self.below:
            return f"should be below {self.below:g}"
        if self.at_most is not None and not value <= self.at_most:
            return f"should be at most {self.at_most:g}"
        return None

    def __str__(self) -> str:
        limits = {">": self.above, ">=": self.at_least, "<": self.below, "<=": self.at_most}
        return ", ".join(f"{sign} {limit:g}" for sign, limit in limits.items() if limit is not None)


def setting(default: Any, *, help: str, affects_result: bool = True, **limits: float) -> Any:
    """Declare a field of a settings dataclass; `limits` are those of a `Range`.

    `affects_result` is False for places (what lies there is compared itself), speed, and what is
    written besides the results: two runs that differ only in these are the same experiment.
    """
    metadata = {"help": help, "range": Range(**limits), "affects_result": affects_result}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Setting:
    """A declared setting, in the form that tables and checks need."""

    name: str
    kind: Any
    default: Any
    help: str = ""
    range: Range = field(default_factory=Range)
    affects_result: bool = True

    @property
    def choices(self) -> tuple[Any, ...]:
        """The allowed values of a `Literal`; empty for other types."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def allowed(self) -> str:
        """The choices or the range as text; empty if there is no limit."""
        return ", ".join(map(str, self.choices)) or str(self.range)

    def fault(self, value: Any) -> str | None:
        """Describe what a number should be; None if it is within its range."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        largest = LARGEST_INT if isinstance(value, int) else LARGEST_FLOAT
        return self.range.fault(value) or Range(at_most=largest).fault(value)


def settings_of(section: Any) -> Iterator[Setting]:
    """Yield the settings that a section's dataclass, or an instance of it, declares."""
    for each in dataclasses.fields(section):
        yield Setting(each.name, each.type, each.default, **each.metadata)


def settings_by_name(sections: Mapping[str, Any]) -> dict[str, Setting]:
    """Return the settings of all sections by their full names, such as `training.cycles`."""
    return {
        f"{section}.{each.name}": each
        for section, cls in sections.items()
        for each in settings_of(cls)
    }
