"""Several runs on one page, each by its own certainty."""

from pathlib import Path

import numpy as np
import pytest

from certvol.errors import UserError
from certvol.report import page
from certvol.report.charts import Bars, Lines
from certvol.report.comparison import comparison_figures, comparison_page
from certvol.report.records import read_record
from support.made_runs import make_run
from support.markup import Markup


def test_runs_are_compared_on_one_page(tmp_path: Path) -> None:
    one = make_run(tmp_path / "a", seed=0)
    two = make_run(tmp_path / "b", seed=1, sigma=False, method="basic", count=40)
    place = page.write_comparison([one.path, two.path], tmp_path / "new" / "compared.html")
    words = Markup(place.read_text()).words
    assert "a/run · b/run" in words  # both folders are called `run`
    for made, name, about in (
        (one, "a/run", "cvp small_cnn 0"),
        (two, "b/run", "basic small_cnn 1"),
    ):
        accuracy = made.accuracy(np.ones(len(made.names), bool))
        assert f"{name} {50 * accuracy:.1f} {100 * accuracy:.1f}" in words
        assert about in words
    assert "method.name cvp basic" in words
    assert "training.cycles" not in words  # the same in both
    assert "These runs have different targets" in words
    with pytest.raises(UserError, match="is a folder"):
        page.write_comparison([one.path, two.path], tmp_path)


def test_a_comparison_names_the_runs_without_labels(tmp_path: Path) -> None:
    one = make_run(tmp_path / "a", labelled=False, count=12)
    two = make_run(tmp_path / "b", count=12)
    settings = two.path / "config.yaml"
    settings.write_text(settings.read_text().replace(str(tmp_path / "b"), str(tmp_path / "a")))
    words = Markup(comparison_page([read_record(one.path), read_record(two.path)])).words
    assert "No target labels, and so no accuracies: a/run." in words
    assert "different targets" not in words  # they have the same now


def test_figures_compare_runs_by_their_own_certainty(tmp_path: Path) -> None:
    one, two = make_run(tmp_path / "a"), make_run(tmp_path / "b", sigma=False, method="basic")
    runs = {"cvp": read_record(one.path), "basic": read_record(two.path)}
    risk, sigma, classes, oscillation = comparison_figures(runs)
    assert isinstance(risk, Lines)
    assert [line.name for line in risk.lines] == ["cvp (sigma)", "basic (probability)"]
    for line, certainty_N in zip(risk.lines, (one.sigma_N, two.probability_N), strict=True):
        wrong_N = (one.predicted_N != one.true_N)[np.argsort(-certainty_N, kind="stable")]
        assert line.ys[-1] == pytest.approx(wrong_N.mean())
        tenth = int(np.abs(np.array(line.xs) - 10 / len(wrong_N)).argmin())
        assert line.ys[tenth] == pytest.approx(wrong_N[:10].mean())
        assert line.xs[0] == pytest.approx(
            0.05
        )  # one error among the first images is a large share
    assert isinstance(sigma, Lines)
    assert [(line.name, line.dashed) for line in sigma.lines] == [
        ("cvp, target", False),
        ("cvp, source", True),
    ]
    assert [mark.x for mark in sigma.marks] == [12.0]
    assert isinstance(classes, Bars)
    assert [series.name for series in classes.series] == ["cvp", "basic"]
    assert isinstance(oscillation, Bars)
    assert oscillation.labels == ["cvp", "basic"]
    assert [series.values for series in oscillation.series] == [[1.5, 1.5], [1.2, 1.2]]
