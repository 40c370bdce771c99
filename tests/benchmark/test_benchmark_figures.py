"""Figures of ablations: which runs they show, where, and what they say."""

from pathlib import Path

import pytest

from certvol.benchmark import figures
from certvol.benchmark.plan import Variant, variant_of
from certvol.benchmark.results import Result
from certvol.benchmark.suites import SUITES

SETTING = "method.num_samples"


def _runs(value: str, seeds: int, tasks: tuple[str, ...] = ("P-S", "R-S"), last: float = 0.5) -> list[Result]:
    label = f"cvp@{SETTING}={value}"
    return [
        Result(task, label, seed, "accuracy", "r", "done", last=last + 0.01 * seed)
        for task in tasks
        for seed in range(seeds)
    ]


def test_a_label_is_read_as_it_was_made() -> None:
    for variant in (Variant("cvp"), Variant("cvp", (("method.a", "0.001"), ("model.norm", "auto")))):
        assert variant_of(variant.label) == variant


def test_all_runs_of_the_folder_are_shown_in_the_order_of_the_values() -> None:
    results = [*_runs("128", 2), *_runs("32", 3), *_runs("64", 1), *_runs("16", 2, ("P-S",))]
    lines = figures.ablation_lines(results, ["P-S", "R-S"], SETTING)
    assert [(p.value, p.seeds) for p in lines["cvp"]] == [("32", 3), ("64", 1), ("128", 2)], "16 lacks a task"
    assert lines["cvp"][0].mean == pytest.approx(0.51)
    assert lines["cvp"][1].deviation is None
    assert figures.ablation_lines(results, ["P-S", "R-S"], "method.samples_weight") == {}
    words = figures.title(lines, SUITES["adaptiope"], ["P-S", "R-S"])
    assert " ".join(words.split()) == "adaptiope, P-S R-S, 1 to 3 seeds; bars: standard deviation over seeds"


@pytest.mark.parametrize(
    ("values", "expected"),
    [(["128", "32", "1e3", "32"], ["32", "128", "1e3"]), (["true", "false", "10", "9"], ["10", "9", "false", "true"])],
)
def test_values_are_sorted(values: list[str], expected: list[str]) -> None:
    assert figures.sorted_values(values) == expected


@pytest.mark.parametrize(
    ("numbers", "logarithmic"),
    [
        ([32, 64, 128, 256], True),
        ([0.1, 0.25, 0.5, 0.75, 1], False),
        ([0.001, 0.01, 0.02, 1], True),
        ([0.1, 1], False),
        ([4], False),
        ([0, 0.1, 1], False),
    ],
)
def test_the_axis_is_the_one_on_which_values_lie_further_apart(numbers: list[float], logarithmic: bool) -> None:
    assert figures.is_logarithmic(numbers) == logarithmic


@pytest.mark.parametrize("values", ["32 64 128 256", "0.1 0.25 0.5 0.75 1", "0 0.001 0.002 1", "true false", "4"])
def test_figures_are_drawn_and_alike(values: str, tmp_path: Path) -> None:
    results = [run for i, value in enumerate(values.split()) for run in _runs(value, 3, last=0.5 + 0.03 * i)]
    drawn = [
        figures.draw_ablations(tmp_path / name, SUITES["adaptiope"], results, ["P-S", "R-S"], [SETTING])
        for name in ("one", "other")
    ]
    for one, other in zip(*drawn, strict=True):
        assert one.stat().st_size > 1000
        assert one.read_bytes() == other.read_bytes()
