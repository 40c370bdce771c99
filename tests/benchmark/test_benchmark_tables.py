import csv
import io

import pytest

from certvol.benchmark import tables
from certvol.benchmark.results import Cycles, Result
from certvol.benchmark.suites import SUITES
from certvol.benchmark.tables import Cell

OFFICE = SUITES["office-31"]


def _result(task: str, method: str, seed: int, last: float, **more: object) -> Result:
    figures = {"selected": last - 0.01, "oracle": last + 0.01, "backbone": "inception_v3", **more}
    return Result(task, method, seed, "accuracy", f"runs/{task}/{method}/{seed}", "done", 1.0, last, **figures)


RESULTS = [
    *(_result("A-W", "basic", seed, value) for seed, value in enumerate([0.80, 0.82, 0.84])),
    *(_result("W-A", "basic", seed, value) for seed, value in enumerate([0.60, 0.61, 0.62])),
    *(_result("A-W", "cvp", seed, value) for seed, value in enumerate([0.85, 0.86, 0.87])),
    *(_result("W-A", "cvp", seed, value) for seed, value in enumerate([0.63, 0.64, 0.65])),
    _result("A-W", "source_only", 0, 0.70),
    Result("W-A", "source_only", 0, "accuracy", "r", "failed: something"),
]


def _tables(suite: str = "office-31", baseline: str | None = "basic") -> list[tables.Table]:
    return tables.all_tables(SUITES[suite], RESULTS, ["A-W", "W-A"], "bnm", baseline)


def test_mean_deviation_and_average() -> None:
    table = _tables()[0]
    assert table.columns[:5] == ["backbone", "chosen by", "A-W", "W-A", "average"]
    rows = {row.name: [tables.cell_text(cell) for cell in row.cells] for row in table.rows}
    assert rows["basic"][2:] == ["82.0 ± 2.0", "61.0 ± 1.0", "71.5 ± 1.5", "70.5 ± 1.5", "72.5 ± 1.5"]
    assert rows["cvp"][:3] == ["inception_v3", "last", "86.0 ± 1.0"]
    assert rows["source_only"][2:5] == ["70.0", "", ""], "no average where a task is missing"
    assert "0 to 3 seeds" in table.notes[0]


def test_best_and_second_of_ours() -> None:
    ranks = {row.name: [cell.rank for cell in row.cells][2:5] for row in _tables()[0].rows}
    assert ranks["cvp"] == [1, 1, 1]
    assert ranks["basic"] == [2, 2, 2]
    assert ranks["source_only"] == [0, 0, 0]
    assert ranks["MDD"] == [0, 0, 0], "published rows are on another backbone"


def test_figures_that_are_shown_alike_rank_alike() -> None:
    results = [_result("A-W", "basic", seed, value) for seed, value in enumerate([0.381, 0.382])]
    results += [_result("A-W", "cvp", 0, 0.381), _result("A-W", "dann", 0, 0.2)]
    table = tables.task_table(OFFICE, results, ["basic", "cvp", "dann"], ["A-W"], "bnm")
    shown = {
        row.name: (tables.cell_text(row.cells[2])[:4], row.cells[2].rank) for row in table.rows if not row.published
    }
    alike = shown["basic"][0] == shown["cvp"][0]
    assert alike == (shown["basic"][1] == shown["cvp"][1])
    for value in range(1, 2000):
        one, other = (
            tables.Row(name, [Cell(mean)]) for name, mean in (("a", value / 2000), ("b", value / 2000 + 1e-9))
        )
        ranks = [row.cells[0].rank for row in tables._ranked([one, other, tables.Row("c", [Cell(0.0)])], 0)]
        assert (tables.cell_text(one.cells[0]) == tables.cell_text(other.cells[0])) == (ranks[0] == ranks[1]), value


def test_a_model_that_is_not_the_last_cycles_is_told() -> None:
    results = [_result("A-W", "cvp", seed, 0.5 + seed / 100) for seed in range(3)]
    results[1] = _result("A-W", "cvp", 1, 0.51, other_delivered=0.444)
    notes = tables.task_table(OFFICE, results, ["cvp"], ["A-W"], "bnm").notes
    assert any("delivered another model" in note and "Delivered were: A-W seed 1 44.4." in note for note in notes)
    assert not any(
        "delivered another" in note for note in tables.task_table(OFFICE, results[:1], ["cvp"], ["A-W"], "x").notes
    )


def test_latex_has_no_sign_that_its_text_fonts_lack() -> None:
    assert tables._escaped("< 0.001 | a_b ± 1") == r"$<$ 0.001 $|$ a\_b $\pm$ 1"


def test_published_rows_tell_backbone_and_selection() -> None:
    rows = {row.name: row for row in _tables()[0].rows}
    assert rows["DANN"].published
    words = [tables.cell_text(cell) for cell in rows["DANN"].cells]
    assert words == ["resnet50", "oracle", "", "", "86.1 (of all 6)", "", ""]
    caltech = tables.task_table(SUITES["office-caltech"], [], [], ["A-C", "A-D"], "bnm")
    cvp = [tables.cell_text(cell) for cell in next(row for row in caltech.rows if row.name == "CVP").cells]
    assert cvp == ["resnet50", "last", "94.3", "98.1", "96.2", "", ""], "the average is over the tasks shown"
    whole = tables.task_table(SUITES["office-caltech"], [], [], list(SUITES["office-caltech"].tasks), "bnm")
    assert tables.cell_text(next(row for row in whole.rows if row.name == "CORAL").cells[-3]) == "92.6"
    modern = tables.task_table(SUITES["modern-office-31"], [], [], ["S-W"], "bnm")
    assert tables.cell_text(next(row for row in modern.rows if row.name == "CAN").cells[2]) == "89.7 ± 0.5"


def _words(table: tables.Table, name: str, published: bool = False) -> dict[str, str]:
    row = next(row for row in table.rows if row.name == name and row.published == published)
    return dict(zip(table.columns, map(tables.cell_text, row.cells), strict=True))


def test_the_printed_deviation_of_a_printed_average() -> None:
    suite = SUITES["modern-office-31"]
    whole = tables.task_table(suite, [], [], list(suite.tasks), "bnm")
    assert _words(whole, "CAN", True)["average"] == "86.9 ± 0.7"
    assert _words(whole, "CVP", True)["average"] == "86.6"
    assert _words(tables.task_table(suite, [], [], ["S-W"], "bnm"), "CAN", True)["average"] == "89.7"


def test_the_losses_are_compared_as_in_the_paper() -> None:
    def runs(task: str, method: str, values: list[float], *wavering: float) -> list[Result]:
        facts = [{"oscillation": value} for value in wavering] or [{}] * len(values)
        return [_result(task, method, i, v, facts=f) for i, (v, f) in enumerate(zip(values, facts, strict=True))]

    done = [
        *runs("P-S", "cvp", [0.70, 0.72], 190.0, 195.1),
        *runs("P-S", "basic", [0.60, 0.62], 210.0, 220.0),
        *runs("P-R", "source_only", [0.5]),
    ]
    made = tables.all_tables(SUITES["adaptiope"], done, ["P-R", "P-S"], "bnm", None)
    table = next(table for table in made if table.title.startswith("the losses:"))
    assert [(row.name, row.published) for row in table.rows] == [
        ("Basic", False),
        ("Full CVP", False),
        ("Basic", True),
        ("No samples CE", True),
        ("Full CVP", True),
    ]
    ours = {"method": "cvp", "backbone": "inception_v3", "P-S": "71.0 ± 1.4", "average": "71.0 ± 1.4"}
    assert _words(table, "Full CVP") == {**ours, "oscillation": "192.6"}
    paper = {"method": "", "backbone": "resnet50", "P-S": "71.9", "average": "71.9"}
    assert _words(table, "Full CVP", True) == {**paper, "oscillation": "197.1"}
    assert _words(table, "No samples CE", True)["oscillation"] == ""
    assert [cell.rank for cell in table.rows[1].cells] == [0, 0, 1, 1, 0]
    assert any("table 1" in note for note in table.notes)


def test_the_papers_means_of_the_losses_are_of_its_tasks() -> None:
    def of(tasks: list[str]) -> dict[str, str]:
        done = [_result(task, method, 0, 0.5) for task in tasks for method in ("basic", "cvp")]
        return _words(tables.loss_table(SUITES["adaptiope"], done, tasks), "Basic", True)

    assert (of(["P-S", "R-S", "S-P", "S-R"])["average"], of(["P-S", "R-S", "S-P", "S-R"])["oscillation"]) == (
        "68.6",
        "223.5",
    )
    assert (of(["P-S", "R-S"])["average"], of(["P-S", "R-S"])["oscillation"]) == ("69.8", "206.6")
    whole = of(list(SUITES["adaptiope"].tasks))
    assert (whole["P-R"], whole["P-S"], whole["average"]) == ("", "69.4", "68.6 (of P-S, R-S, S-P, S-R)")


def test_the_losses_need_two_to_compare_and_the_paper_its_suite() -> None:
    def titles(done: list[Result]) -> list[str]:
        return [table.title for table in tables.all_tables(OFFICE, done, ["A-W"], "bnm", None)]

    assert not any("the losses" in title for title in titles(RESULTS[:3]))
    assert any("the losses" in title for title in titles([RESULTS[0], RESULTS[6]]))
    assert not any(row.published for row in tables.loss_table(OFFICE, RESULTS, ["A-W"]).rows)


def test_a_choice_that_cannot_be_made_is_explained() -> None:
    cycles = Cycles([0.1, 0.2], {"sigma": [1, 2]}, [True] * 2)
    done = [
        _result("A-W", "cvp", 0, 0.3, cycles=cycles),
        _result("A-W", "basic", 0, 0.3, cycles=cycles, selected=None),
    ]
    notes = tables.task_table(OFFICE, done, ["basic", "cvp"], ["A-W"], "sigma").notes
    assert "No label-free choice by sigma for basic: these methods have no sigma." in notes
    assert not any("No label-free" in note for note in tables.task_table(OFFICE, done[:1], ["cvp"], ["A-W"], "x").notes)


def test_a_chance_is_never_said_to_be_none() -> None:
    results = [
        _result("A-W", method, seed, value) for seed in range(12) for method, value in (("basic", 0.5), ("cvp", 0.6))
    ]
    table = tables.gain_table(results, ["basic", "cvp"], "basic")
    assert [cell.text for cell in table.rows[0].cells[1:3]] == ["12", "< 0.001"]


def test_with_six_tasks_a_gain_is_tested_over_tasks_too() -> None:
    """One task that gains by far more than the others lose is many pairs, and one task."""
    tasks = ["A-W", "A-D", "D-A", "D-W", "W-A", "W-D"]
    results = [
        _result(task, method, seed, value)
        for task in tasks
        for seed in range(4)
        for method, value in (("basic", 0.5), ("cvp", 0.8 if task == "A-W" else 0.501 + 0.001 * seed))
    ]
    table = tables.gain_table(results, ["basic", "cvp"], "basic")
    assert table.columns[2:4] == ["p", tables.OVER_TASKS]
    assert [cell.text for cell in table.rows[0].cells[2:4]] == ["< 0.001", "0.031"]
    assert tables.OVER_TASKS in table.notes[-1]
    fewer = tables.gain_table([r for r in results if r.task != "W-D"], ["basic", "cvp"], "basic")
    assert tables.OVER_TASKS not in [*fewer.columns, *fewer.notes]
    assert len(fewer.rows[0].cells) == len(fewer.columns) == len(table.columns) - 1


def test_gains_are_called_by_their_name() -> None:
    table = next(table for table in _tables() if table.title.startswith("gain"))
    rows = {row.name: [tables.cell_text(cell) for cell in row.cells] for row in table.rows}
    assert list(rows) == ["cvp", "source_only"]
    assert rows["cvp"] == ["3.5 ± 0.8", "6", "0.031", "a gain above the noise"]
    assert "too few" in rows["source_only"][3]
    assert tables.verdict([0.01, -0.01, 0.02, 0.01, -0.02, 0.01]) == "within the noise"
    assert tables.verdict([-0.01] * 6) == "a loss above the noise"
    assert not any(table.title.startswith("gain") for table in _tables(baseline=None))


def test_validators_are_ranked_by_the_truth() -> None:
    cycles = Cycles([0.1, 0.2, 0.3], {"bnm": [1, 2, 3], "snd": [3, 2, 1], "ensv": [0.5, 0.9, 0.5]}, [True] * 3)
    table = tables.validator_table([_result("A-W", "cvp", 0, 0.3, cycles=cycles), _result("A-W", "basic", 0, 0.3)])
    rows = {row.name: [tables.cell_text(cell) for cell in row.cells] for row in table.rows}
    assert rows["bnm"] == ["+1.00", "+1.00", "0.0", "1"]
    assert rows["snd"] == ["-1.00", "-1.00", "-20.0", "1"]
    assert rows["ensv"] == ["+0.00", "", "-10.0", "1"]
    assert rows["sigma"] == ["", "", "", "0"]
    assert rows["oracle (unattainable)"][2] == "0.0"


def test_visda_has_a_column_per_class() -> None:
    suite = SUITES["visda-2017"]
    done = [
        Result(
            task,
            "cvp",
            seed,
            "mean_class_accuracy",
            "r",
            "done",
            1,
            v,
            v,
            v,
            {"bus": v, "car": None},
            None,
            "resnet101",
        )
        for task in ("synthetic-test", "synthetic-validation")
        for seed, v in enumerate([0.5, 0.7])
    ]
    test, validation, *_ = tables.all_tables(suite, done, ["synthetic-test", "synthetic-validation"], "bnm", None)
    assert test.columns[2:-3] == list(suite.class_names)
    ours, *published = test.rows
    words = dict(zip(test.columns, map(tables.cell_text, ours.cells), strict=True))
    assert (words["bus"], words["car"], words["mean"]) == ("60.0 ± 14.1", "", "60.0 ± 14.1")
    assert {row.name for row in published} >= {"CVP", "UFAL"}
    assert tables.cell_text(published[-1].cells[-3]) == "90.1"
    backbones = {row.name: row.cells[0].text for row in published}
    assert (backbones["SE-152"], backbones["BUPT"], backbones["CVP"]) == ("resnet152", "unknown", "resnet101")
    assert len(validation.rows) == 1, "the published rows are of the test split"


def test_classes_and_their_mean_are_of_one_model() -> None:
    def result(method: str, seed: int, last: float, delivered: float | None) -> Result:
        value = last if delivered is None else delivered
        figures = {"last": last, "per_class": {"bus": value}, "other_delivered": delivered}
        return Result("synthetic-test", method, seed, "mean_class_accuracy", "r", "done", **figures)

    done = [result("cvp", 0, 0.2, 0.6), result("cvp", 1, 0.6, None), result("basic", 0, 0.5, None)]
    table = tables.class_table(SUITES["visda-2017"], done, ["cvp", "basic"], "synthetic-test", "bnm")
    cvp, basic = (dict(zip(table.columns, map(tables.cell_text, row.cells), strict=True)) for row in table.rows[:2])
    assert (cvp["chosen by"], cvp["bus"], cvp["mean"]) == ("run", "60.0 ± 0.0", "60.0 ± 0.0")
    assert (basic["chosen by"], basic["bus"], basic["mean"]) == ("last", "50.0", "50.0")
    assert any("cvp: with seed 0 " in note and "mean is 40.0 ± 28.3" in note for note in table.notes)
    assert not any("basic" in note for note in table.notes)


def test_markdown_and_latex_and_csv_say_the_same() -> None:
    made = _tables()
    text = tables.markdown(made)
    assert "| cvp | inception_v3 | last | **86.0 ± 1.0** |" in text
    assert "<u>82.0 ± 2.0</u>" in text
    assert "| *DANN* | resnet50 | oracle |" in text
    assert all(line.count("|") == 9 for line in text.split("\n\n")[1].splitlines())
    tex = tables.latex(made)
    assert r"cvp & inception\_v3 & last & \textbf{86.0 $\pm$ 1.0}" in tex
    assert r"source\_only" in tex
    assert r"target accuracy, \%" not in tex.split("\\begin")[0], "comments are as they are"
    for block in tex.split("\\begin{tabular}")[1:]:
        spec = block[1 : block.index("}")]
        body = [line for line in block.splitlines() if line.endswith(r"\\")]
        assert all(line.count(" & ") == len(spec) - 1 for line in body)
    lines = list(csv.DictReader(io.StringIO(tables.long_csv(made))))
    mine = next(line for line in lines if line["row"] == "cvp" and line["column"] == "A-W")
    assert (mine["mean"], mine["deviation"], mine["count"], mine["published"]) == ("0.860000", "0.010000", "3", "false")


def test_numbers_are_numbers_in_the_csv_and_formulas_are_text() -> None:
    words = ["+0.64", "-0.36", "+1", "+3.0 ± 0.1 points", "-x", "=1+1", "@a", "0.5", ""]
    table = tables.Table("t", words, [tables.Row("r", [Cell(text=word) for word in words])])
    lines = csv.DictReader(io.StringIO(tables.long_csv([table])))
    expected = ["0.64", "-0.36", "1", "'+3.0 ± 0.1 points", "'-x", "'=1+1", "'@a", "0.5", ""]
    assert [line["text"] for line in lines] == expected


def test_cells() -> None:
    assert tables.cell_text(Cell()) == ""
    assert tables.cell_text(Cell(0.5)) == "50.0"
    assert tables.mean_and_deviation([0.2, 0.4]).deviation == pytest.approx(0.1414, abs=1e-3)
    assert tables.mean_and_deviation([]) == Cell()
