"""Run many jobs at once on this machine; a job that fails does not stop the others."""

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from certvol.benchmark.plan import BenchmarkJob
from certvol.benchmark.worker import JobOutcome, Worker
from certvol.progress import StopSignal

TRIES = 3  # for a run whose process dies or is stopped from outside
POLL_SECONDS = 0.2

Ended = Callable[[BenchmarkJob, JobOutcome], None]
Running = Callable[[Sequence[BenchmarkJob]], None]


class Pool(Protocol):
    def run(
        self, jobs: Sequence[BenchmarkJob], ended: Ended, running: Running, stop_signal: StopSignal
    ) -> int | None:
        """Run all jobs; return the signal that stopped it, or None.

        It calls `ended` with the outcome of each attempt, and `running` regularly with the jobs
        that run at the moment.
        """


class LocalPool:
    """Runs up to `workers` jobs at a time, and assigns the GPUs in turn."""

    def __init__(self, workers: int, gpus: Sequence[str]) -> None:
        self.workers, self.gpus = workers, gpus

    def _environment(self, slot: int) -> dict[str, str]:
        environment = {}
        if len(self.gpus) > 1:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus[slot % len(self.gpus)]
        if self.workers > 1 and "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // self.workers))
        return environment

    def run(
        self, jobs: Sequence[BenchmarkJob], ended: Ended, running: Running, stop_signal: StopSignal
    ) -> int | None:
        waiting = list(jobs)
        tries: Counter[BenchmarkJob] = Counter()
        workers = [Worker(self._environment(slot)) for slot in range(min(self.workers, len(jobs)))]
        try:
            while waiting or any(worker.job for worker in workers):
                if (signal := stop_signal()) is not None:
                    return signal
                for worker in workers:
                    job = worker.job
                    if job is None and waiting:
                        tries[waiting[0]] += 1
                        worker.start(waiting.pop(0))
                    elif job is None:
                        worker.end()  # frees its memory for the others
                    elif (outcome := worker.outcome()) is not None:
                        if outcome.status == "died" and tries[job] < TRIES:
                            waiting.insert(0, job)
                            outcome = replace(outcome, status="retried")
                        ended(job, outcome)
                running([worker.job for worker in workers if worker.job is not None])
                time.sleep(POLL_SECONDS)
            return None
        finally:
            _stop(workers, ended)


def _stop(workers: Sequence[Worker], ended: Ended) -> None:
    for worker in workers:
        worker.ask_to_stop()  # ask all of them first, so that they save at the same time
    for worker in workers:
        job = worker.job
        worker.end()
        if job is not None and (outcome := worker.outcome()) is not None:
            # Ctrl-C may have reached a run before we asked it to stop.
            ended(job, replace(outcome, status="stopped") if outcome.status == "died" else outcome)


def visible_gpus() -> list[str]:
    """Return the GPUs, named as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]
