"""Runs many jobs at once, here or on a cluster. One that fails stops no other."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from certvol.benchmark.plan import Job
from certvol.benchmark.worker import Outcome, Process
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
        waiting = [(job, 1) for job in jobs]
        slots: list[tuple[Process, int] | None] = [None] * self.workers
        try:
            while waiting or any(slots):
                if (signal := stop_signal()) is not None:
                    self._stop(slots, ended)
                    return signal
                for number, held in enumerate(slots):
                    if held is None and waiting:
                        job, attempt = waiting.pop(0)
                        slots[number] = Process(job, self.logs(job), self._environment(number)), attempt
                    elif held is not None and (outcome := held[0].outcome()) is not None:
                        process, attempt = held
                        slots[number] = None
                        again = outcome.is_death and attempt < TRIES
                        if again:
                            waiting.insert(0, (process.job, attempt + 1))
                        ended(process.job, replace(outcome, tried_again=again))
                under_way([held[0].job for held in slots if held is not None])
                time.sleep(GLANCE)
            return None
        finally:
            self._stop(slots, ended)

    @staticmethod
    def _stop(slots: list[tuple[Process, int] | None], ended: Ended) -> None:
        for held in slots:
            if held is not None:
                held[0].ask_to_stop()  # all of them first: each may take a moment to save
        for number, held in enumerate(slots):
            if held is not None:
                held[0].end()
                slots[number] = None
                if (outcome := held[0].outcome()) is not None:
                    ended(held[0].job, replace(outcome, asked_to_stop=True))  # by the same signal, where not by us


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    if told is not None:
        return [name.strip() for name in told.split(",") if name.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]
