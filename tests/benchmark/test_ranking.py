"""Mean ranks, Friedman's test, the critical difference and the command that joins benchmarks."""

import csv
from pathlib import Path

import pytest

from certvol.benchmark import ranking
from certvol.benchmark.results import read_cpu_seconds
from support.scripts import run_script

SCORES = {
    "good": {"a": 0.9, "b": 0.8, "c": 0.7, "d": 0.9},
    "middle": {"a": 0.8, "b": 0.8, "c": 0.6, "d": 0.8},
    "bad": {"a": 0.1, "b": 0.2, "c": 0.3, "d": 0.4},
}


@pytest.mark.parametrize(
    ("methods", "tasks", "expected"), [(4, 14, 1.25), (5, 30, 1.11), (10, 10, 4.28)]
)
def test_the_critical_difference_is_nemenyis(methods: int, tasks: int, expected: float) -> None:
    assert ranking.critical_difference(methods, tasks) == pytest.approx(expected, abs=0.01)


def test_ties_share_ranks_and_the_best_comes_first() -> None:
    found = ranking.rank(SCORES)
    assert found is not None
    assert [(s.method, s.mean_rank) for s in found.standings] == [
        ("good", (1 + 1.5 + 1 + 1) / 4),
        ("middle", (2 + 1.5 + 2 + 2) / 4),
        ("bad", 3.0),
    ]
    assert found.standings[2].low == found.standings[2].high == 3.0
    assert found.standings[0].low <= found.standings[0].mean_rank <= found.standings[0].high
    assert found.standings[0].accuracy == pytest.approx(0.825)


def test_friedmans_statistic_is_that_of_the_formula() -> None:
    """Without ties: 12 N / (k (k + 1)) * (sum of squared mean ranks - k (k + 1)^2 / 4)."""
    scores = {**SCORES, "middle": {**SCORES["middle"], "b": 0.7}}
    found = ranking.rank(scores)
    assert found is not None
    squares = sum(standing.mean_rank**2 for standing in found.standings)
    chi2 = 12 * 4 / (3 * 4) * (squares - 3 * 16 / 4)
    assert chi2 == pytest.approx(8.0)
    assert found.p == pytest.approx(2.718281828**-4, rel=1e-6), "two degrees of freedom: e^(-x/2)"


def test_equal_methods_do_not_differ() -> None:
    found = ranking.rank({name: {"a": 0.5, "b": 0.5} for name in "xyz"})
    assert found is not None
    assert found.p == 1.0
    assert all(found.near_best(standing) for standing in found.standings)


def test_methods_that_lack_a_task_are_named_but_not_ranked() -> None:
    found = ranking.rank({**SCORES, "partial": {"a": 1.0}})
    assert found is not None
    assert found.incomplete == ["partial"]
    text = " ".join(ranking.ranking_table(found, {"good": 12.4}).notes)
    assert "partial" in text
    assert ranking.rank({"one": {"a": 1.0, "b": 1.0}, "two": {"a": 1.0, "b": 1.0}}) is None
    assert ranking.rank({name: {"a": 1.0} for name in "xyz"}) is None, "one task"


def test_the_table_shows_cost_where_it_is_known() -> None:
    found = ranking.rank(SCORES)
    assert found is not None
    table = ranking.ranking_table(found, {"good": 12.4})
    assert [row.cells[-1].shown() for row in table.rows] == ["12", "", ""]
    assert [row.cells[2].shown() for row in table.rows] == ["yes", "yes", "no"]


def test_processor_time_adds_up_what_a_run_noted(tmp_path: Path) -> None:
    file = tmp_path / "timing.jsonl"
    assert read_cpu_seconds(file) is None
    file.write_text('{"phase": "extract", "seconds": 3.0}\n')
    assert read_cpu_seconds(file) is None
    file.write_text('{"phase": "all", "seconds": 3.0, "cpu_seconds": 2.5}\n' * 2)
    assert read_cpu_seconds(file) == 5.0


def _folder(root: Path, name: str, accuracies: dict[str, float], backbone: str) -> Path:
    folder = root / name
    (folder / "settings").mkdir(parents=True)
    lines = ["task,method,seed,metric,last,selected,oracle,seconds,status,run"]
    for method, accuracy in accuracies.items():
        (folder / "settings" / f"{method}.yaml").write_text(f"model:\n  backbone: {backbone}\n")
        for task in ("A-W", "W-A"):
            for seed in (0, 1):
                run = f"runs/{task}/{method}/{seed}"
                (folder / run).mkdir(parents=True)
                (folder / run / "timing.jsonl").write_text(
                    '{"phase": "all", "seconds": 9, "cpu_seconds": 7}\n'
                )
                last = accuracy + seed / 100
                lines.append(f"{task},{method},{seed},accuracy,{last},,,9.0,done,{run}")
    (folder / "results.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_the_command_joins_benchmarks_of_several_backbones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accuracies = {"basic": 0.5, "cvp": 0.6, "coral": 0.4}
    first = _folder(tmp_path, "office-31-rn", accuracies, "resnet50")
    second = _folder(tmp_path, "office-31-inc", {**accuracies, "jda": 0.9}, "inception_v3")
    files = ("--out", tmp_path / "r.md", "--csv", tmp_path / "r.csv")
    assert run_script("ranking", first, second, *files) == 0
    printed = capsys.readouterr().out
    assert "ranking of 3 methods over 4 tasks" in printed
    assert "Not ranked, because a task is missing: jda" in printed
    assert (tmp_path / "r.md").read_text() in printed
    with (tmp_path / "r.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows[0] == {
        "task": "office-31 resnet50 A-W",
        "method": "basic",
        "seeds": "2",
        "accuracy": "0.505000",
        "cpu_seconds": "7.0",
    }


def test_the_same_methods_with_other_settings_need_a_suffix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accuracies = {"basic": 0.5, "cvp": 0.6}
    first = _folder(tmp_path, "office-31-common", accuracies, "resnet50")
    second = _folder(tmp_path, "office-31-rate", {"cvp": 0.7}, "resnet50")
    assert run_script("ranking", first, second) == 2
    assert "name one as DIR=SUFFIX" in capsys.readouterr().err
    run_script("ranking", first, f"{second}=@rate")
    assert "| cvp@rate | 1.00 |" in capsys.readouterr().out
