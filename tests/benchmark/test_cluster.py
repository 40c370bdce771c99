"""What of the cluster can be told without one; the rest is in test_benchmark_command.py, on a real one."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from certvol.benchmark import cluster, worker
from certvol.benchmark.plan import Job
from certvol.errors import UserError


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(cluster, "import_module", missing)
    with pytest.raises(UserError, match=r"certvol\[ray\]"):
        cluster.RayPool("local", 1, 1.0, lambda job: Path("log"))


def test_a_cluster_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**given: object) -> None:
        raise ConnectionError("nobody answers\nat all")

    monkeypatch.setattr(cluster, "import_module", lambda name: SimpleNamespace(init=refuse))
    with pytest.raises(UserError, match=r"no Ray cluster at ray://far: nobody answers$"):
        cluster.RayPool("ray://far", 1, 1.0, lambda job: Path("log"))


@pytest.mark.parametrize(
    "address", ["127.0.0.1:1", "ray://127.0.0.1:1", "[::1]:1", "nowhere.invalid:6379", "127.0.0.1:99999"]
)
def test_an_address_where_nobody_listens_is_told_at_once(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    def hang(**given: object) -> None:
        raise AssertionError("Ray would have tried for a quarter of an hour")

    monkeypatch.setattr(cluster, "import_module", lambda name: SimpleNamespace(init=hang))
    with pytest.raises(UserError, match="no Ray cluster at"):
        cluster.RayPool(address, 1, 1.0, lambda job: Path("log"))


def test_a_job_in_a_worker_fails_with_its_reason_and_raises_where_its_process_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job("A-B", "cvp", 0, tmp_path / "run", tmp_path / "s.yaml", tmp_path, tmp_path)
    monkeypatch.setattr(worker, "LAUNCHER", ["sh", "-c", "echo certvol: no >&2; exit 2"])
    outcome = cluster.run_job(job, tmp_path / "log")
    assert (outcome.code, outcome.reason) == (2, "no")
    monkeypatch.setattr(worker, "LAUNCHER", ["sh", "-c", "kill -9 $$"])
    with pytest.raises(ChildProcessError, match="SIGKILL"):
        cluster.run_job(job, tmp_path / "log")
