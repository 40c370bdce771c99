"""Describe the charts of a report as plain data.

assets/charts.js draws them on the page, paper_figures.py for papers. A chart without content is
left out.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import numpy as np

from certvol.progress import percent

Table = tuple[list[str], list[list[str]]]
_TABLE_ROWS = 24
_MOST_POINTS = 1500  # per line


@dataclass(frozen=True, kw_only=True)
class Chart:
    kind: ClassVar[str]
    id: str
    title: str
    caption: str

    @property
    def empty(self) -> bool:
        return not self.table()[1]

    def table(self) -> Table:
        """Return head and rows of a table of the chart's numbers, for screen readers."""
        raise NotImplementedError

    def data(self) -> dict[str, Any]:
        """Return what assets/charts.js draws."""
        return {"kind": self.kind, **asdict(self)}


@dataclass(frozen=True)
class Axis:
    label: str
    percent: bool = False
    low: float | None = None
    high: float | None = None
    """None to fit the data."""
    decimals: int | None = None
    """None for as many as each value needs."""

    def text(self, value: float | None) -> str:
        if value is None:
            return "–"
        if self.percent:
            return f"{percent(value)} %"
        return f"{value:,.4g}" if self.decimals is None else f"{value:z,.{self.decimals}f}"


@dataclass(frozen=True)
class Line:
    name: str
    role: str
    """The colour: source, target, plain, or 0, 1, 2 ..."""
    xs: list[float]
    """Ascending."""
    ys: list[float]
    dashed: bool = False


def line(name: str, role: str, points: Iterable[tuple[float | None, float | None]]) -> Line:
    """Leave out unknown points and thin out the rest."""
    known = [(x, y) for x, y in points if x is not None and y is not None]
    kept = [known[i] for i in evenly_spread(len(known), _MOST_POINTS)]
    return Line(name, role, [x for x, _ in kept], [y for _, y in kept])


def evenly_spread(count: int, most: int) -> list[int]:
    """Return at most `most` of `count` positions, the first and the last among them."""
    return [int(i) for i in np.linspace(0, count - 1, min(count, most)).round()]


@dataclass(frozen=True)
class Mark:
    """A vertical line with a label."""

    x: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Lines(Chart):
    kind: ClassVar[str] = "lines"
    x: Axis
    y: Axis
    lines: list[Line]
    """Lines of fewer than two points are dropped."""
    marks: list[Mark] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lines[:] = [line for line in self.lines if len(line.xs) > 1]

    def table(self) -> Table:
        xs = max((line.xs for line in self.lines), key=len, default=[])
        values = [dict(zip(line.xs, line.ys, strict=True)) for line in self.lines]
        rows = [
            [self.x.text(xs[i]), *(self.y.text(known.get(xs[i])) for known in values)]
            for i in evenly_spread(len(xs), _TABLE_ROWS)
        ]
        return [self.x.label, *(line.name for line in self.lines)], rows


@dataclass(frozen=True)
class Series:
    name: str
    role: str
    values: list[float | None]


@dataclass(frozen=True, kw_only=True)
class Bars(Chart):
    """A group per label, with a bar (or, as dots, a point) per series."""

    kind: ClassVar[str] = "bars"
    labels: list[str]
    label_head: str
    """The kind of things that the labels name."""
    series: list[Series]
    x: Axis
    """The axis of the values, with both ends given."""
    dots: bool = False

    def table(self) -> Table:
        rows = [
            [label, *(self.x.text(series.values[i]) for series in self.series)]
            for i, label in enumerate(self.labels)
        ]
        return [self.label_head, *(series.name for series in self.series)], rows


@dataclass(frozen=True, kw_only=True)
class Matrix(Chart):
    kind: ClassVar[str] = "matrix"
    labels: list[str]
    cells: list[tuple[int, int, int]]
    """(true class, predicted class, images), without empty cells."""
    totals: list[int]
    """The number of images of each true class."""

    @property
    def empty(self) -> bool:
        return not self.labels

    def table(self) -> Table:
        """List the ten most frequent confusions."""
        confusions = sorted((-images, i, j) for i, j, images in self.cells if i != j)[:10]
        rows = [
            [self.labels[i], self.labels[j], f"{-n:,}", f"{percent(-n / self.totals[i])} %"]
            for n, i, j in confusions
        ]
        return ["true class", "predicted as", "images", "share of the class"], rows


@dataclass(frozen=True)
class ReliabilityBin:
    """The images whose largest probability lies between `low` and `high`."""

    low: float
    high: float
    confidence: float
    accuracy: float
    images: float


@dataclass(frozen=True, kw_only=True)
class Reliability(Chart):
    kind: ClassVar[str] = "reliability"
    bins: list[ReliabilityBin]
    """The bins that are not empty."""

    def table(self) -> Table:
        rows = [
            [
                f"{bin.low:.2f} to {bin.high:.2f}",
                f"{bin.images:,.0f}",
                f"{percent(bin.confidence)} %",
                f"{percent(bin.accuracy)} %",
            ]
            for bin in self.bins
        ]
        return ["probability", "images", "mean probability", "accuracy"], rows
