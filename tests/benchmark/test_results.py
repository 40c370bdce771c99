import csv
from pathlib import Path

import numpy as np
import pytest

from certvol.benchmark import results
from certvol.benchmark.results import Result
from run_folders import write_run

ASKED = Result("A-B", "cvp", 0, "accuracy", "runs/A-B/cvp/0", "done", 1.5)
SCORES = {"bnm": [1.0, 3.0, 2.0], "entropy": [0.5, 0.9, 0.7], "mutual_information": [1.0, 1.0, 0.5]}


def test_last_choice_and_oracle(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.3, 0.9, 0.6, 0.7], SCORES)
    by_bnm = results.read_run(run, ASKED, "bnm")
    assert (by_bnm.last, by_bnm.selected, by_bnm.oracle) == pytest.approx((0.7, 0.6, 0.9))
    assert by_bnm.backbone == "small_cnn"
    assert results.read_run(run, ASKED, "entropy").selected == pytest.approx(0.9), "the least entropy"
    assert results.read_run(run, ASKED, "mutual_information").selected == pytest.approx(0.6), "the newest of equals"
    assert results.read_run(run, ASKED, "sigma").selected is None, "this run has no sigma"


def test_a_collapsed_cycle_is_not_chosen(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.3, 0.9, 0.6, 0.7], SCORES, collapsed=(2,))
    assert results.read_run(run, ASKED, "bnm").selected == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("delivered", "adapted", "expected"),
    [
        ("last", 0.65, (0.65, 0.55, 0.85)),  # 0.7 on the watched images: all are 0.05 lower on the whole target
        ("cycle 2", 0.65, (0.75, 0.65, 0.95)),
        ("pretrained", 0.2, (0.6, 0.5, 0.8)),
    ],
)
def test_other_cycles_are_measured_from_the_delivered_one(
    tmp_path: Path, delivered: str, adapted: float, expected: tuple[float, ...]
) -> None:
    run = write_run(tmp_path / "run", [0.3, 0.9, 0.6, 0.7], SCORES, delivered, adapted)
    found = results.read_run(run, ASKED, "bnm")
    assert (found.last, found.selected, found.oracle) == pytest.approx(expected)
    assert found.delivered == pytest.approx(adapted)
    assert (found.other_delivered is None) == (delivered == "last")


def test_the_suites_metric_is_read(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.3, 0.9, 0.6, 0.7], SCORES)
    asked = Result("A-B", "cvp", 0, "mean_class_accuracy", "r", "done")
    assert results.read_run(run, asked, "bnm").oracle == pytest.approx(0.45)


def test_a_run_that_does_not_adapt_has_one_figure(tmp_path: Path) -> None:
    found = results.read_run(write_run(tmp_path / "run", [0.4], delivered="pretrained"), ASKED, "bnm")
    assert (found.last, found.selected, found.oracle, found.cycles) == (0.4, 0.4, 0.4, None)


def test_the_ensemble_of_all_cycles(tmp_path: Path) -> None:
    def labels(*labels: int) -> np.ndarray:
        return np.eye(3, dtype=np.float32)[list(labels)]

    kept = [labels(0, 0, 0), labels(0, 0, 1), labels(0, 1, 1), labels(0, 1, 2)]
    found = results.read_run(write_run(tmp_path / "run", [0.1, 0.2, 0.3, 0.4], {}, probabilities=kept), ASKED, "ensv")
    assert found.selected == pytest.approx(0.3)  # the mean without the start is 0 1 1, which is cycle 2


@pytest.mark.parametrize("file", ["metrics.json", "cycles/scores.jsonl", "cycles/0001.safetensors"])
def test_damaged_files_are_a_failure_with_a_reason(tmp_path: Path, file: str) -> None:
    run = write_run(tmp_path / "run", [0.3, 0.9, 0.6], {"bnm": [1, 2]})
    (run / file).write_text("[]\n{" if file.endswith("l") else "{")
    found = results.read_run(run, ASKED, "bnm")
    assert found.status.startswith("failed: its files are damaged")
    assert f"remove {run} and give the same command again" in found.status
    assert found.last is None


@pytest.mark.parametrize(
    ("evaluation", "said"),
    [
        ('{"labelled": false}', "failed: the target's folders do not tell its labels: name them"),
        ('{"labelled": true}', "failed: its metrics.json is missing; remove"),
        (None, "failed: its metrics.json is missing, and no evaluation.json tells"),
        ("[]", "failed: its metrics.json is missing, and no evaluation.json tells"),
    ],
)
def test_missing_figures_and_missing_labels_are_told_apart(tmp_path: Path, evaluation: str | None, said: str) -> None:
    run = write_run(tmp_path / "run", [0.3, 0.9, 0.6], {"bnm": [1, 2]})
    (run / "metrics.json").unlink()
    if evaluation is not None:
        (run / "evaluation.json").write_text(evaluation)
    status = results.read_run(run, ASKED, "bnm").status
    assert status.startswith(said)
    assert status.endswith(f"remove {run} and give the same command again")


def test_a_missing_cycle_is_no_missing_label(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.3, 0.9, 0.6], {"bnm": [1, 2]})
    (run / "cycles" / "0001.safetensors").unlink()
    assert results.read_run(run, ASKED, "bnm").status.startswith("failed: its 0001.safetensors is missing; remove")


def known(task: str, method: str) -> bool:
    return task == "A-B" and method in ("basic", "cvp")


def test_results_csv_is_as_designed_and_read_again(tmp_path: Path) -> None:
    failed = Result("A-B", "basic", 1, "accuracy", "runs/A-B/basic/1", "failed: no\nspace", None)
    done = Result("A-B", "cvp", 0, "accuracy", "runs/A-B/cvp/0", "done", 1.25, 0.5, None, 2 / 3)
    (tmp_path / "results.csv").write_text(results.results_csv([done, failed]))
    with (tmp_path / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == "task,method,seed,metric,last,selected,oracle,seconds,status,run".split(",")
    assert list(rows[0].values()) == "A-B cvp 0 accuracy 0.500000  0.666667 1.2 done runs/A-B/cvp/0".split(" ")
    assert rows[1]["status"] == "failed: no space"
    assert results.earlier_runs(tmp_path, known) == [("A-B", "cvp", 0), ("A-B", "basic", 1)]
    assert results.earlier_runs(tmp_path / "nothing", known) == []
    odd = Result("..", "a/../../b", 0, "accuracy", "r", "done")
    (tmp_path / "results.csv").write_text(results.results_csv([odd, done]))
    assert results.earlier_runs(tmp_path, known) == [("A-B", "cvp", 0)], "a name must not lead elsewhere"
    (tmp_path / "results.csv").write_text("x,y\n1,2\n")
    assert results.earlier_runs(tmp_path, known) == []


def test_damage_to_results_csv_loses_no_run(tmp_path: Path) -> None:
    for name in ("A-B/cvp/0", "A-B/cvp/1", "A-B/cvp/x", "A-B/cvp/01", "A-B.bak/cvp/0", "A-B/cvp.old/0"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.yaml").touch()
    (tmp_path / "runs/B-A/cvp/0").mkdir(parents=True)  # was not begun
    rows = [Result("A-B", "basic", 2, "accuracy", "r", "done"), Result("A-B", "cvp", 1, "accuracy", "r", "done")]
    text = results.results_csv(rows).replace("A-B,cvp,1", "A-B,cvp,one")
    (tmp_path / "results.csv").write_text(text)
    assert results.earlier_runs(tmp_path, known) == [("A-B", "basic", 2), ("A-B", "cvp", 0), ("A-B", "cvp", 1)]
    (tmp_path / "results.csv").write_bytes(b"\xff\x00garbage")
    assert results.earlier_runs(tmp_path, known) == [("A-B", "cvp", 0), ("A-B", "cvp", 1)]
