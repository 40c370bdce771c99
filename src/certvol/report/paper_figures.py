"""Write the figures of a report for papers, as PNG and SVG files."""

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from certvol.data import Indices
from certvol.data.folders import printable
from certvol.errors import UserError
from certvol.files import write_atomically
from certvol.report.charts import Axis, Bars, Chart, Lines, Matrix, Reliability
from certvol.report.comparison import comparison_figures, name_runs
from certvol.report.embedding import Points, embed
from certvol.report.figures import measure_title, run_figures
from certvol.report.records import Record

Draw = Callable[[Any], None]
_COLOURS = ("#d0691d", "#2f6fb0", "#2d8659", "#8a5bb5", "#b83f6d", "#8a7a1f", "#3d9aa8", "#7a6a5d")
_GREY = "#5a6472"
_ROLES = {"source": _COLOURS[1], "target": _COLOURS[0], "plain": _GREY}
_MOST_IN_LEGEND = 20  # classes
_UNDATED: dict[str, Any] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e7e8ea",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "certvol",  # the same figure, the same bytes
    "text.usetex": False,
    "text.parse_math": False,  # a `$` in a class name is just a dollar sign
}


def write_run_figures(record: Record, folder: Path) -> list[Path]:
    """Write every figure of a run's page and its t-SNE layouts into `folder`."""
    charts = [chart for charts in run_figures(record).values() for chart in charts]
    drawings = {chart.id: (_size(chart), partial(_draw, chart)) for chart in charts}
    if record.features is not None and record.images is not None:
        found = embed(record.features)
        sides = {"pretrained": found.pretrained_n2, "adapted": found.adapted_n2}
        labelled = ["label"] if record.images.true_N is not None else []
        for side, by in product(sides, ["prediction", "certainty", *labelled]):
            if (points_n2 := sides[side]) is not None:
                draw = partial(_scatter, record, found.rows_n, points_n2, by)
                drawings[f"features-{side}-{by}"] = ((4.2, 3.2), draw)
    return write_figures(drawings, folder)


def write_comparison_figures(records: Sequence[Record], folder: Path) -> list[Path]:
    charts = comparison_figures(name_runs(records))
    return write_figures(
        {chart.id: (_size(chart), partial(_draw, chart)) for chart in charts}, folder
    )


def write_figures(
    drawings: Mapping[str, tuple[tuple[float, float], Draw]],
    folder: Path,
    formats: Sequence[str] = ("png", "svg"),
) -> list[Path]:
    """Write `folder`/<name>.<format>; a drawing has a size in inches and a function of axes."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context(_STYLE):
            for name, (size, draw) in drawings.items():
                figure = Figure(figsize=size, layout="constrained")
                FigureCanvasAgg(figure)
                draw(figure.subplots())
                for kind in formats:
                    data = io.BytesIO()
                    figure.savefig(data, format=kind, dpi=300, metadata=_UNDATED[kind])
                    written.append(folder / f"{name}.{kind}")
                    write_atomically(written[-1], data.getvalue())
    except OSError as error:
        place = printable(str(folder))
        raise UserError(f"cannot write figures into {place}: {error.strerror}") from None
    return written


def _size(chart: Chart) -> tuple[float, float]:
    """Return width and height in inches."""
    if isinstance(chart, Bars):
        thickness = 1.0 if chart.dots else max(1.0, 0.8 * len(chart.series))
        return 4.4, max(1.6, 0.22 * len(chart.labels) * thickness + 0.9)
    if isinstance(chart, Matrix):
        side = min(12.0, max(3.2, 0.22 * len(chart.labels) + 1.4))
        return side, side
    if isinstance(chart, Lines) and len(chart.lines) > 3:
        return 6.2, 2.8  # the legend is beside the lines
    return (3.4, 3.2) if isinstance(chart, Reliability) else (4.4, 2.8)


def _colour(role: str) -> str:
    return _COLOURS[int(role) % len(_COLOURS)] if role.isdigit() else _ROLES[role]


def _short(text: str, most: int = 32) -> str:
    text = printable(text)
    return text if len(text) <= most else text[: most - 1] + "…"


def _label(axis: Any, about: Axis) -> None:
    from matplotlib.ticker import PercentFormatter

    axis.set_label_text(about.label)
    if about.percent:
        axis.set_major_formatter(PercentFormatter(1.0, decimals=None))


def _draw(chart: Chart, axes: Any) -> None:
    match chart:
        case Lines():
            _lines(axes, chart)
        case Bars():
            _bars(axes, chart)
        case Matrix():
            _matrix(axes, chart)
        case Reliability():
            _reliability(axes, chart)


def _lines(axes: Any, chart: Lines) -> None:
    for line in chart.lines:
        look = {"linestyle": "--" if line.dashed else "-", "linewidth": 1.3}
        axes.plot(line.xs, line.ys, color=_colour(line.role), label=_short(line.name), **look)
    for mark in chart.marks:
        axes.axvline(mark.x, color=_GREY, linestyle=":", linewidth=1)
        at = {"transform": axes.get_xaxis_transform(), "va": "bottom"}
        axes.text(mark.x, 1.0, f" {mark.label}", fontsize=8, color=_GREY, **at)
    _label(axes.xaxis, chart.x)
    _label(axes.yaxis, chart.y)
    axes.set_ylim(bottom=chart.y.low, top=chart.y.high)
    if len(chart.lines) > 3:
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    elif len(chart.lines) > 1:
        axes.legend(fontsize=8)


def _bars(axes: Any, chart: Bars) -> None:
    places = np.arange(len(chart.labels))
    thick = 0.8 / len(chart.series)
    for i, series in enumerate(chart.series):
        values = np.array(series.values, dtype=float)  # None becomes nan, which is not drawn
        look = {"color": _colour(series.role), "label": _short(series.name)}
        if chart.dots:
            axes.plot(values, places, "o", markersize=4.5, **look)
        else:
            axes.barh(places - 0.4 + thick * (i + 0.5), values, height=thick * 0.95, **look)
    axes.set_yticks(places, [_short(label) for label in chart.labels])
    axes.invert_yaxis()
    _label(axes.xaxis, chart.x)
    low, high = chart.x.low or 0.0, chart.x.high or 1.0
    axes.set_xlim(low, high + 0.02 * (high - low))  # the last dot is whole
    axes.grid(axis="y", visible=False)
    if len(chart.series) > 1:
        axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)


def _matrix(axes: Any, chart: Matrix) -> None:
    count = len(chart.labels)
    share_CC = np.zeros((count, count))
    for true, predicted, images in chart.cells:
        share_CC[true, predicted] = images / chart.totals[true]
    axes.imshow(share_CC, cmap="Blues", vmin=0, vmax=1)
    axes.grid(visible=False)
    axes.set(xlabel="predicted", ylabel="true")
    if count <= 70:
        labels = [_short(label, 18) for label in chart.labels]
        axes.set_xticks(range(count), labels, rotation=90, fontsize=7)
        axes.set_yticks(range(count), labels, fontsize=7)
    for true, predicted, images in chart.cells if count <= 20 else ():
        look = {"color": "white" if share_CC[true, predicted] > 0.55 else "black", "fontsize": 6.5}
        axes.text(predicted, true, str(images), ha="center", va="center", **look)


def _reliability(axes: Any, chart: Reliability) -> None:
    lows, highs = [bin.low for bin in chart.bins], [bin.high for bin in chart.bins]
    accuracies = [bin.accuracy for bin in chart.bins]
    look = {"color": _ROLES["source"], "edgecolor": "white"}
    axes.bar(lows, accuracies, np.subtract(highs, lows), align="edge", **look)
    axes.plot([0, 1], [0, 1], ":", color=_GREY, linewidth=1)
    axes.set(xlabel="largest probability", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))


def _scatter(record: Record, rows_n: Indices, points_n2: Points, by: str, axes: Any) -> None:
    import matplotlib

    images = record.images
    assert images is not None
    if by == "certainty":
        values_n = images.measures[record.certainty][rows_n]
        drawn = axes.scatter(*points_n2.T, s=3, c=values_n, cmap="viridis", linewidths=0)
        axes.figure.colorbar(drawn, ax=axes, label=measure_title(record.certainty))
    else:
        labels_N = images.true_N if by == "label" else images.predicted_N
        assert labels_N is not None
        for label in np.unique(labels_N[rows_n]):
            colour = matplotlib.colormaps["tab20"](int(label) % 20)
            chosen_n2 = points_n2[labels_N[rows_n] == label]
            name = _short(record.classes[label], 18)
            axes.scatter(*chosen_n2.T, s=3, color=colour, linewidths=0, label=name)
        if len(record.classes) <= _MOST_IN_LEGEND:
            axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), markerscale=3)
    axes.set(xticks=[], yticks=[])
    axes.set_aspect("equal")
    axes.spines[:].set_visible(False)
