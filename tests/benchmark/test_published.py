import pytest

from certvol.benchmark.published import (
    published,
    published_losses,
    published_rows,
    published_tables,
)
from certvol.benchmark.suites import SUITES


def _row(suite: str, columns: list[str], name: str, task: str | None = None) -> list[str]:
    rows, _ = published_rows(SUITES[suite], columns, task)
    return [cell.shown() for cell in next(row for row in rows if row.name == name).cells]


def test_published_tables_are_of_suites() -> None:
    assert set(published()["suites"]) <= set(SUITES)


@pytest.mark.parametrize("name", published()["suites"])
def test_published_means_are_those_of_their_columns(name: str) -> None:
    suite = SUITES[name]
    groups = [set(suite.tasks), *map(set, suite.variants.values())]
    for table in published_tables(suite):
        columns, task = table["columns"], table.get("task")
        assert set(columns) in ([set(suite.classes_of(task))] if task else groups)
        for row in table["rows"]:
            *values, mean = row["values"]
            assert len(values) == len(columns)
            assert all(value is None or 0 <= value <= 100 for value in row["values"])
            if None not in values:
                assert mean == pytest.approx(sum(values) / len(values), abs=0.11)


def test_rows_are_those_of_the_tasks_shown() -> None:
    office, visda = SUITES["office-31"], SUITES["visda-2017"]
    whole = {row.name for row in published_rows(office, ["A-W"])[0]}
    partial = {row.name for row in published_rows(office, ["A-W10", "D-W10"])[0]}
    assert "CDTrans-B" in whole - partial
    assert "PADA" in partial - whole
    both = published_rows(office, ["A-W", "A-W10"])
    assert {row.name for row in both[0]} == whole | partial
    assert len(both[1]) == 2
    by_task = {
        task: {row.name for row in published_rows(visda, visda.classes_of(task), task)[0]}
        for task in visda.all_tasks
    }
    assert "SDAN" in by_task["synthetic-test"]
    assert "MIC (SDAT)" in by_task["synthetic-validation"]
    assert "IWAN" in by_task["synthetic-validation6"]
    assert published_rows(visda, visda.class_names)[0] == []


def test_rows_show_backbone_selection_tasks_and_their_mean() -> None:
    tail = ["", ""]  # the choice by a validator and the oracle
    average_only = _row("office-31", ["A-W", "W-A"], "FixBi")
    assert average_only == ["unknown", "unknown", "", "", "91.4 (of all 6)", *tail]
    two = _row("office-caltech", ["A-C", "A-D"], "CVP")
    assert two == ["resnet50", "last", "94.3", "98.1", "96.2", *tail]
    whole = _row("office-caltech", list(SUITES["office-caltech"].tasks), "CORAL")
    assert whole[-3] == "92.6", "as printed"
    assert published_rows(SUITES["digits"], ["F-R"]) == ([], [])


def test_the_average_has_its_printed_deviation() -> None:
    tasks = list(SUITES["modern-office-31"].tasks)
    assert _row("modern-office-31", tasks, "CAN")[-3] == "86.9 ± 0.7"
    assert _row("modern-office-31", tasks, "CVP")[-3] == "86.6"
    assert _row("modern-office-31", ["S-W"], "CAN")[2:4] == ["89.7 ± 0.5", "89.7"]


def test_classes_of_visda_have_their_own_backbones() -> None:
    visda = SUITES["visda-2017"]
    rows, _ = published_rows(visda, visda.class_names, "synthetic-test")
    backbones = {row.name: row.cells[0].text for row in rows}
    assert backbones["SE-152"] == "resnet152"
    assert backbones["BUPT"] == "unknown"
    assert backbones["CVP"] == "resnet101"
    assert rows[-1].cells[-3].shown() == "90.1"


def _basic_losses(*tasks: str) -> list[str]:
    rows, _ = published_losses(SUITES["adaptiope"], tasks)
    return [cell.shown() for cell in rows[0].cells[2:]]


def test_the_papers_losses_are_averaged_over_its_own_tasks() -> None:
    assert _basic_losses("P-S", "R-S", "S-P", "S-R")[-2:] == ["68.6", "223.5"]
    assert _basic_losses("P-S", "R-S")[-2:] == ["69.8", "206.6"]
    more = _basic_losses(*SUITES["adaptiope"].tasks)
    assert more[:2] == ["", "69.4"]
    assert more[-2:] == ["68.6 (of P-S, R-S, S-P, S-R)", "223.5 (of P-S, R-S, S-P, S-R)"]
    assert published_losses(SUITES["office-31"], ["A-W"]) == ([], [])
