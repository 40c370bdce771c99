"""Jobs on a Ray cluster. Data, settings and run folders must lie where every machine of it sees them, by the same paths."""

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from certvol.benchmark.grid import TRIES, Ended, UnderWay
from certvol.benchmark.plan import Job
from certvol.benchmark.worker import Outcome, Worker
from certvol.errors import UserError
from certvol.stopping import StopSignal

LOCAL = "local"
CONNECT_SECONDS = 5.0
LOOK = 1.0  # seconds between two looks at the cluster


def run_job(job: Job, log: Path) -> Outcome:
    """Inside a worker of Ray. Ray has set CUDA_VISIBLE_DEVICES; a worker that dies takes its run down, with its state saved."""
    worker = Worker({"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")})
    try:
        worker.start(job, log)
        while (outcome := worker.outcome()) is None:
            time.sleep(0.2)
    finally:
        worker.end()
    if outcome.is_death:  # of its process, not of the worker: Ray tries again what raises
        raise ChildProcessError(outcome.reason)
    return outcome


def _check_reachable(address: str) -> None:
    """Ray itself would try for a quarter of an hour."""
    found = re.fullmatch(r"(?:ray://)?\[?([^/\s]+?)\]?:(\d{1,5})", address)
    if found is None:
        return  # `auto` or another word of Ray's own
    try:
        socket.create_connection((found[1], int(found[2])), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError, UnicodeError) as error:
        reason = str(getattr(error, "strerror", None) or error).lower()
        raise UserError(f"no Ray cluster at {address}: {reason}") from None


class RayPool:
    """`workers`: at most so many jobs at a time on a local cluster; a given one takes as many as its resources allow.

    `gpu_share`: of one GPU per job, where the cluster has GPUs.
    """

    def __init__(self, address: str, workers: int, gpu_share: float, logs: Callable[[Job], Path]) -> None:
        try:
            ray: Any = import_module("ray")
        except ImportError:
            raise UserError("--ray needs Ray: install certvol with its extra, `pip install 'certvol[ray]'`") from None
        self.ray = ray
        self.logs = logs
        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        if address != LOCAL:
            _check_reachable(address)
        try:
            if address == LOCAL:
                ray.init(address="local", num_cpus=workers, **quiet)
            else:
                ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(f"no Ray cluster at {address}: {first}") from None
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        self.remote: Any = ray.remote(run_job).options(
            num_cpus=1,
            num_gpus=gpu_share if has_gpus else 0,
            max_retries=TRIES - 1,
            retry_exceptions=[ChildProcessError],
        )

    def run(self, jobs: Sequence[Job], ended: Ended, under_way: UnderWay, stop_signal: StopSignal) -> int | None:
        pending = {self.remote.remote(job, self.logs(job)): job for job in jobs}
        begun = time.monotonic()
        try:
            while pending:
                if (number := stop_signal()) is not None:
                    self._stop(pending)
                    return number
                ready, _ = self.ray.wait(list(pending), timeout=LOOK)
                for reference in ready:
                    ended(pending[reference], self._outcome(reference, begun))
                    del pending[reference]
                under_way([job for job in pending.values() if (job.folder / "lock").exists()])
            return None
        finally:
            self.ray.shutdown()

    def _outcome(self, reference: Any, begun: float) -> Outcome:
        try:
            outcome: Outcome = self.ray.get(reference)
            return outcome
        except ChildProcessError as error:
            return Outcome(-signal.SIGKILL, time.monotonic() - begun, f"{error}, {TRIES} times")
        except self.ray.exceptions.RayError as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            return Outcome(1, time.monotonic() - begun, f"its worker died {TRIES} times ({first})")

    def _stop(self, pending: dict[Any, Job]) -> None:
        """Workers end their runs, which save their state."""
        for reference in pending:
            self.ray.cancel(reference)
        self.ray.wait(list(pending), num_returns=len(pending), timeout=60)
