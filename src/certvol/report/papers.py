"""The same figures for papers: PNG and SVG files by matplotlib."""

import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from certvol.data.folders import printable
from certvol.errors import UserError
from certvol.report.embedding import embed
from certvol.report.figures import Bars, Figure, Lines, Matrix, Reliability, comparison_figures, run_figures
from certvol.report.records import MEASURES, Record
from certvol.training.checkpoint import write_atomically

_COLOURS = ("#d0691d", "#2f6fb0", "#2d8659", "#8a5bb5", "#b83f6d", "#8a7a1f", "#3d9aa8", "#7a6a5d")
_ROLES = {"source": _COLOURS[1], "target": _COLOURS[0], "plain": "#5a6472"}
_MOST_IN_LEGEND = 20  # classes
_FORMATS = ("png", "svg")
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
    "text.parse_math": False,  # a `$` in a class name is a dollar
}


def write_run_figures(record: Record, folder: Path) -> list[Path]:
    """Every figure of a run's page, and the two layouts by t-SNE, into `folder`."""
    drawers: dict[str, Callable[[Any], None]] = {
        name: partial(_draw, figure) for name, figure in run_figures(record).items()
    }
    sizes = {name: _size(figure) for name, figure in run_figures(record).items()}
    if record.features is not None and record.images is not None:
        found = embed(record.features)
        for side, points_n2 in (("pretrained", found.pretrained_n2), ("adapted", found.adapted_n2)):
            if points_n2 is not None:
                for by in ("prediction", "certainty", *(["label"] if record.images.true_N is not None else [])):
                    name = f"features-{side}-{by}"
                    drawers[name] = _scatter_of(record, found.rows_n, points_n2, by)
                    sizes[name] = (4.2, 3.2)
    return _write(drawers, sizes, folder)


def write_comparison_figures(records: Sequence[Record], names: Sequence[str], folder: Path) -> list[Path]:
    figures = comparison_figures(records, names)
    drawers: dict[str, Callable[[Any], None]] = {name: partial(_draw, figure) for name, figure in figures.items()}
    return _write(drawers, {name: _size(figure) for name, figure in figures.items()}, folder)


def _write(
    drawers: dict[str, Callable[[Any], None]], sizes: dict[str, tuple[float, float]], folder: Path
) -> list[Path]:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context(_STYLE):
            for name, drawer in drawers.items():
                canvas = Canvas(figsize=sizes[name], layout="constrained")
                FigureCanvasAgg(canvas)
                drawer(canvas.subplots())
                for kind in _FORMATS:
                    data = io.BytesIO()
                    canvas.savefig(data, format=kind, dpi=300, metadata={"Date": None} if kind == "svg" else {})
                    place = folder / f"{name}.{kind}"
                    write_atomically(place, data.getvalue())
                    written.append(place)
    except OSError as error:
        raise UserError(f"cannot write figures into {printable(str(folder))}: {error.strerror}") from None
    return written


def _size(figure: Figure) -> tuple[float, float]:
    if isinstance(figure, Bars):
        return 4.4, max(1.6, 0.22 * len(figure.labels) * (1 if figure.dots else max(1, len(figure.series) * 0.8)) + 0.9)
    if isinstance(figure, Matrix):
        side = min(12.0, max(3.2, 0.22 * len(figure.labels) + 1.4))
        return side, side
    if isinstance(figure, Lines) and len(figure.lines) > 3:
        return 6.2, 2.8  # with the legend beside it
    return (3.4, 3.2) if isinstance(figure, Reliability) else (4.4, 2.8)


def _colour(role: str) -> str:
    return _COLOURS[int(role) % len(_COLOURS)] if role.isdigit() else _ROLES.get(role, _ROLES["plain"])


def _short(text: str, most: int = 32) -> str:
    """Characters that the font lacks are shown as boxes; those that break lines as escapes."""
    text = printable(text)
    return text if len(text) <= most else text[: most - 1] + "…"


def _percent_axis(axis: Any) -> None:
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0, decimals=None))


def _draw(figure: Figure, axes: Any) -> None:
    if isinstance(figure, Lines):
        _lines(axes, figure)
    elif isinstance(figure, Bars):
        _bars(axes, figure)
    elif isinstance(figure, Matrix):
        _matrix(axes, figure)
    elif isinstance(figure, Reliability):
        _reliability(axes, figure)
    else:
        raise AssertionError(f"no way to draw {figure}")


def _lines(axes: Any, figure: Lines) -> None:
    for line in figure.lines:
        ys = [np.nan if y is None else y for y in line.ys]
        style = "--" if line.dashed else "-"
        axes.plot(line.xs, ys, style, color=_colour(line.role), linewidth=1.3, label=_short(line.name))
    for mark in figure.marks:
        axes.axvline(mark.x, color="#5a6472", linestyle=":", linewidth=1)
        axes.text(
            mark.x,
            1.0,
            f" {mark.label}",
            transform=axes.get_xaxis_transform(),
            va="bottom",
            fontsize=8,
            color="#5a6472",
        )
    axes.set(xlabel=figure.x_label, ylabel=figure.y_label)
    axes.set_ylim(bottom=figure.low, top=figure.high)
    if figure.x_percent:
        _percent_axis(axes.xaxis)
    if figure.y_percent:
        _percent_axis(axes.yaxis)
    if len(figure.lines) > 3:
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    elif len(figure.lines) > 1:
        axes.legend(fontsize=8)


def _bars(axes: Any, figure: Bars) -> None:
    places = np.arange(len(figure.labels))
    for number, series in enumerate(figure.series):
        values = np.array([np.nan if value is None else value for value in series.values])
        if figure.dots:
            axes.plot(values, places, "o", markersize=4.5, color=_colour(series.role), label=_short(series.name))
        else:
            thick = 0.8 / len(figure.series)
            shifted = places - 0.4 + thick * (number + 0.5)
            axes.barh(shifted, values, height=thick * 0.95, color=_colour(series.role), label=_short(series.name))
    axes.set_yticks(places, [_short(label) for label in figure.labels])
    axes.invert_yaxis()
    axes.set(xlabel=figure.x_label, xlim=(figure.low, figure.high + 0.02 * (figure.high - figure.low)))
    axes.grid(axis="y", visible=False)
    if figure.percent:
        _percent_axis(axes.xaxis)
    if len(figure.series) > 1:
        axes.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)


def _matrix(axes: Any, figure: Matrix) -> None:
    count = len(figure.labels)
    share_CC = np.zeros((count, count))
    for true, predicted, images in figure.cells:
        share_CC[true, predicted] = images / max(1, figure.totals[true])
    axes.imshow(share_CC, cmap="Blues", vmin=0, vmax=1)
    axes.grid(visible=False)
    axes.set(xlabel="predicted", ylabel="true")
    if count <= 70:
        labels = [_short(label, 18) for label in figure.labels]
        axes.set_xticks(range(count), labels, rotation=90, fontsize=7)
        axes.set_yticks(range(count), labels, fontsize=7)
    if count <= 20:
        for true, predicted, images in figure.cells:
            colour = "white" if share_CC[true, predicted] > 0.55 else "black"
            axes.text(predicted, true, str(images), ha="center", va="center", fontsize=6.5, color=colour)


def _reliability(axes: Any, figure: Reliability) -> None:
    bins = [bin for bin in figure.bins if bin.images and bin.accuracy is not None]
    widths = [bin.high - bin.low for bin in bins]
    axes.bar(
        [bin.low for bin in bins],
        [bin.accuracy for bin in bins],
        widths,
        align="edge",
        color=_ROLES["source"],
        edgecolor="white",
    )
    axes.plot([0, 1], [0, 1], ":", color="#5a6472", linewidth=1)
    axes.set(xlabel="largest probability", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))


def _scatter_of(record: Record, rows_n: Any, points_n2: Any, by: str) -> Callable[[Any], None]:
    images = record.images
    assert images is not None

    def draw(axes: Any) -> None:
        import matplotlib

        if by == "certainty":
            values = images.measures[images.certainty][rows_n]
            drawn = axes.scatter(*points_n2.T, s=3, c=values, cmap="viridis", linewidths=0)
            axes.figure.colorbar(drawn, ax=axes, label=MEASURES[images.certainty].title)
        else:
            labels_N = images.true_N if by == "label" and images.true_N is not None else images.predicted_N
            labels_n = labels_N[rows_n]
            for label in np.unique(labels_n):
                colour = matplotlib.colormaps["tab20"](int(label) % 20)
                chosen_n2 = points_n2[labels_n == label]
                axes.scatter(*chosen_n2.T, s=3, color=colour, linewidths=0, label=_short(record.classes[label], 18))
            if len(record.classes) <= _MOST_IN_LEGEND:
                axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5), markerscale=3)
        axes.set(xticks=[], yticks=[])
        axes.set_aspect("equal")
        for spine in axes.spines.values():
            spine.set_visible(False)

    return draw
