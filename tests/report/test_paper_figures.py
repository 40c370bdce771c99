"""Figures for papers show what the page shows, as PNG and SVG."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from certvol.report.figures import run_figures
from certvol.report.paper_figures import write_comparison_figures, write_run_figures
from certvol.report.records import read_record
from support.made_runs import MadeRun, make_run

Axes = dict[str, Any]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> tuple[MadeRun, Axes, Path]:
    """Write all figures of a run; keep the matplotlib axes of each by name."""
    root = tmp_path_factory.mktemp("drawn")
    made = make_run(root, classes=["costs $5 and $6", "<b>&", "x" * 200], count=40)
    figures: list[Figure] = []
    with pytest.MonkeyPatch.context() as patch:
        original = Figure.subplots

        def subplots(self: Figure, *args: Any, **kwargs: Any) -> Any:
            figures.append(self)
            return original(self, *args, **kwargs)

        patch.setattr(Figure, "subplots", subplots)
        written = write_run_figures(read_record(made.path), made.path / "figures")
    names = [file.stem for file in written if file.suffix == ".png"]
    return (
        made,
        dict(zip(names, (figure.axes[0] for figure in figures), strict=True)),
        written[0].parent,
    )


def test_every_figure_is_written_as_png_and_svg(drawn: tuple[MadeRun, Axes, Path]) -> None:
    made, _, folder = drawn
    charts = [c.id for charts in run_figures(read_record(made.path)).values() for c in charts]
    layouts = [
        f"features-{side}-{by}"
        for side in ("pretrained", "adapted")
        for by in ("prediction", "certainty", "label")
    ]
    wanted = {f"{name}.{kind}" for name in charts + layouts for kind in ("png", "svg")}
    assert {file.name for file in folder.iterdir()} == wanted
    assert len(charts) == 10
    for file in folder.glob("*.png"):
        with Image.open(file) as picture:
            assert min(picture.size) > 400, file.name


def test_lines_bars_and_cells_have_the_values_of_the_charts(
    drawn: tuple[MadeRun, Axes, Path],
) -> None:
    made, axes, _ = drawn
    charts = {c.id: c for charts in run_figures(read_record(made.path)).values() for c in charts}
    for name in ("sigma", "losses", "learning-rate", "health", "risk-coverage"):
        chart: Any = charts[name]
        for line, artist in zip(chart.lines, axes[name].lines, strict=False):
            np.testing.assert_array_equal(artist.get_xdata(), line.xs)
            np.testing.assert_array_equal(artist.get_ydata(), line.ys)
        assert len(axes[name].lines) == len(chart.lines) + len(chart.marks)
        assert axes[name].get_xlabel() == chart.x.label
    widths = [bar.get_width() for bar in axes["auroc"].patches]
    assert widths == [0.75, 0.75]
    heights = [bar.get_height() for bar in axes["reliability"].patches]
    assert heights == pytest.approx([0.2, 0.4, 0.6, 0.8])
    counts = np.zeros((3, 3))
    np.add.at(counts, (made.true_N, made.predicted_N), 1)
    shares = counts / counts.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(axes["confusion"].images[0].get_array(), shares)
    texts = {int(text.get_text()) for text in axes["confusion"].texts}
    assert texts == {int(count) for count in counts.flat if count}


def test_every_image_is_a_point_in_each_layout(drawn: tuple[MadeRun, Axes, Path]) -> None:
    made, axes, _ = drawn
    for side in ("pretrained", "adapted"):
        groups = axes[f"features-{side}-label"].collections
        counts = np.bincount(made.true_N, minlength=3)
        assert [len(group.get_offsets()) for group in groups] == [n for n in counts if n]
        (points,) = axes[f"features-{side}-certainty"].collections
        assert sorted(points.get_array()) == sorted(made.sigma_N)


def test_class_names_are_plain_and_short(drawn: tuple[MadeRun, Axes, Path]) -> None:
    _, _, folder = drawn
    text = "".join(ElementTree.parse(folder / "per-class.svg").getroot().itertext())
    assert "costs $5 and $6" in text  # not a formula
    assert "<b>&" in text
    assert "x" * 31 + "…" in text
    assert "x" * 32 not in text


def test_the_same_figure_has_the_same_bytes(tmp_path: Path) -> None:
    record = read_record(make_run(tmp_path, features=False).path)
    one, two = (write_comparison_figures([record], tmp_path / name) for name in ("one", "two"))
    assert {file.name for file in one} >= {"risk-coverage.svg", "oscillation.png"}
    assert [file.read_bytes() for file in one] == [file.read_bytes() for file in two]
