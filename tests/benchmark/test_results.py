import csv
from pathlib import Path

import numpy as np
import pytest

from certvol.benchmark.results import Result, read_run, results_csv
from support.run_folders import write_run

SCORES = {"bnm": [1.0, 3.0, 2.0], "entropy": [0.5, 0.9, 0.7], "mutual_information": [1.0, 1.0, 0.5]}


def read(run: Path, validator: str = "bnm") -> Result:
    return read_run(run, Result("A-B", "cvp", 0), "accuracy", validator)


def test_last_choice_and_oracle_are_read(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.3, 0.9, 0.6, 0.7], SCORES)
    by_bnm = read(run)
    assert (by_bnm.last, by_bnm.selected, by_bnm.oracle) == pytest.approx((0.7, 0.6, 0.9))
    assert by_bnm.backbone == "small_cnn"
    assert read(run, "entropy").selected == pytest.approx(0.9), "less entropy is better"
    assert read(run, "mutual_information").selected == pytest.approx(0.6), "the newest of equals"
    assert read(run, "sigma").selected is None, "this run has no sigma"


def test_a_collapsed_cycle_is_not_chosen(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.3, 0.9, 0.6, 0.7], SCORES, collapsed=(2,))
    assert read(run).selected == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("delivered", "adapted", "expected"),
    [
        ("last", 0.65, (0.65, 0.55, 0.85)),  # 0.7 on the watched images, 0.05 less on all
        ("cycle 2", 0.65, (0.75, 0.65, 0.95)),
        ("pretrained", 0.2, (0.6, 0.5, 0.8)),
    ],
)
def test_other_cycles_are_measured_from_the_delivered_one(
    tmp_path: Path, delivered: str, adapted: float, expected: tuple[float, ...]
) -> None:
    found = read(write_run(tmp_path / "run", [0.3, 0.9, 0.6, 0.7], SCORES, (delivered, adapted)))
    assert (found.last, found.selected, found.oracle) == pytest.approx(expected)
    assert found.delivered == pytest.approx(adapted)
    assert found.delivers_last == (delivered == "last")


def test_the_suites_metric_is_read(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.3, 0.9, 0.6, 0.7], SCORES)
    found = read_run(run, Result("A-B", "cvp", 0), "mean_class_accuracy", "bnm")
    assert found.oracle == pytest.approx(0.45)


def test_a_run_that_does_not_adapt_has_one_accuracy(tmp_path: Path) -> None:
    found = read(write_run(tmp_path / "run", [0.4], delivered=("pretrained", None)))
    assert (found.last, found.selected, found.oracle, found.cycles) == (0.4, 0.4, 0.4, None)


def test_ensv_compares_the_cycles_with_their_mean_prediction(tmp_path: Path) -> None:
    def labels(*labels: int) -> np.ndarray:
        return np.eye(3, dtype=np.float32)[list(labels)]

    kept = [labels(0, 0, 0), labels(0, 0, 1), labels(0, 1, 1), labels(0, 1, 2)]
    run = write_run(tmp_path / "run", [0.1, 0.2, 0.3, 0.4], {}, probabilities=kept)
    # The mean without the model before adaptation predicts 0 1 1, as cycle 2 does.
    assert read(run, "ensv").selected == pytest.approx(0.3)


@pytest.mark.parametrize("file", ["metrics.json", "cycles/scores.jsonl", "cycles/0001.safetensors"])
@pytest.mark.parametrize("content", ["[]\n{", None])
def test_damaged_and_missing_files_fail_the_run(
    tmp_path: Path, file: str, content: str | None
) -> None:
    run = write_run(tmp_path / "run", [0.3, 0.9, 0.6], {"bnm": [1, 2]})
    (run / file).unlink()
    if content is not None:
        (run / file).write_text(content)
    found = read(run)
    assert found.status.startswith("failed: cannot read its files")
    assert f"remove {run} and run the same command again" in found.status
    assert found.last is None


def test_results_csv_has_the_documented_columns(tmp_path: Path) -> None:
    done = Result("A-B", "cvp", 0, "done", 1.25, 0.5, None, 2 / 3)
    failed = Result("A-B", "basic", 1, "failed: no\nspace")
    rows = list(csv.DictReader(results_csv([done, failed], "accuracy").splitlines()))
    columns = "task,method,seed,metric,last,selected,oracle,seconds,status,run"
    assert list(rows[0]) == columns.split(",")
    expected = "A-B cvp 0 accuracy 0.500000  0.666667 1.2 done runs/A-B/cvp/0"
    assert list(rows[0].values()) == expected.split(" ")
    assert rows[1]["status"] == "failed: no space"
