"""What can be tested without a cluster; test_runner.py has a slow test on a real one."""

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from certvol.benchmark import pool, ray_pool
from certvol.benchmark.plan import BenchmarkJob
from certvol.benchmark.pool import JobOutcome
from certvol.benchmark.ray_pool import RayPool
from certvol.errors import UserError
from certvol.progress import StopSignal


def test_without_ray_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(ray_pool, "import_module", missing)
    with pytest.raises(UserError, match=r"certvol\[ray\]"):
        RayPool("local", 1, 1.0)


def test_a_cluster_that_refuses_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**given: object) -> None:
        raise ConnectionError("nobody answers\nat all")

    monkeypatch.setattr(ray_pool, "import_module", lambda name: SimpleNamespace(init=refuse))
    with pytest.raises(UserError, match=r"no Ray cluster at ray://far: nobody answers; check"):
        RayPool("ray://far", 1, 1.0)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:1", "ray://127.0.0.1:1", "[::1]:1", "nowhere.invalid:6379", "127.0.0.1:99999"],
)
def test_an_unreachable_address_is_reported_at_once(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    def hang(**given: object) -> None:
        raise AssertionError("Ray would have tried for a quarter of an hour")

    monkeypatch.setattr(ray_pool, "import_module", lambda name: SimpleNamespace(init=hang))
    with pytest.raises(UserError, match="no Ray cluster at"):
        RayPool(address, 1, 1.0)


def test_a_job_returns_its_failure_and_is_tried_again_if_its_process_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = BenchmarkJob("A-B", "cvp", 0, tmp_path, (tmp_path,), tmp_path)
    monkeypatch.setattr(pool, "COMMAND", ["sh", "-c", "echo certvol: no >&2; exit 2"])
    outcome = ray_pool.run_job(job)
    assert (outcome.status, outcome.code, outcome.reason) == ("failed", 2, "no")
    monkeypatch.setattr(pool, "COMMAND", ["sh", "-c", "kill -9 $$"])
    outcome = ray_pool.run_job(job)
    assert (outcome.status, outcome.reason) == ("died", "killed by SIGKILL, 3 times")


def test_a_killed_attempt_counts_in_the_time_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = BenchmarkJob("A-B", "cvp", 0, tmp_path, (tmp_path,), tmp_path)
    first = f"{tmp_path}/first"
    script = (
        f"test -e {first} && echo certvol: no >&2 && exit 2; touch {first}; sleep 1; kill -9 $$"
    )
    monkeypatch.setattr(pool, "COMMAND", ["sh", "-c", script])
    outcome = ray_pool.run_job(job)
    assert outcome.status == "failed"
    assert outcome.seconds > 1


class LostWorker(Exception):
    pass


class Cluster:
    """A stand-in for Ray whose workers are killed, half an hour after they began."""

    def __init__(self, killed: int) -> None:
        self.killed, self.submitted = killed, 0
        self.exceptions = SimpleNamespace(RayError=LostWorker)
        self._private = SimpleNamespace(worker=SimpleNamespace(print_to_stdstream=print))

    def init(self, **options: object) -> None: ...
    def shutdown(self) -> None: ...
    def cluster_resources(self) -> dict[str, float]:
        return {}

    def options(self, **given: object) -> Any:
        assert given["max_retries"] == 0
        return SimpleNamespace(remote=self.submit)

    def remote(self, given: object) -> "Cluster":
        return self

    def submit(self, job: BenchmarkJob) -> int:
        begun = job.log.with_suffix(".begun")
        begun.parent.mkdir(parents=True, exist_ok=True)
        begun.touch()
        os.utime(begun, (time.time() - 1800, time.time() - 1800))
        self.submitted += 1
        return self.submitted

    def wait(self, pending: list[int], **given: object) -> tuple[list[int], list[int]]:
        return pending, []

    def get(self, number: int) -> JobOutcome:
        if number <= self.killed:
            raise LostWorker("its socket closed\nlong")
        return JobOutcome("done", 0, 7.0)


@pytest.mark.parametrize("killed", [1, 3])
def test_a_killed_ray_worker_is_replaced_and_its_time_counts(
    killed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, ends = Cluster(killed), list[JobOutcome]()
    monkeypatch.setattr(ray_pool, "import_module", lambda name: cluster)
    pool = RayPool("local", 1, 1.0)
    job = BenchmarkJob("A-B", "cvp", 0, tmp_path, (tmp_path,), tmp_path)
    pool.run([job], lambda _, outcome: ends.append(outcome), lambda jobs: None, StopSignal())
    statuses = [outcome.status for outcome in ends]
    assert statuses == (["retried", "done"] if killed == 1 else ["retried", "retried", "died"])
    assert all(1800 <= outcome.seconds < 3600 for outcome in ends[:killed])
    assert ends[0].reason == "its Ray worker died (its socket closed)"


def test_ray_says_nothing_about_killed_workers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster(0)
    monkeypatch.setattr(ray_pool, "import_module", lambda name: cluster)
    RayPool("local", 1, 1.0)
    cluster._private.worker.print_to_stdstream("(raylet) A worker died")
    assert capsys.readouterr().out == ""
