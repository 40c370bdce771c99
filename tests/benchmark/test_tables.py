from typing import Any

import pytest

from certvol.benchmark import tables
from certvol.benchmark.results import Cycles, Result
from certvol.benchmark.suites import SUITES
from certvol.benchmark.table_formats import Cell, Row, Table

OFFICE = SUITES["office-31"]


def _result(task: str, method: str, seed: int, last: float, **more: Any) -> Result:
    figures = {"selected": last - 0.01, "oracle": last + 0.01, "backbone": "inception_v3", **more}
    return Result(task, method, seed, "done", 1.0, last, **figures)


def _seeds(task: str, method: str, *values: float, **more: Any) -> list[Result]:
    return [_result(task, method, seed, value, **more) for seed, value in enumerate(values)]


RESULTS = [
    *_seeds("A-W", "basic", 0.80, 0.82, 0.84),
    *_seeds("A-W", "cvp", 0.85, 0.86, 0.87),
    *_seeds("A-W", "source_only", 0.70),
    *_seeds("W-A", "basic", 0.60, 0.61, 0.62),
    *_seeds("W-A", "cvp", 0.63, 0.64, 0.65),
    Result("W-A", "source_only", 0, "failed: something"),
]


def _tables(baseline: str | None = "basic") -> list[Table]:
    return tables.all_tables(OFFICE, RESULTS, "bnm", baseline)


def _shown(table: Table, name: str, published: bool = False) -> dict[str, str]:
    row = next(row for row in table.rows if row.name == name and row.published == published)
    return dict(zip(table.columns, map(Cell.shown, row.cells), strict=True))


def test_mean_deviation_and_average() -> None:
    table = _tables()[0]
    assert table.columns[:5] == ["backbone", "checkpoint", "A-W", "W-A", "average"]
    basic = list(_shown(table, "basic").values())
    assert basic[2:] == ["82.0 ± 2.0", "61.0 ± 1.0", "71.5 ± 1.5", "70.5 ± 1.5", "72.5 ± 1.5"]
    assert list(_shown(table, "cvp").values())[:3] == ["inception_v3", "last", "86.0 ± 1.0"]
    source_only = list(_shown(table, "source_only").values())
    assert source_only[2:5] == ["70.0", "", ""], "no average if a task is missing"
    assert "0 to 3 seeds" in table.notes[0]
    assert "91.4 (of all 6)" in _shown(table, "FixBi", published=True).values()


def test_best_and_second_of_our_rows_are_ranked() -> None:
    ranks = {row.name: [cell.rank for cell in row.cells][2:5] for row in _tables()[0].rows}
    assert ranks["cvp"] == [1, 1, 1]
    assert ranks["basic"] == [2, 2, 2]
    assert ranks["source_only"] == [0, 0, 0]
    assert ranks["MDD"] == [0, 0, 0], "published rows use another backbone"


def test_cells_rank_equal_exactly_if_they_look_equal() -> None:
    for value in range(1, 2000):
        one, other = Cell(value / 2000), Cell(value / 2000 + 1e-9)
        rows = tables._ranked([Row("", [cell]) for cell in (one, other, Cell(0.0))], skip=0)
        ranks = [row.cells[0].rank for row in rows]
        assert (one.shown() == other.shown()) == (ranks[0] == ranks[1]), value


def test_a_note_names_runs_that_delivered_another_model() -> None:
    results = _seeds("A-W", "cvp", 0.5, 0.51, 0.52)
    notes = tables.accuracy_table(OFFICE, results, ["cvp"], ["A-W"], "bnm").notes
    assert not any("another model" in note for note in notes)
    results[1] = _result("A-W", "cvp", 1, 0.51, delivered=0.444, delivers_last=False)
    notes = tables.accuracy_table(OFFICE, results, ["cvp"], ["A-W"], "bnm").notes
    assert any("in A-W seed 1 (44.4, last 51.0). This" in note for note in notes)


def test_the_losses_are_compared_as_in_the_paper() -> None:
    done = [
        *_seeds("P-R", "source_only", 0.5),
        _result("P-S", "cvp", 0, 0.70, measured={"oscillation": 190.0}),
        _result("P-S", "cvp", 1, 0.72, measured={"oscillation": 195.1}),
        *_seeds("P-S", "basic", 0.60, 0.62),
    ]
    made = tables.all_tables(SUITES["adaptiope"], done, "bnm", None)
    table = next(table for table in made if table.title.startswith("the losses:"))
    names = [(row.name, row.published) for row in table.rows]
    ours, paper = [("Basic", False), ("Full CVP", False)], ["Basic", "No samples CE", "Full CVP"]
    assert names == [*ours, *((name, True) for name in paper)]
    found = {"method": "cvp", "backbone": "inception_v3", "oscillation": "192.6"}
    found |= {"P-S": "71.0 ± 1.4", "average": "71.0 ± 1.4"}
    assert _shown(table, "Full CVP") == found
    printed = {"method": "", "backbone": "resnet50", "oscillation": "197.1"}
    printed |= {"P-S": "71.9", "average": "71.9"}
    assert _shown(table, "Full CVP", True) == printed
    assert _shown(table, "No samples CE", True)["oscillation"] == ""
    assert [cell.rank for cell in table.rows[1].cells] == [0, 0, 1, 1, 0]
    assert any("table 1" in note for note in table.notes)


def test_the_losses_need_two_methods() -> None:
    def titles(done: list[Result]) -> list[str]:
        return [table.title for table in tables.all_tables(OFFICE, done, "bnm", None)]

    assert not any("the losses" in title for title in titles(RESULTS[:3]))
    assert any("the losses" in title for title in titles([RESULTS[0], RESULTS[3]]))


def test_a_note_explains_why_a_validator_chose_nothing() -> None:
    cycles = Cycles([0.1, 0.2], {"sigma": [1, 2]}, [True] * 2)
    cvp = _result("A-W", "cvp", 0, 0.3, cycles=cycles)
    basic = _result("A-W", "basic", 0, 0.3, cycles=cycles, selected=None)
    notes = tables.accuracy_table(OFFICE, [cvp, basic], ["basic", "cvp"], ["A-W"], "sigma").notes
    assert "No choice by sigma for basic: these methods have no sigma." in notes
    notes = tables.accuracy_table(OFFICE, [cvp], ["cvp"], ["A-W"], "x").notes
    assert not any("No choice" in note for note in notes)


def test_gains_have_a_verdict() -> None:
    table = next(table for table in _tables() if table.title.startswith("gain"))
    assert [row.name for row in table.rows] == ["cvp", "source_only"]
    cvp = ["3.5 ± 0.8", "6", "0.031", "a gain above the noise"]
    assert list(_shown(table, "cvp").values()) == cvp
    assert "too few" in _shown(table, "source_only")["verdict"]
    assert not any(table.title.startswith("gain") for table in _tables(baseline=None))


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [
        ([0.01, -0.01, 0.02, 0.01, -0.02, 0.01], "within the noise"),
        ([-0.01] * 6, "a loss above the noise"),
    ],
)
def test_noise_and_losses_are_called_so(gains: list[float], verdict: str) -> None:
    done = [*_seeds("A-W", "basic", *[0.5] * 6), *_seeds("A-W", "cvp", *(0.5 + g for g in gains))]
    table = tables.gain_table(done, ["basic", "cvp"], "basic")
    assert _shown(table, "cvp")["verdict"] == verdict


def test_a_small_p_is_not_shown_as_zero() -> None:
    done = [*_seeds("A-W", "basic", *[0.5] * 12), *_seeds("A-W", "cvp", *[0.6] * 12)]
    table = tables.gain_table(done, ["basic", "cvp"], "basic")
    assert [cell.text for cell in table.rows[0].cells[1:3]] == ["12", "< 0.001"]


def test_a_gain_is_also_tested_over_six_tasks() -> None:
    """One task that gains far more than the others lose is many pairs, but one task."""
    results = []
    for task in ("A-W", "A-D", "D-A", "D-W", "W-A", "W-D"):
        gains = [0.3] * 4 if task == "A-W" else [0.001, 0.002, 0.003, 0.004]
        results += _seeds(task, "basic", *[0.5] * 4)
        results += _seeds(task, "cvp", *(0.5 + gain for gain in gains))
    table = tables.gain_table(results, ["basic", "cvp"], "basic")
    assert table.columns[2:4] == ["p", tables.P_OVER_TASKS]
    assert [cell.text for cell in table.rows[0].cells[2:4]] == ["< 0.001", "0.031"]
    assert tables.P_OVER_TASKS in table.notes[-1]
    fewer = tables.gain_table([r for r in results if r.task != "W-D"], ["basic", "cvp"], "basic")
    assert tables.P_OVER_TASKS not in [*fewer.columns, *fewer.notes]
    assert len(fewer.rows[0].cells) == len(fewer.columns) == len(table.columns) - 1


def test_validators_are_compared_with_the_accuracy() -> None:
    scores: dict[str, list[float]] = {"bnm": [1, 2, 3], "snd": [3, 2, 1], "ensv": [0.5, 0.9, 0.5]}
    cycles = Cycles([0.1, 0.2, 0.3], scores, [True] * 3)
    cvp = _result("A-W", "cvp", 0, 0.3, cycles=cycles)
    table = tables.validator_table([cvp, _result("A-W", "basic", 0, 0.3)])
    rows = {row.name: [cell.shown() for cell in row.cells] for row in table.rows}
    assert rows["bnm"] == ["+1.00", "+1.00", "0.0", "1"]
    assert rows["snd"] == ["-1.00", "-1.00", "-20.0", "1"]
    assert rows["ensv"] == ["+0.00", "", "-10.0", "1"]
    assert rows["sigma"] == ["", "", "", "0"]
    assert rows["oracle (unattainable)"][2] == "0.0"


def test_visda_has_a_column_per_class() -> None:
    suite = SUITES["visda-2017"]
    done = [
        _result(task, "cvp", seed, v, delivered=v, per_class={"bus": v, "car": None})
        for task in ("synthetic-test", "synthetic-validation")
        for seed, v in enumerate([0.5, 0.7])
    ]
    test, validation, *_ = tables.all_tables(suite, done, "bnm", None)
    assert test.columns[2:-3] == list(suite.class_names)
    shown = _shown(test, "cvp")
    assert (shown["bus"], shown["car"], shown["mean"]) == ("60.0 ± 14.1", "", "60.0 ± 14.1")
    assert {row.name for row in test.rows} >= {"CVP", "UFAL"}
    assert "CVP" not in {row.name for row in validation.rows}, "its row is for the test split"


def test_a_partial_visda_shows_its_classes() -> None:
    figures = {"per_class": {"bus": 0.5, "truck": None}}
    done = [_result("synthetic-validation6", "cvp", 0, 0.5, delivered=0.5, **figures)]
    table, *_ = tables.all_tables(SUITES["visda-2017"], done, "bnm", None)
    assert table.columns[2:-3] == "aeroplane bicycle bus car horse knife".split()
    assert _shown(table, "IWAN", published=True)["mean"] == "61.5"


def test_classes_and_their_mean_are_of_the_delivered_model() -> None:
    def result(method: str, seed: int, last: float, delivered: float) -> Result:
        figures = {"per_class": {"bus": delivered}, "delivers_last": last == delivered}
        return _result("synthetic-test", method, seed, last, delivered=delivered, **figures)

    done = [result("cvp", 0, 0.2, 0.6), result("cvp", 1, 0.6, 0.6), result("basic", 0, 0.5, 0.5)]
    methods = ["cvp", "basic"]
    task = ["synthetic-test"]
    table = tables.accuracy_table(SUITES["visda-2017"], done, methods, task, "bnm")
    cvp, basic = (_shown(table, name) for name in methods)
    assert (cvp["checkpoint"], cvp["bus"], cvp["mean"]) == ("delivered", "60.0 ± 0.0", "60.0 ± 0.0")
    assert (basic["checkpoint"], basic["bus"], basic["mean"]) == ("last", "50.0", "50.0")
    notes = [note for note in table.notes if "another model" in note]
    assert ["synthetic-test seed 0 (60.0, last 20.0)" in note for note in notes] == [True]
    assert notes[0].startswith("cvp:")
