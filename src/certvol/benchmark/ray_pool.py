"""Run jobs on a Ray cluster.

Every machine must see data, settings and run folders under the same paths.
"""

import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from certvol.benchmark.plan import BenchmarkJob
from certvol.benchmark.pool import TRIES, Ended, JobOutcome, LocalPool, Running
from certvol.errors import UserError, first_line
from certvol.progress import StopSignal

LOCAL = "local"
CONNECT_SECONDS = 5.0
LOOK_SECONDS = 1.0  # seconds between checks of the cluster


def run_job(job: BenchmarkJob) -> JobOutcome:
    """Run one job inside a Ray worker, which has set CUDA_VISIBLE_DEVICES.

    If the Ray worker dies, the run's process saves its state and ends too. If that process dies, it
    is started again here, and the time of every attempt counts.
    """
    begun = _begun_file(job)
    begun.parent.mkdir(parents=True, exist_ok=True)
    begun.touch()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    attempts: list[JobOutcome] = []
    try:
        here = LocalPool(1, gpus=())
        here.run([job], lambda _, ended: attempts.append(ended), lambda jobs: None, StopSignal())
    finally:
        begun.unlink(missing_ok=True)
    last = attempts[-1]
    reason = f"{last.reason}, {TRIES} times" if last.status == "died" else last.reason
    return replace(last, seconds=sum(each.seconds for each in attempts), reason=reason)


def _begun_file(job: BenchmarkJob) -> Path:
    """Return the file that a job touches when it begins; a killed Ray worker leaves it behind."""
    return job.log.with_suffix(".begun")


def _silence(ray: Any) -> None:
    """Keep Ray from printing that a worker was killed, which it has no option for."""
    module: Any = getattr(getattr(ray, "_private", None), "worker", None)
    if hasattr(module, "print_to_stdstream"):
        module.print_to_stdstream = lambda *given, **named: None


def _check_reachable(address: str) -> None:
    """Try to connect, because Ray itself would try for a quarter of an hour."""
    found = re.fullmatch(r"(?:ray://)?\[?([^/\s]+?)\]?:(\d{1,5})", address)
    if found is None:
        return  # `auto`, or another word that Ray knows
    try:
        socket.create_connection((found[1], int(found[2])), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError, UnicodeError) as error:
        reason = str(getattr(error, "strerror", None) or error).lower()
        raise UserError(f"no Ray cluster at {address}: {reason}; check --ray") from None


class RayPool:
    """Runs jobs on a cluster, as many at a time as its resources allow.

    `workers` limits a cluster started here; `gpu_share` is each job's share of a GPU.
    """

    def __init__(self, address: str, workers: int, gpu_share: float) -> None:
        try:
            ray: Any = import_module("ray")
        except ImportError:
            raise UserError("--ray needs Ray; run `pip install 'certvol[ray]'`") from None
        self.ray = ray
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        options = {"address": address, "log_to_driver": False, "logging_level": "ERROR"}
        if address == LOCAL:
            options |= {"num_cpus": workers, "include_dashboard": False}
        else:
            _check_reachable(address)
        try:
            ray.init(**options)
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            raise UserError(
                f"no Ray cluster at {address}: {first_line(error)}; check --ray"
            ) from None
        _silence(ray)
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        self.remote: Any = ray.remote(run_job).options(
            num_cpus=1,
            num_gpus=gpu_share if has_gpus else 0,
            max_retries=0,  # `run` tries again, because Ray would lose the attempt's time
        )

    def run(
        self, jobs: Sequence[BenchmarkJob], ended: Ended, running: Running, stop_signal: StopSignal
    ) -> int | None:
        """Run all jobs, as `LocalPool.run` does."""
        pending = {self.remote.remote(job): job for job in jobs}
        tries = Counter(jobs)
        try:
            while pending:
                if (number := stop_signal()) is not None:
                    self._stop(list(pending))
                    return number
                ready, _ = self.ray.wait(list(pending), timeout=LOOK_SECONDS)
                for reference in ready:
                    job = pending.pop(reference)
                    outcome = self._outcome(reference, job, tries[job] < TRIES)
                    if outcome.status == "retried":
                        tries[job] += 1
                        pending[self.remote.remote(job)] = job
                    ended(job, outcome)
                running([job for job in pending.values() if (job.folder / "lock").exists()])
            return None
        finally:
            self.ray.shutdown()

    def _outcome(self, reference: Any, job: BenchmarkJob, may_retry: bool) -> JobOutcome:
        """Return how an attempt ended; a lost Ray worker is a reason to try again."""
        try:
            outcome: JobOutcome = self.ray.get(reference)
            return outcome
        except self.ray.exceptions.RayError as error:
            reason = f"its Ray worker died ({first_line(error)})"
        seconds = 0.0
        with suppress(OSError):  # it was lost before the job began
            seconds = max(0.0, time.time() - _begun_file(job).stat().st_mtime)
            _begun_file(job).unlink()
        if may_retry:
            return JobOutcome("retried", -signal.SIGKILL, seconds, reason)
        return JobOutcome("died", -signal.SIGKILL, seconds, f"{reason}, {TRIES} times")

    def _stop(self, pending: list[Any]) -> None:
        """Let the workers end their runs, which save their state."""
        for reference in pending:
            self.ray.cancel(reference)
        self.ray.wait(pending, num_returns=len(pending), timeout=60)
