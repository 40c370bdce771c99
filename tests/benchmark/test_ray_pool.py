"""What can be tested without a cluster; test_runner.py has a slow test on a real one."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from certvol.benchmark import ray_pool, worker
from certvol.benchmark.plan import BenchmarkJob
from certvol.benchmark.ray_pool import RayPool
from certvol.errors import UserError


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
    monkeypatch.setattr(worker, "COMMAND", ["sh", "-c", "echo certvol: no >&2; exit 2"])
    outcome = ray_pool.run_job(job)
    assert (outcome.status, outcome.code, outcome.reason) == ("failed", 2, "no")
    monkeypatch.setattr(worker, "COMMAND", ["sh", "-c", "kill -9 $$"])
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
    monkeypatch.setattr(worker, "COMMAND", ["sh", "-c", script])
    outcome = ray_pool.run_job(job)
    assert outcome.status == "failed"
    assert outcome.seconds > 1
