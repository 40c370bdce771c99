from pathlib import Path

import pytest

from certvol.benchmark.figures import draw_ablations, read_ablation, title
from certvol.benchmark.plan import Variant, parse_label
from certvol.benchmark.results import Result
from certvol.benchmark.suites import SUITES

SETTING = "method.num_samples"
TASKS = ["P-S", "R-S"]


def _runs(value: str, seeds: int, tasks: list[str] = TASKS, last: float = 0.5) -> list[Result]:
    label = f"cvp@{SETTING}={value}"
    return [
        Result(task, label, seed, "done", last=last + 0.01 * seed)
        for task in tasks
        for seed in range(seeds)
    ]


@pytest.mark.parametrize(
    "variant", [Variant("cvp"), Variant("cvp", (("method.a", "0.001"), ("model.norm", "auto")))]
)
def test_a_label_is_read_as_it_was_written(variant: Variant) -> None:
    assert parse_label(variant.label) == variant


def test_an_ablation_shows_complete_seeds_in_the_order_of_the_values() -> None:
    results = [*_runs("128", 2), *_runs("32", 3), *_runs("64", 1), *_runs("16", 2, ["P-S"])]
    ablation = read_ablation(results, TASKS, SETTING)
    assert ablation.values == ["32", "64", "128"], "16 lacks a task"
    line = ablation.lines["cvp"]
    assert {value: cell.count for value, cell in line.items()} == {"32": 3, "64": 1, "128": 2}
    assert line["32"].mean == pytest.approx(0.51)
    assert line["64"].deviation is None
    assert read_ablation(results, TASKS, "method.samples_weight").lines == {}
    words = " ".join(title(ablation, SUITES["adaptiope"], TASKS).split())
    assert words == "adaptiope, P-S R-S, 1 to 3 seeds; bars: standard deviation over seeds"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["128", "32", "1e3"], ["32", "128", "1e3"]),
        (["true", "false", "10", "9"], ["10", "9", "false", "true"]),
    ],
)
def test_numbers_are_sorted_by_size_and_words_by_letter(
    values: list[str], expected: list[str]
) -> None:
    results = [run for value in values for run in _runs(value, 1)]
    assert read_ablation(results, TASKS, SETTING).values == expected


@pytest.mark.parametrize("values", ["32 64 128 256", "0 0.001 0.002 1", "true false", "4"])
def test_the_same_runs_give_the_same_figures(values: str, tmp_path: Path) -> None:
    results = [
        run
        for number, value in enumerate(values.split())
        for run in _runs(value, 3, last=0.5 + 0.03 * number)
    ]
    drawn = [
        draw_ablations(tmp_path / name, SUITES["adaptiope"], results, TASKS, [SETTING])
        for name in ("one", "other")
    ]
    assert [path.name for path in drawn[0]] == [f"{SETTING}.png", f"{SETTING}.pdf"]
    for one, other in zip(*drawn, strict=True):
        assert one.read_bytes() == other.read_bytes()
