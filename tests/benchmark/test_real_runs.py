"""Benchmarks with real runs, which are killed and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from certvol.cli._main import run as run_command
from support.tables import rows_of

pytestmark = pytest.mark.slow

TINY = (
    "--training.pretrain_steps 20 --training.cycles 4 --training.cycle_steps 10 "
    "--training.batch_size 32 --model.norm mixed --method.num_samples 4 "
    "--training.checkpoint_seconds 0.3 --training.log_every 2"
).split()


def _start(out: Path, *more: str) -> subprocess.Popen[bytes]:
    words = f"benchmark digits --tasks T-B --methods source_only,cvp --seeds 0,1 --out {out}"
    return subprocess.Popen(
        [sys.executable, "-m", "certvol", *words.split(), *TINY, *more],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 300
    while not condition():
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < until
        time.sleep(0.02)


def _adapts(out: Path) -> bool:
    history = out / "runs" / "T-B" / "cvp" / "0" / "history.jsonl"
    return history.exists() and '"adapt"' in history.read_text()


def _rows_without_seconds(out: Path) -> list[dict[str, str]]:
    return [{**row, "seconds": ""} for row in rows_of(out / "results.csv")]


def _statuses(out: Path) -> set[str]:
    return {row["status"] for row in _rows_without_seconds(out)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("benchmark") / "undisturbed"
    assert _start(out, "--workers", "2").wait(600) == 0
    kept = [*out.glob("runs/*/*/*/checkpoint"), *out.glob("runs/*/*/*/cycles/best-*")]
    assert kept == [], "finished runs keep no checkpoints"
    return out


def test_a_closed_form_method_can_be_asked_for_again(tmp_path: Path, digits: Path) -> None:
    words = f"benchmark digits --data {digits} --out {tmp_path} --tasks T-B --methods coral"
    words += " --training.pretrain_steps 20 --training.batch_size 32 --device cpu"
    for _ in range(2):
        assert run_command(words.split()) == 0
    assert _statuses(tmp_path) == {"done"}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the runs by /proc")
def test_a_killed_and_a_stopped_benchmark_end_with_the_same_tables(
    undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "disturbed"
    killed = _start(out, "--workers", "2")
    _wait_until(lambda: _adapts(out), killed)
    workers = _children(killed.pid)
    os.killpg(killed.pid, signal.SIGKILL)
    os.kill(workers[0], signal.SIGKILL)  # the other gets a SIGTERM from the system, and saves
    killed.communicate()
    assert not (out / "runs/T-B/cvp/1/model.safetensors").exists(), "nothing was left to do"

    stopped = _start(out, "--workers", "2")  # at once: a run still holds its folder
    _wait_until(lambda: len(_children(stopped.pid)) > 0, stopped)
    os.kill(stopped.pid, signal.SIGINT)
    message = stopped.communicate(timeout=300)[1].decode()
    assert stopped.returncode == 130, message
    assert "the same command resumes" in message

    assert _start(out, "--workers", "2").wait(600) == 0
    for name in ("table.md", "table.tex", "table.csv"):
        assert (undisturbed / name).read_bytes() == (out / name).read_bytes(), name
    assert _rows_without_seconds(undisturbed) == _rows_without_seconds(out)
    assert _statuses(out) == {"done"}
    attempts = [json.loads(line) for line in (out / "attempts.jsonl").read_text().splitlines()]
    assert {attempt["status"] for attempt in attempts} <= {"done", "stopped"}


def test_ray_resumes_the_run_of_a_killed_worker(undisturbed: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    out = tmp_path / "ray"
    process = _start(out, "--ray", "local", "--workers", "2")
    _wait_until(lambda: _adapts(out), process)
    os.kill(_ray_worker_of(out / "logs/T-B/cvp/0.log"), signal.SIGKILL)
    message = process.communicate(timeout=600)[1].decode()
    assert process.returncode == 0, message
    assert "trying again" in message
    attempts = [json.loads(line) for line in (out / "attempts.jsonl").read_text().splitlines()]
    assert [each["seconds"] > 0 for each in attempts if each["status"] == "retried"] == [True]
    environment = json.loads((out / "runs/T-B/cvp/0/environment.json").read_text())
    assert len(environment["resumed"]) == 1
    assert (undisturbed / "table.md").read_bytes() == (out / "table.md").read_bytes()
    assert _statuses(out) == {"done"}


def _ray_worker_of(log: Path) -> int:
    """Return the Ray worker whose child is the run that prints to `log`."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if (
                    b"certvol.cli._benchmark_worker" in words
                    and (entry / "fd" / "1").readlink() == log
                ):
                    return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    raise AssertionError("the run has no process")
