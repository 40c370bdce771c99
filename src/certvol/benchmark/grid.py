"""Runs many jobs at once, here or on a cluster. One that fails stops no other."""

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from certvol.benchmark.plan import Job
from certvol.benchmark.worker import Outcome, Worker
from certvol.stopping import StopSignal

TRIES = 3  # of a run whose process dies, or is stopped by somebody else; one that says why it failed is not tried again
GLANCE = 0.2  # seconds between two looks at the processes

Ended = Callable[[Job, Outcome], None]
UnderWay = Callable[[Sequence[Job]], None]


class Pool(Protocol):
    """`run` goes on until all jobs have ended or the signal comes, which it returns."""

    def run(self, jobs: Sequence[Job], ended: Ended, under_way: UnderWay, stop_signal: StopSignal) -> int | None: ...


class LocalPool:
    """`workers` jobs at a time on this machine, its GPUs dealt out in turn."""

    def __init__(self, workers: int, logs: Callable[[Job], Path], gpus: Sequence[str]) -> None:
        self.workers, self.logs, self.gpus = workers, logs, gpus

    def _environment(self, slot: int) -> dict[str, str]:
        environment = {}
        if len(self.gpus) > 1:
            environment["CUDA_VISIBLE_DEVICES"] = self.gpus[slot % len(self.gpus)]
        if self.workers > 1 and "OMP_NUM_THREADS" not in os.environ:
            environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // self.workers))
        return environment

    def run(self, jobs: Sequence[Job], ended: Ended, under_way: UnderWay, stop_signal: StopSignal) -> int | None:
        waiting = list(jobs)
        tries: Counter[Job] = Counter()
        workers = [Worker(self._environment(slot)) for slot in range(min(self.workers, len(jobs)))]
        try:
            while waiting or any(worker.job for worker in workers):
                if (signal := stop_signal()) is not None:
                    self._stop(workers, ended)
                    return signal
                for worker in workers:
                    job = worker.job
                    if job is None and waiting:
                        tries[waiting[0]] += 1
                        worker.start(waiting[0], self.logs(waiting.pop(0)))
                    elif job is None:
                        worker.end()  # its memory is for the others
                    elif (outcome := worker.outcome()) is not None:
                        again = outcome.is_death and tries[job] < TRIES
                        if again:
                            waiting.insert(0, job)
                        ended(job, replace(outcome, tried_again=again))
                under_way([worker.job for worker in workers if worker.job is not None])
                time.sleep(GLANCE)
            return None
        finally:
            self._stop(workers, ended)

    @staticmethod
    def _stop(workers: Sequence[Worker], ended: Ended) -> None:
        for worker in workers:
            worker.ask_to_stop()  # all of them first: each may take a moment to save
        for worker in workers:
            job = worker.job
            worker.end()
            if job is not None and (outcome := worker.outcome()) is not None:
                ended(job, replace(outcome, asked_to_stop=True))  # by the same signal, where not by us


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    if told is not None:
        return [name.strip() for name in told.split(",") if name.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]
