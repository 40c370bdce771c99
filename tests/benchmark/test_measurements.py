import json
from pathlib import Path
from typing import Any

import pytest

from certvol.benchmark.measurements import read_measurements, sigma_course
from certvol.runs.folder import RunFolder
from certvol.scores.uncertainty import COMPARED_WITH_SIGMA


def history(source: list[float], target: list[float], before: float = 2.0) -> list[dict[str, Any]]:
    """Return lines of `history.jsonl`: two per cycle, ten steps apart."""
    lines: list[dict[str, Any]] = [
        {"phase": "pretrain", "cycle": 0, "step": step, "sigma_target": None}
        | {"sigma_source": 9.0 if step <= 50 else before}
        for step in range(10, 101, 10)
    ]
    for i, (one, other) in enumerate(zip(source, target, strict=True)):
        line = {"phase": "adapt", "cycle": 1 + i // 2, "step": 10 * (i + 1)}
        lines.append({**line, "sigma_source": one, "sigma_target": other})
    return lines


def test_the_course_of_sigma_by_hand() -> None:
    found = sigma_course(history([1.0, 1.5, 2.0, 3.0], [0.5, 0.7, 1.0, 2.0]))
    assert found["drop source"] == pytest.approx(1 - 1.25 / 2)
    assert found["drop target"] == pytest.approx(1 - 0.6 / 2)
    assert found["lead of source"] == pytest.approx(1.0 - 0.75)


def test_a_sigma_that_never_falls_or_never_returns() -> None:
    found = sigma_course(history([2.0, 2.5, 3.0, 3.0], [1.0, 1.0, 1.0, 1.9]))
    assert found["drop source"] < 0
    assert found["lead of source"] == 1.0, "at once, against never"
    late = sigma_course(history([3.0, 1.0, 2.0, 2.0], [3.0, 1.0, 1.0, 2.0]))
    assert late["lead of source"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    "lines",
    [
        [{**line, "sigma_source": None, "sigma_target": None} for line in history([1], [1])],
        history([], []),
        history([1.0], [1.0], before=0.0),
        [],
    ],
)
def test_runs_without_sigma_or_adaptation_have_no_course(lines: list[dict[str, Any]]) -> None:
    assert sigma_course(lines) == {}


def test_measurements_are_read_as_far_as_a_run_has_them(tmp_path: Path) -> None:
    assert read_measurements(RunFolder(tmp_path)) == {}
    pearson = {name: 0.9 - 0.1 * i for i, name in enumerate(COMPARED_WITH_SIGMA)}
    found: dict[str, Any] = {"oscillation": {"total": 12.5}, "correlations": {"pearson": pearson}}
    found["measures"] = {"sigma": {"median": 1.5}}
    (tmp_path / "evaluation.json").write_text(json.dumps(found))
    correlations = {f"correlation {name}": value for name, value in pearson.items()}
    expected = {"oscillation": 12.5, "sigma": 1.5, **correlations}
    assert read_measurements(RunFolder(tmp_path)) == pytest.approx(expected)
    found = {"correlations": None, "measures": {"probability": {"median": 0.5}}}
    (tmp_path / "evaluation.json").write_text(json.dumps(found))
    assert read_measurements(RunFolder(tmp_path)) == {}
