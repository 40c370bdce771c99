"""The figures hold what the run wrote, and are absent where it wrote nothing."""

import json
from pathlib import Path

import numpy as np

from certvol.report import figures
from certvol.report.records import read_record
from report.runs import make_run, rewrite_json


def test_both_phases_lie_on_one_axis_with_the_switch_marked(tmp_path: Path) -> None:
    figure = figures.sigma_over_time(read_record(make_run(tmp_path).path))
    assert figure is not None
    source, target = figure.lines
    assert source.xs == [*range(2, 13, 2), *range(14, 37, 2)]  # 12 steps of pretraining, then 24
    np.testing.assert_allclose(np.array(source.ys, float), [0.1 * s for s in (*range(2, 13, 2), *range(2, 25, 2))])
    assert target.xs == list(range(14, 37, 2))  # nothing of the target is drawn before adaptation
    assert [(mark.x, mark.label) for mark in figure.marks] == [(12.0, "adaptation begins")]


def test_a_single_phase_has_no_switch(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    lines = [line for line in (made.path / "history.jsonl").read_text().splitlines() if "pretrain" in line]
    (made.path / "history.jsonl").write_text("\n".join(lines))
    figure = figures.losses(read_record(made.path))
    assert figure is not None
    assert figure.marks == []


def test_losses_name_every_term_and_never_sigma(tmp_path: Path) -> None:
    figure = figures.losses(read_record(make_run(tmp_path).path))
    assert figure is not None
    assert [line.name for line in figure.lines] == ["total", "cross-entropy", "cross-entropy of the samples"]


def test_the_confusion_matrix_lists_cells_with_images(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    figure = figures.confusion(read_record(made.path))
    assert figure is not None
    naive = {}
    for true, predicted in zip(made.true_N.tolist(), made.predicted_N.tolist(), strict=True):
        naive[true, predicted] = naive.get((true, predicted), 0) + 1
    assert {(i, j): count for i, j, count in figure.cells} == naive
    assert figure.totals == np.bincount(made.true_N, minlength=3).tolist()
    worst = max((count for (i, j), count in naive.items() if i != j), default=0)
    assert figure.confusions()[0][2] == worst


def test_the_hardest_class_comes_first(tmp_path: Path) -> None:
    figure = figures.per_class(read_record(make_run(tmp_path).path))
    assert figure is not None
    adapted = figure.series[1].values
    assert adapted == sorted(adapted, key=lambda value: value or 0)
    assert figure.series[0].values == [None if value is None else value / 2 for value in adapted]


def test_negative_correlations_widen_the_axis(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    figure = figures.correlations(read_record(made.path))
    assert figure is not None
    assert figure.low == -1.0
    evaluation = json.loads((made.path / "evaluation.json").read_text())
    evaluation["correlations"] = {"pearson": {"logit": 0.8}, "spearman": {"logit": None}}
    (made.path / "evaluation.json").write_text(json.dumps(evaluation))
    figure = figures.correlations(read_record(made.path))
    assert figure is not None
    assert figure.low == 0.0
    assert figure.series[1].values == [None]


def test_the_table_of_correlations_has_two_decimals(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    with rewrite_json(made.path / "evaluation.json") as evaluation:
        evaluation["correlations"] = {
            "pearson": {"logit": 0.81, "logit_diff": 0.854, "mcd_mu": -0.004, "entropy": None}
        }
    figure = figures.correlations(read_record(made.path))
    assert figure is not None
    assert [row[1] for row in figure.table()[1]] == ["0.81", "0.85", "0.00", "–"]


def test_without_labels_only_what_needs_none_is_drawn(tmp_path: Path) -> None:
    drawn = figures.run_figures(read_record(make_run(tmp_path, labelled=False).path))
    assert set(drawn) == {"correlations", "sigma", "losses", "learning-rate", "health"}


def test_without_sigma_only_what_needs_none_is_drawn(tmp_path: Path) -> None:
    drawn = figures.run_figures(read_record(make_run(tmp_path, sigma=False).path))
    assert {"sigma", "correlations"}.isdisjoint(drawn)
    assert {"risk-coverage", "confusion", "losses"} <= set(drawn)


def test_figures_of_any_shape_of_file_are_left_out_rather_than_fail(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    whole = json.loads((made.path / "evaluation.json").read_text())
    for key in whole:
        for odd in (
            None,
            3,
            "x",
            [],
            [[1]],
            {"pearson": 3},
            {"sigma": {"coverage": 1}},
            {"bins": [3]},
            {"classes": ["a"], "counts": [[1, 2]]},
        ):
            (made.path / "evaluation.json").write_text(json.dumps({**whole, key: odd}))
            for figure in figures.run_figures(read_record(made.path)).values():
                figure.table()


def test_a_long_line_is_thinned_and_keeps_its_ends(tmp_path: Path) -> None:
    made = make_run(tmp_path)
    lines = [json.dumps({"phase": "pretrain", "step": i, "lr": 1 / i}) for i in range(1, 9001)]
    (made.path / "history.jsonl").write_text("\n".join(lines))
    figure = figures.learning_rate(read_record(made.path))
    assert figure is not None
    xs = figure.lines[0].xs
    assert len(xs) == 1500
    assert (xs[0], xs[-1]) == (1, 9000)
    head, rows = figure.table()
    assert head == ["training step", "learning rate"]
    assert rows[0] == ["1", "1"]
    assert rows[-1][0] == "9,000"


def test_runs_are_compared_by_their_own_certainty(tmp_path: Path) -> None:
    one, two = make_run(tmp_path / "a"), make_run(tmp_path / "b", sigma=False, method="basic")
    drawn = figures.comparison_figures([read_record(one.path), read_record(two.path)], ["cvp", "basic"])
    assert [line.name for line in drawn["risk-coverage"].lines] == ["cvp (sigma)", "basic (probability)"]  # type: ignore[attr-defined]
    assert drawn["oscillation"].labels == ["cvp", "basic"]  # type: ignore[attr-defined]
    assert [line.name for line in drawn["sigma"].lines] == ["cvp, target", "cvp, source"]  # type: ignore[attr-defined]
