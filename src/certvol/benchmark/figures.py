"""A figure per varied setting: accuracy against its values, with the deviation over seeds."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from certvol.benchmark.plan import Variant
from certvol.benchmark.results import DONE, Result
from certvol.benchmark.tables import mean_and_deviation


def draw_ablations(
    folder: Path, variants: Sequence[Variant], results: Sequence[Result], tasks: Sequence[str], settings: Sequence[str]
) -> list[Path]:
    """`folder`/<setting>.png and .pdf of each of `settings`; nothing for one without a finished run."""
    drawn: list[Path] = []
    for setting in settings:
        lines = ablation_lines(variants, results, tasks, setting)
        if lines:
            folder.mkdir(parents=True, exist_ok=True)
            drawn += _draw(folder, setting, lines)
    return drawn


Point = tuple[str, float, float]  # value of the setting, mean, deviation


def ablation_lines(
    variants: Sequence[Variant], results: Sequence[Result], tasks: Sequence[str], setting: str
) -> dict[str, list[Point]]:
    """Per method, in the order of the values given: mean over tasks of a seed, then mean and deviation over seeds."""
    lines: dict[str, list[Point]] = {}
    for variant in variants:
        if not variant.settings or variant.settings[-1][0] != setting:
            continue
        own = [r for r in results if r.method == variant.label and r.status == DONE and r.last is not None]
        per_seed = []
        for seed in sorted({r.seed for r in own}):
            values = [r.last for r in own if r.seed == seed and r.task in tasks and r.last is not None]
            if len(values) == len(tasks):
                per_seed.append(statistics.fmean(values))
        if per_seed:
            cell = mean_and_deviation(per_seed)
            name = Variant(variant.method, variant.settings[:-1]).label
            lines.setdefault(name, []).append((variant.settings[-1][1], cell.mean or 0.0, cell.deviation or 0.0))
    return lines


def _draw(folder: Path, setting: str, lines: dict[str, list[Point]]) -> list[Path]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    values = list(dict.fromkeys(value for points in lines.values() for value, _, _ in points))
    for name, points in lines.items():
        places = [values.index(value) for value, _, _ in points]
        means = [100 * mean for _, mean, _ in points]
        axes.errorbar(places, means, [100 * d for _, _, d in points], marker="o", capsize=3, label=name)
    axes.set_xticks(range(len(values)), values)
    axes.set_xlabel(setting)
    axes.set_ylabel("target accuracy, %")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(frameon=False)
    paths = [folder / f"{setting}.{kind}" for kind in ("png", "pdf")]
    for path in paths:
        # No dates inside: the same runs give the same file.
        figure.savefig(path, dpi=200, metadata={"CreationDate": None} if path.suffix == ".pdf" else {"Software": None})
    return paths
