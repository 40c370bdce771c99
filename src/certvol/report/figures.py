"""The figures of a report as plain data, from what runs wrote. charts.js draws them on the page, papers.py for print.

A function gives None where a run has not what its figure needs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from certvol.report.records import LABELLED_MEASURES, MEASURES, Record, number, numbers, section

Cell = str
_MOST_POINTS = 1500  # of a line
_TABLE_ROWS = 24
_LOSSES = {
    "loss": "total",
    "ce": "cross-entropy",
    "samples_ce": "cross-entropy of the samples",
    "antagonistic": "antagonistic",
}
_NOT_LOSSES = {"phase", "cycle", "step", "lr"}


@dataclass(frozen=True, kw_only=True)
class Figure:
    kind: ClassVar[str]
    id: str
    title: str
    caption: str

    def table(self) -> tuple[list[Cell], list[list[Cell]]]:
        """What the figure shows, in words and figures: for screen readers, and for whoever wants the numbers."""
        raise NotImplementedError


@dataclass(frozen=True)
class Line:
    name: str
    xs: list[float]
    ys: list[float | None]
    role: str
    """Which colour: source, target, plain, or 0, 1, 2 ..."""
    dashed: bool = False


@dataclass(frozen=True)
class Mark:
    x: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Lines(Figure):
    kind: ClassVar[str] = "lines"
    x_label: str
    y_label: str
    lines: list[Line]
    marks: list[Mark]
    x_percent: bool = False
    y_percent: bool = False
    low: float | None = None
    high: float | None = None
    """None: as the data asks."""

    def table(self) -> tuple[list[Cell], list[list[Cell]]]:
        longest = max(self.lines, key=lambda line: len(line.xs))
        chosen = sorted({round(i) for i in np.linspace(0, len(longest.xs) - 1, _TABLE_ROWS)})
        rows = []
        for i in chosen:
            x = longest.xs[i]
            cells = [_at(line, x) for line in self.lines]
            rows.append([_text(x, self.x_percent), *(_text(cell, self.y_percent) for cell in cells)])
        return [self.x_label, *(line.name for line in self.lines)], rows


@dataclass(frozen=True)
class Series:
    name: str
    values: list[float | None]
    role: str


@dataclass(frozen=True, kw_only=True)
class Bars(Figure):
    """A group per label, a bar (or, as dots, a point) per series."""

    kind: ClassVar[str] = "bars"
    labels: list[str]
    series: list[Series]
    x_label: str
    low: float
    high: float
    percent: bool = False
    dots: bool = False
    what: str = ""
    """What a label names."""
    decimals: int | None = None
    """Of all values; None: as many as each asks."""

    def table(self) -> tuple[list[Cell], list[list[Cell]]]:
        rows = [
            [label, *(_text(series.values[i], self.percent, self.decimals) for series in self.series)]
            for i, label in enumerate(self.labels)
        ]
        return [self.what, *(series.name for series in self.series)], rows


@dataclass(frozen=True, kw_only=True)
class Matrix(Figure):
    kind: ClassVar[str] = "matrix"
    labels: list[str]
    cells: list[tuple[int, int, int]]
    """(true class, predicted class, images), those with images alone."""
    totals: list[int]
    """Images of each true class."""

    def confusions(self, most: int = 10) -> list[tuple[int, int, int]]:
        wrong = [cell for cell in self.cells if cell[0] != cell[1]]
        return sorted(wrong, key=lambda cell: (-cell[2], cell[0], cell[1]))[:most]

    def table(self) -> tuple[list[Cell], list[list[Cell]]]:
        rows = [
            [self.labels[true], self.labels[predicted], f"{count:,}", _text(count / max(1, self.totals[true]), True)]
            for true, predicted, count in self.confusions()
        ]
        return ["true class", "taken for", "images", "of the class"], rows


@dataclass(frozen=True)
class Bin:
    low: float
    high: float
    confidence: float | None
    accuracy: float | None
    images: int


@dataclass(frozen=True, kw_only=True)
class Reliability(Figure):
    kind: ClassVar[str] = "reliability"
    bins: list[Bin]

    def table(self) -> tuple[list[Cell], list[list[Cell]]]:
        rows = [
            [
                f"{bin.low:.2f} to {bin.high:.2f}",
                f"{bin.images:,}",
                _text(bin.confidence, True),
                _text(bin.accuracy, True),
            ]
            for bin in self.bins
            if bin.images
        ]
        return ["probability", "images", "mean probability", "accuracy"], rows


def _text(value: float | None, percent: bool = False, decimals: int | None = None) -> str:
    if value is None:
        return "–"
    if percent:
        return f"{100 * value:.1f} %"
    return f"{value:,.4g}" if decimals is None else f"{value:z,.{decimals}f}"


def _at(line: Line, x: float) -> float | None:
    place = int(np.searchsorted(line.xs, x))
    return line.ys[place] if place < len(line.xs) and line.xs[place] == x else None


def _thinned(xs: Sequence[float], ys: Sequence[float | None]) -> tuple[list[float], list[float | None]]:
    if len(xs) <= _MOST_POINTS:
        return list(xs), list(ys)
    chosen = sorted({round(i) for i in np.linspace(0, len(xs) - 1, _MOST_POINTS)})
    return [xs[i] for i in chosen], [ys[i] for i in chosen]


def _steps(record: Record) -> tuple[list[float], float | None]:
    """Steps of both phases on one axis, and where the second begins; None where there is but one phase."""
    phases = [str(line.get("phase")) for line in record.history]
    steps = [number(line.get("step")) or 0.0 for line in record.history]
    pretrained = max((s for s, phase in zip(steps, phases, strict=True) if phase == "pretrain"), default=0.0)
    xs = [s + (pretrained if phase == "adapt" else 0.0) for s, phase in zip(steps, phases, strict=True)]
    return xs, pretrained if "adapt" in phases and "pretrain" in phases else None


def _switch(at: float | None) -> list[Mark]:
    return [] if at is None else [Mark(at, "adaptation begins")]


def _history_line(record: Record, key: str, name: str, role: str) -> Line | None:
    xs, _ = _steps(record)
    found = [
        (x, value) for x, line in zip(xs, record.history, strict=True) if (value := number(line.get(key))) is not None
    ]
    if len(found) < 2:
        return None
    return Line(name, *_thinned([x for x, _ in found], [y for _, y in found]), role)


def sigma_over_time(record: Record) -> Lines | None:
    """The paper's figures 3a and b."""
    pairs = (("sigma_source", "source", "source"), ("sigma_target", "target", "target"))
    lines = [line for pair in pairs if (line := _history_line(record, *pair)) is not None]
    if not lines:
        return None
    return Lines(
        id="sigma",
        title="Sigma over time",
        caption="Median sigma of the images in a batch, by domain. Sigma is the certainty: it grows while the model learns.",
        x_label="training step",
        y_label="median sigma",
        lines=lines,
        marks=_switch(_steps(record)[1]),
        low=0.0,
    )


def losses(record: Record) -> Lines | None:
    names = dict.fromkeys(
        key for line in record.history for key in line if key not in _NOT_LOSSES and not key.startswith("sigma_")
    )
    if "loss" in names and len(names) == 2:
        del names["loss"]  # the sum of one term
    found = [
        _history_line(record, name, _LOSSES.get(name, name), "plain" if name == "loss" else str(i))
        for i, name in enumerate(names)
    ]
    lines = [line for line in found if line is not None]
    if not lines:
        return None
    lowest = min(y for line in lines for y in line.ys if y is not None)
    return Lines(
        id="losses",
        title="Losses",
        caption="Each term of the loss, and their weighted sum where there are several.",
        x_label="training step",
        y_label="loss",
        lines=lines,
        marks=_switch(_steps(record)[1]),
        low=0.0 if lowest >= 0 else None,
    )


def learning_rate(record: Record) -> Lines | None:
    line = _history_line(record, "lr", "learning rate", "plain")
    if line is None:
        return None
    return Lines(
        id="learning-rate",
        title="Learning rate",
        caption="As the schedule set it.",
        x_label="training step",
        y_label="learning rate",
        lines=[line],
        marks=_switch(_steps(record)[1]),
        low=0.0,
    )


def health(record: Record) -> Lines | None:
    """Label-free scores per cycle: what the collapse guard watches."""
    lines = []
    count = max(len(record.classes), 1)
    for key, name, role, scale in (
        ("source_accuracy", "accuracy on held-out source", "source", 1.0),
        ("agreement_with_pretrained", "agreement with the pretrained model", "target", 1.0),
        ("classes_in_use", "classes in use, of all", "plain", 1.0 / count),
    ):
        found = [
            (cycle, value * scale)
            for line in record.scores
            if (cycle := number(line.get("cycle"))) is not None and (value := number(line.get(key))) is not None
        ]
        if len(found) > 1:
            lines.append(Line(name, *_thinned([x for x, _ in found], [y for _, y in found]), role))
    if not lines:
        return None
    return Lines(
        id="health",
        title="Signs of health",
        caption="Per cycle, without target labels: what the collapse guard watches.",
        x_label="cycle",
        y_label="share",
        lines=lines,
        marks=[],
        y_percent=True,
        low=0.0,
        high=1.0,
    )


def per_class(record: Record) -> Bars | None:
    if record.metrics is None:
        return None
    before, after = (section(record.metrics, key, "per_class") for key in ("source_only", "adapted"))
    names = sorted(
        (name for name in after if number(after[name]) is not None), key=lambda name: (number(after[name]) or 0.0, name)
    )
    if not names:
        return None
    only = section(record.metrics, "delivered").get("model") == "pretrained"
    series = [Series("source only", [number(before.get(name)) for name in names], "source")]
    if not only:
        series.append(Series("adapted", [number(after[name]) for name in names], "target"))
    return Bars(
        id="per-class",
        title="Accuracy per class",
        caption="The classes the delivered model finds hardest come first.",
        labels=names,
        series=series,
        x_label="accuracy",
        low=0.0,
        high=1.0,
        percent=True,
        dots=True,
        what="class",
    )


def confusion(record: Record) -> Matrix | None:
    found = section(record.evaluation, "confusion")
    labels, counts = found.get("classes"), found.get("counts")
    if not isinstance(labels, list) or not isinstance(counts, list) or not labels:
        return None
    rows = [numbers(row) for row in counts]
    if len(rows) != len(labels) or any(len(row) != len(labels) for row in rows):
        return None
    cells = [(i, j, int(count)) for i, row in enumerate(rows) for j, count in enumerate(row) if count]
    return Matrix(
        id="confusion",
        title="Confusion matrix",
        caption="Rows are true classes, columns predicted ones. On the diagonal a model is right.",
        labels=[str(label) for label in labels],
        cells=cells,
        totals=[int(sum(count or 0 for count in row)) for row in rows],
    )


def measure_title(name: str) -> str:
    return MEASURES[name].title if name in MEASURES else LABELLED_MEASURES.get(name, name)


def correlations(record: Record) -> Bars | None:
    """The paper's figure 3c."""
    found = section(record.evaluation, "correlations")
    kinds = [kind for kind in ("pearson", "spearman") if section(found, kind)]
    names = list(dict.fromkeys(name for kind in kinds for name in section(found, kind)))
    if not names:
        return None
    return Bars(
        id="correlations",
        title="Correlation with sigma",
        caption="How far sigma and other measures of certainty agree over the target images (the paper's figure 3c).",
        labels=[measure_title(name) for name in names],
        series=[
            Series(kind.capitalize(), [number(section(found, kind).get(name)) for name in names], str(i))
            for i, kind in enumerate(kinds)
        ],
        x_label="correlation",
        low=min(
            0.0, *(-1.0 for kind in kinds for name in names if (number(section(found, kind).get(name)) or 0) < 0), 0.0
        ),
        high=1.0,
        what="measure",
        decimals=2,
    )


def error_spotting(record: Record) -> Bars | None:
    found = section(record.evaluation, "auroc")
    kept = {
        name: value for name in found if (value := number(found[name])) is not None and name not in LABELLED_MEASURES
    }
    if not kept:
        return None
    names = sorted(kept, key=lambda name: -kept[name])
    return Bars(
        id="auroc",
        title="Which measure finds the errors",
        caption="Chance that a right prediction is rated more certain than a wrong one (AUROC); 50 % is guessing.",
        labels=[measure_title(name) for name in names],
        series=[Series("AUROC", [kept[name] for name in names], "target")],
        x_label="AUROC",
        low=0.0,
        high=1.0,
        percent=True,
        what="measure",
    )


def _risk_figure(lines: list[Line], caption: str) -> Lines | None:
    if not lines:
        return None
    return Lines(
        id="risk-coverage",
        title="Errors among accepted images",
        caption=caption,
        x_label="share of images accepted",
        y_label="share wrong",
        lines=lines,
        marks=[],
        x_percent=True,
        y_percent=True,
        low=0.0,
    )


def risk_coverage(record: Record) -> Lines | None:
    lines = []
    found = section(record.evaluation, "risk_coverage")
    for i, name in enumerate([name for name in MEASURES if name in found]):
        line = _risk_line(found[name], measure_title(name), str(i))
        if line is not None:
            lines.append(line)
    return _risk_figure(
        lines,
        "If only the most certain share of the images is accepted, this share of those is wrong. Lower is better.",
    )


def _risk_line(curve: Any, name: str, role: str) -> Line | None:
    xs, ys = numbers(section(curve).get("coverage")), numbers(section(curve).get("risk"))
    found = [(x, y) for x, y in zip(xs, ys, strict=False) if x is not None]
    if len(found) < 2:
        return None
    return Line(name, *_thinned([x for x, _ in found], [y for _, y in found]), role)


def reliability(record: Record) -> Reliability | None:
    bins = section(record.evaluation).get("reliability")
    if not isinstance(bins, list):
        return None
    parsed = [
        Bin(
            low=number(bin.get("lower")) or 0.0,
            high=number(bin.get("upper")) or 0.0,
            confidence=number(bin.get("confidence")),
            accuracy=number(bin.get("accuracy")),
            images=int(number(bin.get("images")) or 0),
        )
        for bin in map(section, bins)
    ]
    if not any(bin.images for bin in parsed):
        return None
    error = number(section(record.evaluation).get("ece"))
    spoken = "" if error is None else f" The expected calibration error is {100 * error:.1f} %."
    return Reliability(
        id="reliability",
        title="Reliability of the probability",
        caption=f"On the diagonal, 80 % means right in 80 of 100 cases. Darker bars hold more images.{spoken}",
        bins=parsed,
    )


def run_figures(record: Record) -> dict[str, Figure]:
    """All that there are, by id."""
    found = [
        make(record)
        for make in (
            risk_coverage,
            reliability,
            correlations,
            error_spotting,
            per_class,
            confusion,
            sigma_over_time,
            losses,
            learning_rate,
            health,
        )
    ]
    return {figure.id: figure for figure in found if figure is not None}


def compared_risk(records: Sequence[Record], names: Sequence[str]) -> Lines | None:
    """Each run by its own certainty: sigma, or the largest probability."""
    lines = []
    for i, (record, name) in enumerate(zip(records, names, strict=True)):
        found = section(record.evaluation, "risk_coverage")
        measure = "sigma" if "sigma" in found else "probability"
        line = _risk_line(found.get(measure), f"{name} ({measure})", str(i))
        if line is not None:
            lines.append(line)
    return _risk_figure(
        lines,
        "Each run by its own certainty: sigma, or the largest probability where a method has no sigma. Lower is better.",
    )


def compared_sigma(records: Sequence[Record], names: Sequence[str]) -> Lines | None:
    lines, marks = [], []
    for i, (record, name) in enumerate(zip(records, names, strict=True)):
        line = _history_line(record, "sigma_target", f"{name}, target", str(i))
        source = _history_line(record, "sigma_source", f"{name}, source", str(i))
        if line is not None:
            lines.append(line)
            marks += _switch(_steps(record)[1])
        if source is not None:
            lines.append(replace(source, dashed=True))
    if not lines:
        return None
    return Lines(
        id="sigma",
        title="Sigma over time",
        caption="Median sigma of the images in a batch, for the runs whose method has a sigma.",
        x_label="training step",
        y_label="median sigma",
        lines=lines,
        marks=list({mark.x: mark for mark in marks}.values())[:1],
        low=0.0,
    )


def compared_classes(records: Sequence[Record], names: Sequence[str]) -> Bars | None:
    found = [
        (str(i), name, section(r.metrics, "adapted", "per_class"))
        for i, (r, name) in enumerate(zip(records, names, strict=True))
    ]
    found = [entry for entry in found if entry[2]]
    if not found:
        return None
    classes = list(dict.fromkeys(label for _, _, values in found for label in values))

    def mean(label: str) -> float:
        values = [value for _, _, of in found if (value := number(of.get(label))) is not None]
        return sum(values) / len(values) if values else math.inf

    classes.sort(key=lambda label: (mean(label), label))
    return Bars(
        id="per-class",
        title="Accuracy per class",
        caption="Of the delivered model of each run; the classes that are hardest on average come first.",
        labels=classes,
        series=[Series(name, [number(values.get(label)) for label in classes], role) for role, name, values in found],
        x_label="accuracy",
        low=0.0,
        high=1.0,
        percent=True,
        dots=True,
        what="class",
    )


def compared_oscillation(records: Sequence[Record], names: Sequence[str]) -> Bars | None:
    found = [
        (name, value, number(section(record.evaluation, "oscillation").get("floor")))
        for record, name in zip(records, names, strict=True)
        if (value := number(section(record.evaluation, "oscillation").get("total"))) is not None
    ]
    if not found:
        return None
    return Bars(
        id="oscillation",
        title="Oscillation of the decision boundary",
        caption="How often the predicted class changes between two target images; the floor is the least there can be.",
        labels=[name for name, _, _ in found],
        series=[
            Series("oscillation", [value for _, value, _ in found], "target"),
            Series("floor", [floor for _, _, floor in found], "plain"),
        ],
        x_label="oscillation",
        low=0.0,
        high=max(1e-9, *(value for _, value, _ in found), 0.0) * 1.05,
        what="run",
    )


def comparison_figures(records: Sequence[Record], names: Sequence[str]) -> dict[str, Figure]:
    makers = (compared_risk, compared_sigma, compared_classes, compared_oscillation)
    return {figure.id: figure for make in makers if (figure := make(records, names)) is not None}
