"""Figures hold what the run wrote, and are left out if it wrote nothing."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from certvol.report import figures
from certvol.report.records import Record, read_record
from support.made_runs import MadeRun, make_run, rewrite_json


def _ids(record: Record) -> set[str]:
    return {chart.id for charts in figures.run_figures(record).values() for chart in charts}


def _correlations(made: MadeRun, **found: dict[str, float | None]) -> Any:
    with rewrite_json(made.path / "evaluation.json") as evaluation:
        evaluation["correlations"] = found
    return figures.correlations(read_record(made.path))


def test_both_phases_lie_on_one_axis_with_the_switch_marked(tmp_path: Path) -> None:
    chart = figures.sigma_over_time(read_record(make_run(tmp_path).path))
    source, target = chart.lines
    assert source.xs == [*range(2, 13, 2), *range(14, 37, 2)]  # 12 steps of pretraining, then 24
    steps = np.array([*range(2, 13, 2), *range(2, 25, 2)])
    np.testing.assert_allclose(source.ys, 0.1 * steps)
    assert target.xs == list(range(14, 37, 2))  # the target has no sigma before adaptation
    assert [(mark.x, mark.label) for mark in chart.marks] == [(12.0, "adaptation begins")]


def test_a_single_phase_has_no_switch(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    history = made.path / "history.jsonl"
    lines = [line for line in history.read_text().splitlines() if "pretrain" in line]
    history.write_text("\n".join(lines))
    chart = figures.losses(read_record(made.path))
    assert chart.lines
    assert chart.marks == []


def test_losses_name_every_term_but_not_sigma(tmp_path: Path) -> None:
    chart = figures.losses(read_record(make_run(tmp_path).path))
    names = [line.name for line in chart.lines]
    assert names == ["total", "cross-entropy", "cross-entropy of the samples"]
    assert [line.ys[:2] for line in chart.lines] == [[1.5, 0.75], [1.0, 0.5], [0.5, 0.25]]


def test_the_total_is_left_out_if_there_is_one_term(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    lines = [json.dumps({"phase": "adapt", "step": i, "loss": i, "ce": i}) for i in range(3)]
    (made.path / "history.jsonl").write_text("\n".join(lines))
    (line,) = figures.losses(read_record(made.path)).lines
    assert line.name == "cross-entropy"


def test_health_is_shown_in_shares(tmp_path: Path) -> None:
    chart = figures.health(read_record(make_run(tmp_path).path))
    accuracy, agreement, in_use = (line.ys for line in chart.lines)
    assert accuracy == [0.9] * 4
    assert agreement == [1.0, 0.9, 0.8, 0.7]
    assert in_use == pytest.approx([2.5 / 3] * 4)


def test_the_confusion_matrix_lists_cells_with_images(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    chart = figures.confusion(read_record(made.path))
    pairs = zip(made.true_N.tolist(), made.predicted_N.tolist(), strict=True)
    counted = Counter(pairs)
    assert {(i, j): count for i, j, count in chart.cells} == counted
    assert chart.totals == np.bincount(made.true_N, minlength=3).tolist()
    (i, j), most = max(
        ((cell, count) for cell, count in counted.items() if cell[0] != cell[1]),
        key=lambda found: (found[1], -found[0][0]),
    )
    share = f"{100 * most / chart.totals[i]:.1f} %"
    assert chart.table()[1][0] == [made.classes[i], made.classes[j], str(most), share]


def test_the_hardest_class_comes_first(tmp_path: Path) -> None:
    chart = figures.per_class(read_record(make_run(tmp_path).path))
    before, after = (series.values for series in chart.series)
    assert after == sorted(after, key=lambda value: value or 0)
    assert before == [None if value is None else value / 2 for value in after]


def test_a_run_that_delivers_the_pretrained_model_shows_it_alone(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    with rewrite_json(made.path / "metrics.json") as metrics:
        metrics["delivered"]["model"] = "pretrained"
    (series,) = figures.per_class(read_record(made.path)).series
    assert series.name == "before adaptation"


def test_negative_correlations_widen_the_axis(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    assert figures.correlations(read_record(made.path)).x.low == -1.0
    chart = _correlations(made, pearson={"logit": 0.8}, spearman={"logit": None})
    assert chart.x.low == 0.0
    assert chart.series[1].values == [None]


def test_the_table_of_correlations_has_two_decimals(tmp_path: Path) -> None:
    values = {"logit": 0.81, "logit_diff": 0.854, "mcd_mu": -0.004, "entropy": None}
    chart = _correlations(make_run(tmp_path), pearson=values)
    assert [row[1] for row in chart.table()[1]] == ["0.81", "0.85", "0.00", "–"]


def test_measures_are_ranked_by_the_errors_they_find(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    with rewrite_json(made.path / "evaluation.json") as evaluation:
        evaluation["auroc"] = {"sigma": 0.7, "probability": 0.9, "logit_gt": 1.0, "entropy": None}
    chart = figures.error_spotting(read_record(made.path))
    assert chart.labels == ["largest probability", "certainty volume (sigma)"]
    assert chart.series[0].values == [0.9, 0.7]


def test_reliability_leaves_out_empty_bins(tmp_path: Path) -> None:
    chart = figures.reliability(read_record(make_run(tmp_path).path))
    assert [(bin.low, bin.accuracy, bin.images) for bin in chart.bins] == [
        (i / 5, i / 5, 10 * i) for i in range(1, 5)
    ]
    assert chart.table()[1][0] == ["0.20 to 0.40", "10", "30.0 %", "20.0 %"]
    assert "calibration error is 0.120" in chart.caption


def test_without_labels_only_what_needs_none_is_drawn(tmp_path: Path) -> None:
    record = read_record(make_run(tmp_path, labelled=False).path)
    assert _ids(record) == {"correlations", "sigma", "losses", "learning-rate", "health"}


def test_without_sigma_only_what_needs_none_is_drawn(tmp_path: Path) -> None:
    found = _ids(read_record(make_run(tmp_path, sigma=False).path))
    assert {"sigma", "correlations"}.isdisjoint(found)
    assert {"risk-coverage", "confusion", "losses"} <= found


ODD = [
    *(None, 3, "x", [], [[1]], {"pearson": 3}, {"sigma": {"coverage": 1}}, {"bins": [3]}),
    {"classes": ["a"], "counts": [[1, 2]]},
]


def test_an_evaluation_of_any_shape_leaves_figures_out_and_does_not_fail(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    file = made.path / "evaluation.json"
    whole = json.loads(file.read_text())
    kept = {"per-class", "sigma", "losses", "learning-rate", "health"}
    for key in whole:
        for odd in ODD:
            file.write_text(json.dumps({**whole, key: odd}))
            assert kept <= _ids(read_record(made.path))
