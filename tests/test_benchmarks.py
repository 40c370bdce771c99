"""The scripts in `benchmarks/` run, and count what they say they count."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SPEED = Path(__file__).parents[1] / "benchmarks" / "speed.py"


def _run(out: Path, *words: str, code: int = 0) -> tuple[dict[str, Any], str]:
    small = ["--small", "--device", "cpu", "--seconds", "0.1", "--out", str(out)]
    command = [sys.executable, str(SPEED), *small, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stderr
    return json.loads(out.read_text()), done.stdout


def test_cheap_parts_write_figures_machine_and_commit(tmp_path: Path) -> None:
    found, printed = _run(
        tmp_path / "speed.json", "--only", "labelling,cache,oscillation", "--commit", "abc"
    )
    assert found["commit"] == "abc"
    assert found["machine"]["cores"] >= 1
    assert {"device", "torch"} <= set(found["machine"])
    assert set(found["parts"]) == {"labelling", "cache", "oscillation"}
    assert found["parts"]["cache"]["all_cores"]["images"] == 400
    assert found["parts"]["cache"]["one_core"]["images_per_second"] > 0
    assert found["parts"]["oscillation"]["seconds"] > 0
    assert "building the cache" in printed


def test_labelling_levels_off_but_an_absent_class_costs_the_whole_target(tmp_path: Path) -> None:
    found, _ = _run(tmp_path / "speed.json", "--only", "labelling")
    curve = {
        (p["steps"], p["target"], p["rarest"]): p for p in found["parts"]["labelling"]["curve"]
    }
    assert all(p["share"] == 1 for (_, _, rarest), p in curve.items() if rarest == "absent")
    assert curve[50, 72_000, "2 %"]["most_share"] <= 0.25
    assert curve[5, 72_000, "2 %"]["most_share"] <= 0.05
    assert curve[50, 72_000, "2 %"]["forwarded"] < 1.1 * curve[50, 50_000, "2 %"]["forwarded"]
    # 12 classes, 50 steps of 64 images, rounded up to chunks.
    assert (
        50 * 64
        <= curve[50, 72_000, "balanced"]["forwarded"]
        <= 50 * 64 + 3 * found["parts"]["labelling"]["chunk"]
    )


def test_a_failing_part_is_reported_and_the_others_run(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    words = ("--only", "cache,oscillation,whole_run", "--images", str(tmp_path / "empty"))
    found, printed = _run(tmp_path / "speed.json", *words, code=1)
    assert set(found["parts"]) == {"oscillation"}
    assert "no image" in found["failed"]["cache"]
    assert "end_to_end" in found["failed"]["whole_run"]
    assert "failed: cache" in printed


@pytest.mark.slow
def test_all_parts_run_on_a_cpu(tmp_path: Path) -> None:
    found, printed = _run(tmp_path / "speed.json")
    assert found["failed"] == {}
    parts = found["parts"]
    assert parts["steps"]["cvp M=64"]["step_time_to_basic"] > 1
    for name in ("basic", "cvp M=64"):
        trained = parts["end_to_end"][name]
        assert 0 < trained["images_per_second"] < trained["images_per_second_without_labelling"]
        assert trained["cycles_timed"] == found["sizes"]["cycles"] - 1
    assert parts["conventional"]["cvp M=64"]["cycle_seconds"] > 0
    assert parts["whole_run"]["balanced"]["seconds"] < parts["whole_run"]["absent"]["seconds"]
    assert len(found["bars"]) == 12
    assert "EXTRAPOLATED" in printed


def test_the_memory_of_a_step_is_the_most_that_tensors_hold_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(SPEED.parent))
    method_steps = importlib.import_module("method_steps")

    def work() -> torch.Tensor:
        kept, passing = torch.empty(1000), torch.empty(5000)
        del passing
        return torch.cat([kept, torch.empty(2000)])  # holds 1000, 2000 and 3000 floats at a time

    assert 4 * 6000 <= method_steps.most_held(work) < 4 * 6000 + 1000
    monkeypatch.setattr(
        sys,
        "argv",
        ["method_steps.py", "--methods", "cvp", "--only-memory", "--out", str(tmp_path / "f")],
    )
    method_steps.main()
    found = json.loads((tmp_path / "f").read_text())
    assert found["cvp"]["bytes_to_basic"] > 1 == found["basic"]["bytes_to_basic"]


def test_samples_leave_their_class_as_often_as_a_gaussian_passes_the_boundary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(SPEED.parent))
    reach = importlib.import_module("samples_reach").reach
    classifier = torch.nn.Linear(1, 2, bias=False)
    classifier.weight.data = torch.tensor([[1.0], [-1.0]])
    features_ND = torch.full((50, 1), 2.0)

    around = reach(features_ND, torch.full((50,), 2.0), classifier, samples=2000)
    # The share of a Gaussian above one deviation below its mean.
    assert around.kept == pytest.approx(0.8413, abs=0.005)
    assert (around.feature, around.sigma, around.noise) == (2, 2, 1)
    assert around.added > 0.3

    alone = reach(features_ND, torch.zeros(50), classifier, samples=2)
    assert (alone.kept, alone.noise) == (1, 0)
    assert alone.added == pytest.approx(0, abs=1e-6)
