"""Charts as tables, and lines that are thinned."""

import pytest

from certvol.report.charts import Axis, Bars, Lines, Series, evenly_spread, line


def test_a_long_line_is_thinned_and_keeps_its_ends() -> None:
    long = line("rate", "plain", ((float(i), 1 / i) for i in range(1, 9001)))
    assert len(long.xs) == len(long.ys) == 1500
    assert (long.xs[0], long.xs[-1]) == (1, 9000)
    chart = Lines(id="", title="", caption="", x=Axis("step"), y=Axis("rate"), lines=[long])
    head, rows = chart.table()
    assert head == ["step", "rate"]
    assert len(rows) == 24
    assert (rows[0], rows[-1][0]) == (["1", "1"], "9,000")


def test_unknown_points_are_left_out_and_a_single_point_is_not_a_line() -> None:
    short = line("a", "0", [(1.0, 2.0), (2.0, None), (None, 3.0)])
    longer = line("b", "1", [(1.0, 0.5), (2.0, None), (3.0, 0.25)])
    assert (short.xs, short.ys) == ([1.0], [2.0])
    x, y = Axis("step"), Axis("share", percent=True)
    chart = Lines(id="", title="", caption="", x=x, y=y, lines=[short, longer])
    assert chart.table() == (["step", "b"], [["1", "50.0 %"], ["3", "25.0 %"]])
    assert not chart.empty
    assert Lines(id="", title="", caption="", x=x, y=y, lines=[short]).empty


def test_bars_without_labels_are_empty() -> None:
    chart = Bars(
        id="",
        title="",
        caption="",
        labels=[],
        label_head="",
        series=[Series("", "0", [])],
        x=Axis(""),
    )
    assert chart.empty


@pytest.mark.parametrize(
    ("count", "most", "chosen"), [(0, 5, []), (1, 5, [0]), (3, 5, [0, 1, 2]), (9, 3, [0, 4, 8])]
)
def test_positions_are_spread_evenly(count: int, most: int, chosen: list[int]) -> None:
    assert evenly_spread(count, most) == chosen
