"""Figures for papers: every figure of the page, as PNG and SVG."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from PIL import Image

from certvol.report.figures import run_figures
from certvol.report.papers import write_comparison_figures, write_run_figures
from certvol.report.records import read_record
from report.runs import make_run


def test_every_figure_is_written_twice(tmp_path: Path) -> None:
    made = make_run(tmp_path, classes=["costs $5 and $6", "<b>&", "x" * 200], count=40)
    record = read_record(made.path)
    written = write_run_figures(record, made.path / "figures")
    names = {
        *run_figures(record),
        *(f"features-{side}-{by}" for side in ("pretrained", "adapted") for by in ("prediction", "certainty", "label")),
    }
    assert {file.name for file in written} == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    with Image.open(made.path / "figures" / "confusion.png") as picture:
        assert min(picture.size) > 500
        assert (
            len(
                set(
                    picture.convert("L").get_flattened_data()
                    if hasattr(picture, "get_flattened_data")
                    else picture.convert("L").getdata()
                )
            )
            > 10
        )
    text = "".join(ElementTree.parse(made.path / "figures" / "per-class.svg").getroot().itertext())
    assert "costs $5 and $6" in text
    assert "<b>&" in text
    assert "x" * 40 not in text  # a long name is shortened


def test_the_same_figure_has_the_same_bytes(tmp_path: Path) -> None:
    record = read_record(make_run(tmp_path, features=False).path)
    for folder in ("one", "two"):
        write_comparison_figures([record], ["run"], tmp_path / folder)
    assert (tmp_path / "one" / "risk-coverage.svg").read_bytes() == (
        tmp_path / "two" / "risk-coverage.svg"
    ).read_bytes()
