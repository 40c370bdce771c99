"""Play the runs of a benchmark: they end at once."""

import signal

from certvol.benchmark.plan import BenchmarkJob
from certvol.benchmark.pool import Ended, JobOutcome
from support.run_folders import write_run

ACCURACY = {"source_only": 0.5, "basic": 0.6, "cvp": 0.7}


class Played:
    """Runs that end at once; `ends` maps a job's name to how it ends."""

    def __init__(self) -> None:
        self.jobs: list[BenchmarkJob] = []
        self.ends: dict[str, JobOutcome] = {}

    @property
    def names(self) -> list[str]:
        return [job.name for job in self.jobs]

    def play(
        self, jobs: list[BenchmarkJob], ended: Ended, running: object, stop_signal: object
    ) -> int | None:
        for job in jobs:
            self.jobs.append(job)
            outcome = self.ends.get(job.name, JobOutcome("done", 0, 1.0))
            if outcome.status == "stopped":
                return signal.SIGTERM
            if outcome.status == "done":
                _write_finished_run(job)
            ended(job, outcome)
        return None


def _write_finished_run(job: BenchmarkJob) -> None:
    accuracy = ACCURACY[job.method.partition("@")[0]] + job.seed / 100
    adapts = "source" not in job.method
    write_run(job.folder, [0.5, accuracy + 0.02, accuracy] if adapts else [accuracy])
    (job.folder / "config.yaml").write_text(job.settings.read_text())
