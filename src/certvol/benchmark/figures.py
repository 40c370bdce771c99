"""Draw a figure per varied setting: accuracy over its values, with the deviation over seeds."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from certvol.benchmark.plan import Variant, parse_label
from certvol.benchmark.results import Result, means_of_seeds
from certvol.benchmark.suite import Suite
from certvol.benchmark.table_formats import Cell, mean_and_deviation
from certvol.report.paper_figures import write_figures


@dataclass(frozen=True)
class Ablation:
    """Accuracies for the values of one setting; a cell's count is its number of seeds."""

    setting: str
    values: list[str]
    lines: dict[str, dict[str, Cell]]
    """Method -> value -> accuracy."""


def draw_ablations(
    folder: Path,
    suite: Suite,
    results: Sequence[Result],
    tasks: Sequence[str],
    settings: Sequence[str],
) -> list[Path]:
    """Draw `folder`/<setting>.png and .pdf of each setting that has finished runs."""
    ablations = [read_ablation(results, tasks, setting) for setting in settings]
    drawings = {
        each.setting: ((5.0, 3.6), partial(_draw, each, suite, tasks))
        for each in ablations
        if each.lines
    }
    return write_figures(drawings, folder, ("png", "pdf")) if drawings else []


def read_ablation(results: Sequence[Result], tasks: Sequence[str], setting: str) -> Ablation:
    """Average tasks per seed, then seeds, of all runs whose last setting is `setting`."""
    lines: dict[str, dict[str, Cell]] = {}
    for label in sorted({result.method for result in results}):
        variant = parse_label(label)
        complete = means_of_seeds((run for run in results if run.method == label), tasks, "last")
        if complete and variant.settings and variant.settings[-1][0] == setting:
            name = Variant(variant.method, variant.settings[:-1]).label
            lines.setdefault(name, {})[variant.settings[-1][1]] = mean_and_deviation(complete)
    values = sorted({value for line in lines.values() for value in line})
    return Ablation(setting, sorted(values, key=float) if _are_numbers(values) else values, lines)


def _are_numbers(values: Sequence[str]) -> bool:
    try:
        return bool([float(value) for value in values])
    except ValueError:
        return False


def _draw(ablation: Ablation, suite: Suite, tasks: Sequence[str], axes: Any) -> None:
    """Space the values equally, so that neither 0.001 nor 256 crowds the others."""
    for name, line in ablation.lines.items():
        cells = [line.get(value, Cell()) for value in ablation.values]
        means = [float("nan") if cell.mean is None else 100 * cell.mean for cell in cells]
        bars = [100 * (cell.deviation or 0.0) for cell in cells]
        style = "-" if _are_numbers(ablation.values) else "none"
        axes.errorbar(range(len(cells)), means, bars, ls=style, marker="o", capsize=3, label=name)
    axes.set_xlim(-0.5, len(ablation.values) - 0.5)
    crowded = sum(map(len, ablation.values)) > 40
    axes.set_xticks(range(len(ablation.values)), ablation.values, rotation=90 * crowded)
    axes.set_xlabel(ablation.setting)
    axes.set_ylabel(f"{suite.metric.replace('_', ' ')} of the target, %")
    axes.set_title(title(ablation, suite, tasks), fontsize="small")
    axes.grid(axis="x", visible=False)
    axes.legend(fontsize="small")


def title(ablation: Ablation, suite: Suite, tasks: Sequence[str]) -> str:
    counts = [cell.count for line in ablation.lines.values() for cell in line.values()]
    least, most = min(counts), max(counts)
    seeds = f"{least} to {most}" if least < most else f"{most}"
    shown = " ".join(tasks) if len(tasks) <= 6 else f"mean of {len(tasks)} tasks"
    bars = "; bars: standard deviation over seeds" if most > 1 else ""
    text = f"{suite.name}, {shown}, {seeds} {'seed' if most == 1 else 'seeds'}{bars}"
    return textwrap.fill(text, 66, break_on_hyphens=False)
