"""The scripts in `benchmarks/` run, and count what they say they count."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support.scripts import run_script, script


def _speed(out: Path, *words: object) -> dict[str, Any]:
    small = ["--small", "--device", "cpu", "--seconds", "0.1", "--out", out]
    code = run_script("speed", *small, *words)
    found: dict[str, Any] = json.loads(out.read_text())
    assert code == (1 if found["failed"] else 0)
    return found


def test_cheap_parts_write_figures_machine_and_commit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--only", "labelling,cache,oscillation", "--commit", "abc")
    found = _speed(tmp_path / "speed.json", *words)
    assert found["failed"] == {}
    assert found["commit"] == "abc"
    assert found["machine"]["cores"] >= 1
    assert {"device", "torch"} <= set(found["machine"])
    parts = found["parts"]
    assert set(parts) == {"labelling", "cache", "oscillation"}
    assert parts["cache"]["all_cores"]["images"] == 400
    assert parts["cache"]["one_core"]["images_per_second"] > 0
    assert parts["oscillation"]["seconds"] > 0
    assert "building the cache" in capsys.readouterr().out
    curve = {(p["steps"], p["target"], p["rarest"]): p for p in parts["labelling"]["curve"]}
    # Labelling levels off, but an absent class costs the whole target.
    assert all(p["share"] == 1 for (_, _, rarest), p in curve.items() if rarest == "absent")
    assert curve[50, 72_000, "2 %"]["most_share"] <= 0.25
    assert curve[5, 72_000, "2 %"]["most_share"] <= 0.05
    forwarded = {key: p["forwarded"] for key, p in curve.items()}
    assert forwarded[50, 72_000, "2 %"] < 1.1 * forwarded[50, 50_000, "2 %"]
    # 12 classes, 50 steps of 64 images, rounded up to chunks.
    most = 50 * 64 + 3 * parts["labelling"]["chunk"]
    assert 50 * 64 <= forwarded[50, 72_000, "balanced"] <= most


def test_a_failing_part_is_reported_and_the_others_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    words = ("--only", "cache,oscillation,whole_run", "--images", str(tmp_path / "empty"))
    found = _speed(tmp_path / "speed.json", *words)
    assert set(found["parts"]) == {"oscillation"}
    assert "no image" in found["failed"]["cache"]
    assert "end_to_end" in found["failed"]["whole_run"]
    assert "failed: cache" in capsys.readouterr().out


@pytest.mark.slow
def test_all_parts_run_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _speed(tmp_path / "speed.json")
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
    assert "EXTRAPOLATED" in capsys.readouterr().out


def test_the_memory_of_a_step_is_the_most_that_tensors_hold_at_a_time(tmp_path: Path) -> None:
    def work() -> torch.Tensor:
        kept, passing = torch.empty(1000), torch.empty(5000)
        del passing
        return torch.cat([kept, torch.empty(2000)])  # holds 1000, 2000 and 3000 floats at a time

    assert 4 * 6000 <= script("method_steps").most_held(work) < 4 * 6000 + 1000
    words = ("--methods", "cvp", "--only-memory", "--out", tmp_path / "f")
    run_script("method_steps", *words)
    found = json.loads((tmp_path / "f").read_text())
    assert found["cvp"]["bytes_to_basic"] > 1 == found["basic"]["bytes_to_basic"]


def test_samples_leave_their_class_as_often_as_a_gaussian_passes_the_boundary() -> None:
    reach = script("samples_reach").reach
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
