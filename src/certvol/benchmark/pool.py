"""Run many jobs at once in processes of this machine; a job that fails does not stop the others."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Literal

from certvol.benchmark.plan import BenchmarkJob
from certvol.progress import StopSignal

TRIES = 3  # for a run whose process dies or is stopped from outside
POLL_SECONDS = 0.2
COMMAND = [sys.executable, "-m", "certvol.cli._benchmark_worker"]
STOP_CODES = (130, 143, -signal.SIGINT, -signal.SIGTERM)
GRACE = 60.0  # seconds for a run to save its state when it is asked to stop


@dataclass(frozen=True)
class JobOutcome:
    """The end of an attempt at a job."""

    status: Literal["done", "failed", "died", "retried", "stopped"]
    """`died`: ended from outside; `retried`: died and will be tried again; `stopped`: by us."""
    code: int
    """The exit code; negative: killed by that signal."""
    seconds: float
    reason: str = ""


Ended = Callable[[BenchmarkJob, JobOutcome], None]
Running = Callable[[Sequence[BenchmarkJob]], None]


class Worker:
    """A process that runs one job after another; after a failure the next job gets a new one."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.process: subprocess.Popen[bytes] | None = None
        self.job: BenchmarkJob | None = None
        """The job that is running."""
        self.asked_to_stop = False

    def start(self, job: BenchmarkJob) -> None:
        self.job, self.started = job, time.monotonic()
        job.log.parent.mkdir(parents=True, exist_ok=True)
        self.log_start = job.log.stat().st_size if job.log.exists() else 0
        if self.process is None or self.process.poll() is not None:
            self.process = self._launch(job.log)
        sources = [str(source) for source in job.sources]
        places = [str(place) for place in (job.log, job.folder, job.settings)]
        order = [*places, sources, str(job.target), str(job.seed)]
        with suppress(BrokenPipeError):  # it has just died: `outcome` will say so
            _pipe(self.process.stdin).write(json.dumps(order).encode() + b"\n")

    def _launch(self, log: Path) -> subprocess.Popen[bytes]:
        if self.process is not None:
            _pipe(self.process.stdin).close()
            _pipe(self.process.stdout).close()
        self.asked_to_stop = False
        with log.open("ab") as file:
            return subprocess.Popen(
                [*COMMAND, str(os.getpid())],
                bufsize=0,  # an order is sent at once, and no reply is read ahead of `select`
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env={**os.environ, **self.environment},
                start_new_session=True,  # Ctrl-C reaches the benchmark only, which stops its runs
            )

    def outcome(self) -> JobOutcome | None:
        """Return how the job ended; None while it runs."""
        code = self._exit_code()
        if code is None or self.job is None:
            return None
        if code != 0:
            self._wait()
        seconds, job, self.job = time.monotonic() - self.started, self.job, None
        if code == 0:
            return JobOutcome("done", code, seconds)
        if code < 0 or code in STOP_CODES:
            if self.asked_to_stop:
                return JobOutcome("stopped", code, seconds)
            by = signal.Signals(-code if code < 0 else code - 128).name
            return JobOutcome("died", code, seconds, f"killed by {by}")
        return JobOutcome("failed", code, seconds, self._last_message(job.log))

    def _exit_code(self) -> int | None:
        """Return the exit code that the process replied, or its own if it ended without a reply."""
        if self.process is None:
            return None
        ended = self.process.poll()
        replies = _pipe(self.process.stdout)
        if select.select([replies], [], [], 0)[0] and (reply := replies.readline()):
            return int(reply)
        return ended

    def _last_message(self, log: Path) -> str:
        with log.open("rb") as file:
            file.seek(self.log_start)
            lines = file.read().decode("utf-8", "replace").splitlines()
        lines = [line.strip() for line in lines if line.strip()]
        messages = [line for line in lines if line.startswith("certvol: ")]
        return (messages or lines or ["see its log"])[-1].removeprefix("certvol: ")

    def ask_to_stop(self) -> None:
        """Ask once: a run that is asked twice stops without saving."""
        if not self.asked_to_stop and self.process is not None and self.process.poll() is None:
            self.asked_to_stop = True
            self.process.terminate()

    def end(self) -> None:
        """Ask the process to stop, give it time to save, then kill it."""
        if self.process is not None:
            self.ask_to_stop()
            self._wait()

    def _wait(self) -> None:
        assert self.process is not None
        try:
            self.process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def progress_of(folder: Path) -> str:
    """Describe the progress of a run, from the last line of its history."""
    try:
        with (folder / "history.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2048))
            line = json.loads(file.read().splitlines()[-1])
            return f"{line['phase']} step {line['step']}"
    except (OSError, IndexError):
        return "starting"
    except ValueError:  # half a line
        return "running"


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
        """Run all jobs; return the signal that stopped it, or None.

        It calls `ended` with the outcome of each attempt, and `running` regularly with the jobs
        that run at the moment.
        """
        waiting = list(jobs)
        tries: Counter[BenchmarkJob] = Counter()
        workers = [Worker(self._environment(slot)) for slot in range(min(self.workers, len(jobs)))]
        try:
            while waiting or any(worker.job for worker in workers):
                if (number := stop_signal()) is not None:
                    return number
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
