"""A figure per varied setting: accuracy against its values, with the deviation over seeds."""

import math
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from certvol.benchmark.plan import Variant, variant_of
from certvol.benchmark.results import DONE, Result
from certvol.benchmark.suites import Suite
from certvol.benchmark.tables import mean_and_deviation


@dataclass(frozen=True)
class Point:
    value: str
    """Of the setting."""
    mean: float
    deviation: float | None
    seeds: int


def draw_ablations(
    folder: Path, suite: Suite, results: Sequence[Result], tasks: Sequence[str], settings: Sequence[str]
) -> list[Path]:
    """`folder`/<setting>.png and .pdf of each of `settings`; nothing for one without a finished run."""
    drawn: list[Path] = []
    for setting in settings:
        lines = ablation_lines(results, tasks, setting)
        if lines:
            folder.mkdir(parents=True, exist_ok=True)
            drawn += _draw(folder, setting, lines, suite, tasks)
    return drawn


def ablation_lines(results: Sequence[Result], tasks: Sequence[str], setting: str) -> dict[str, list[Point]]:
    """Per method, in the order of the values, of all runs whose last setting it is: mean over tasks of a seed, then mean and
    deviation over seeds."""
    done = [r for r in results if r.status == DONE and r.last is not None and r.task in tasks]
    lines: dict[str, list[Point]] = {}
    for label in dict.fromkeys(result.method for result in done):
        variant = variant_of(label)
        if not variant.settings or variant.settings[-1][0] != setting:
            continue
        per_seed = []
        for seed in sorted({r.seed for r in done if r.method == label}):
            values = [r.last for r in done if r.method == label and r.seed == seed and r.last is not None]
            if len(values) == len(tasks):
                per_seed.append(statistics.fmean(values))
        if per_seed:
            cell = mean_and_deviation(per_seed)
            name = Variant(variant.method, variant.settings[:-1]).label
            point = Point(variant.settings[-1][1], cell.mean or 0.0, cell.deviation, len(per_seed))
            lines.setdefault(name, []).append(point)
    order = sorted_values([point.value for points in lines.values() for point in points])
    return {name: sorted(points, key=lambda p: order.index(p.value)) for name, points in sorted(lines.items())}


def sorted_values(values: Sequence[str]) -> list[str]:
    """Each once; by their size where all are numbers."""
    once = list(dict.fromkeys(values))
    return sorted(once) if _numbers(once) is None else sorted(once, key=float)


def _numbers(values: Sequence[str]) -> list[float] | None:
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        return None
    return numbers if all(map(math.isfinite, numbers)) else None


def is_logarithmic(numbers: Sequence[float]) -> bool:
    """Whether a logarithmic axis keeps the closest two of these values, in rising order, further apart."""

    def closest(places: Sequence[float]) -> float:
        return min(b - a for a, b in pairwise(places)) / (places[-1] - places[0])

    return len(numbers) > 2 and numbers[0] > 0 and closest([math.log(n) for n in numbers]) > closest(numbers)


def _draw(folder: Path, setting: str, lines: dict[str, list[Point]], suite: Suite, tasks: Sequence[str]) -> list[Path]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    values = sorted_values([point.value for points in lines.values() for point in points])
    numbers = _numbers(values)
    places = dict(zip(values, range(len(values)) if numbers is None else numbers, strict=True))
    for name, points in lines.items():
        means, bars = [100 * p.mean for p in points], [100 * (p.deviation or 0.0) for p in points]
        joined = "none" if numbers is None else "-"  # between two words there is nothing
        axes.errorbar([places[p.value] for p in points], means, bars, ls=joined, marker="o", capsize=3, label=name)
    if numbers is None:
        axes.set_xlim(-0.5, len(values) - 0.5)
    elif is_logarithmic(numbers):
        axes.set_xscale("log")
    axes.set_xticks(list(places.values()), values)
    axes.set_xticks([], minor=True)
    axes.set_xlabel(setting)
    axes.set_ylabel(f"{suite.metric.replace('_', ' ')} of the target, %")
    axes.set_title(title(lines, suite, tasks), fontsize="small")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False, fontsize="small")
    _part_labels(figure, axes)
    paths = [folder / f"{setting}.{kind}" for kind in ("png", "pdf")]
    for path in paths:
        # No dates inside: the same runs give the same file.
        figure.savefig(path, dpi=200, metadata={"CreationDate": None} if path.suffix == ".pdf" else {"Software": None})
    return paths


def title(lines: dict[str, list[Point]], suite: Suite, tasks: Sequence[str]) -> str:
    seeds = [point.seeds for points in lines.values() for point in points]
    least, most = min(seeds), max(seeds)
    number = f"{most} {'seed' if most == 1 else 'seeds'}" if least == most else f"{least} to {most} seeds"
    shown = " ".join(tasks) if len(tasks) <= 6 else f"mean of {len(tasks)} tasks"
    bars = "; bars: standard deviation over seeds" if most > 1 else ""
    return textwrap.fill(f"{suite.name}, {shown}, {number}{bars}", 66, break_on_hyphens=False)


def _part_labels(figure: Any, axes: Any) -> None:
    """Upright where two of them would overlap."""
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in axes.get_xticklabels()]
    if any(one.padded(4).overlaps(other) for one, other in pairwise(boxes)):
        axes.tick_params(axis="x", rotation=90)
