"""Plan the runs of a suite, run them, and write their results and tables."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from certvol.benchmark import preflight, suite_data, tables
from certvol.benchmark.figures import draw_ablations
from certvol.benchmark.plan import (
    BenchmarkJob,
    BenchmarkOptions,
    RunKey,
    check_given,
    read_variants,
    run_name,
    settings_of,
)
from certvol.benchmark.pool import JobOutcome, LocalPool, progress_of, visible_gpus
from certvol.benchmark.ray_pool import LOCAL, RayPool
from certvol.benchmark.results import (
    FAILED,
    STOPPED,
    WAITING,
    Attempts,
    Result,
    read_run,
    results_csv,
)
from certvol.benchmark.suite import Suite
from certvol.benchmark.suites import find_suite, find_tasks
from certvol.benchmark.table_formats import Table, latex, long_csv, markdown
from certvol.data.folders import printable
from certvol.errors import Interrupted, UserError
from certvol.files import held_alone
from certvol.methods import config_classes
from certvol.progress import Reporter, StopSignal, duration, percent
from certvol.runs.folder import RunFolder
from certvol.runs.outputs import check_outside
from certvol.runs.tables import write_text
from certvol.settings import Config, read_settings_file


@dataclass(frozen=True)
class Summary:
    tables: list[Table]
    failures: list[tuple[str, str]]
    """(name, reason) of the requested runs that failed."""
    results: list[Result]


def run(options: BenchmarkOptions, reporter: Reporter, stop_signal: StopSignal) -> Summary:
    """Run a benchmark; raise UserError for any mistake before anything is written."""
    return _Benchmark(options, reporter).run(stop_signal)


class _Benchmark:
    def __init__(self, options: BenchmarkOptions, reporter: Reporter) -> None:
        self.options, self.reporter, self.out = options, reporter, options.out.absolute()
        preflight.check_options(options)
        self.suite = find_suite(options.suite)
        self.tasks = find_tasks(self.suite, options.tasks, options.variant)
        self.configs = _resolve_configs(options, self.suite)
        self.baseline = self._find_baseline()
        self.root = None if self.suite.own_images else options.data
        preflight.check_folder(options.out, self.suite.name, self.root)
        self.data = self.out / "data"
        self.located = suite_data.locate(self.suite, options.data, self.tasks, self.data)
        check_outside(self.out, [domain.folder for domain in self.located.values()])
        self.jobs = self._make_jobs()
        self.attempts = Attempts(self.out / "attempts.jsonl")
        self.earlier = self._find_earlier()
        self.images = self._check_images()
        for job in self.jobs:
            config = self.configs[job.method]
            if not RunFolder(job.folder).finished:
                preflight.check_network(config, device_here=options.ray in (None, LOCAL))
            preflight.check_same_settings(job.folder, config)
        for key in self.earlier:
            folder = self._folder(key)
            if key[1] in self.configs and folder.finished:
                preflight.check_same_settings(folder.path, self.configs[key[1]])
        self.read: dict[RunKey, Result] = {}
        """Finished runs that have been read."""

    def _find_baseline(self) -> str | None:
        """Return the label of `--baseline`, in whatever form its settings are written."""
        name = self.options.baseline
        label = None if name is None else read_variants([name])[0].label
        if label is not None and label not in self.configs:
            known = ", ".join(self.configs)
            raise UserError(f"--baseline {name} is not one of the methods to run: {known}")
        return label

    def _make_jobs(self) -> list[BenchmarkJob]:
        return [
            BenchmarkJob(task, method, seed, self.out, *self._folders_of(task))
            for seed in self.options.seeds
            for task in self.tasks
            for method in self.configs
        ]

    def _folders_of(self, task: str) -> tuple[tuple[Path, ...], Path]:
        """Return the folders of a task's sources and target."""
        letters = self.suite.domains_of(task) or ()
        *sources, target = (
            self.located[letter].for_runs(self.data).absolute() for letter in letters
        )
        return tuple(sources), target

    def _find_earlier(self) -> list[RunKey]:
        """Return the runs of other calls with this folder, which belong in its tables too."""
        found = self.attempts.keys()
        for config in sorted((self.out / "runs").glob("*/*/*/config.yaml")):
            *_, task, method, seed, _ = config.parts
            if seed.isdecimal():
                found.append((task, method, int(seed)))
        asked, methods = {job.key for job in self.jobs}, config_classes()
        return [
            (task, method, seed)
            for task, method, seed in dict.fromkeys(found)
            if (task, method, seed) not in asked
            and self.suite.domains_of(task) is not None
            and method.partition("@")[0] in methods
        ]

    def _check_images(self) -> dict[str, str]:
        """Return each domain's fingerprint; refuse finished runs on other images of a domain."""
        now = suite_data.fingerprints(self.suite, self.located)
        before = preflight.earlier_images(self.out)
        changed = [letter for letter, found in now.items() if before.get(letter, found) != found]
        for key in (*(job.key for job in self.jobs), *self.earlier):
            domains = self.suite.domains_of(key[0]) or ()
            of_run = [letter for letter in changed if letter in domains]
            if of_run and self._folder(key).finished:
                place = printable(str(self.located[of_run[0]].folder))
                raise UserError(
                    f"files in {place} were added, removed, renamed or replaced since the run "
                    f"{run_name(key)}, and means would mix both; undo that, or give another --out"
                )
        return {**before, **now}

    def _folder(self, key: RunKey) -> RunFolder:
        return RunFolder(self.out / run_name(key))

    def run(self, stop_signal: StopSignal) -> Summary:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            place = printable(self.out)
            raise UserError(f"cannot use {place} for the benchmark: {error.strerror}") from None
        refusal = f"another benchmark is writing {self.out}; wait for it, or stop it first"
        with held_alone(self.out / "lock", refusal):
            self._prepare()
            open_jobs = [job for job in self.jobs if not RunFolder(job.folder).finished]
            done = len(self.jobs) - len(open_jobs)
            self.reporter.say(
                f"{self.suite.name}: {len(self.jobs)} runs ({len(self.tasks)} tasks, "
                f"{len(self.configs)} methods, {len(self.options.seeds)} seeds)"
                + (f", {done} of them already done" if done else "")
            )
            stopped = self._run_jobs(open_jobs, stop_signal) if open_jobs else None
            summary = self._write()
            varied = list(dict.fromkeys(word.partition("=")[0] for word in self.options.vary))
            folder = self.out / "figures"
            draw_ablations(folder, self.suite, summary.results, self.tasks, varied)
        if stopped is not None:
            message = "stopped; every run is saved, and the same command resumes"
            raise Interrupted(message, 128 + stopped)
        return summary

    def _prepare(self) -> None:
        """Write what the runs need: images, links and settings."""
        folders = suite_data.prepare(self.suite, self.located, self.data)
        root = None if self.root is None else str(self.root.resolve())
        about = {"suite": self.suite.name, "data": root, "images": self.images}
        write_text(self.out / "benchmark.json", json.dumps(about) + "\n")
        warnings = suite_data.count_warnings(self.suite, folders)
        for warning in suite_data.list_warnings(self.suite, self.located) + warnings:
            self.reporter.warn(warning)
        (self.out / "settings").mkdir(exist_ok=True)
        for label, config in self.configs.items():
            write_text(self.out / "settings" / f"{label}.yaml", config.to_yaml())
        for job in self.jobs:
            job.folder.parent.mkdir(parents=True, exist_ok=True)
            self._drop_state(job)

    def _drop_state(self, job: BenchmarkJob) -> None:
        """Delete what a finished run no longer needs, so that many runs do not fill the disk."""
        folder = RunFolder(job.folder)
        if folder.finished:
            folder.drop_state(weights_of_cycles=self.configs[job.method].guard.keep != "all")

    def _run_jobs(self, jobs: list[BenchmarkJob], stop_signal: StopSignal) -> int | None:
        pool = self._pool()
        self.reporter.start("runs", len(jobs))
        noted = ""

        def running(jobs: Sequence[BenchmarkJob]) -> None:
            nonlocal noted
            words = "; ".join(f"{job.name}: {progress_of(job.folder)}" for job in jobs[:3])
            if words != noted:
                noted = words
                self.reporter.note(words)
                self.reporter.advance(0)

        try:
            with stop_signal.deferred():
                return pool.run(jobs, self._ended, running, stop_signal)
        finally:
            self.reporter.finish()

    def _pool(self) -> LocalPool | RayPool:
        options = self.options
        if options.ray is not None:
            return RayPool(options.ray, options.workers, options.gpu_share)
        auto = all(config.training.device == "auto" for config in self.configs.values())
        return LocalPool(options.workers, visible_gpus() if auto else [])

    def _ended(self, job: BenchmarkJob, outcome: JobOutcome) -> None:
        self.attempts.add(job.key, outcome)
        if outcome.status == "retried":
            self.reporter.warn(f"{job.name}: {outcome.reason}; trying again")
        if outcome.status in ("retried", "stopped"):
            return
        self.reporter.advance(1)
        if outcome.status != "done":
            self.reporter.warn(f"{job.name} failed: {outcome.reason} (log: {job.log})")
        else:
            self._drop_state(job)
            accuracy = percent(self._result(job.key).delivered)
            words = f"{accuracy} %, " if accuracy else ""
            self.reporter.say(f"{job.name}: {words}{duration(outcome.seconds)}")
        self._write()

    def _result(self, key: RunKey) -> Result:
        folder, seconds = self._folder(key), self.attempts.seconds(key)
        if folder.finished:
            if key not in self.read:
                metric, validator = self.suite.metric, self.options.validator
                self.read[key] = read_run(folder.path, Result(*key), metric, validator)
            return replace(self.read[key], seconds=seconds)
        status = STOPPED if folder.holds_a_run else WAITING
        if (reason := self.attempts.failure(key)) is not None:
            status = FAILED + reason
        return Result(*key, status, seconds)

    def _write(self) -> Summary:
        """Write `results.csv` and the tables from what the run folders hold."""
        asked = [self._result(job.key) for job in self.jobs]
        earlier = [result for result in map(self._result, self.earlier) if result.status != WAITING]
        results = self._in_order([*asked, *earlier])
        write_text(self.out / "results.csv", results_csv(results, self.suite.metric))
        # An unfinished run of an earlier call would empty averages.
        shown = self._in_order([*asked, *(run for run in earlier if run.status != STOPPED)])
        made = tables.all_tables(self.suite, shown, self.options.validator, self._baseline(shown))
        for suffix, write in (("md", markdown), ("tex", latex), ("csv", long_csv)):
            write_text(self.out / f"table.{suffix}", write(made))
        failures = [
            (result.name, result.status.removeprefix(FAILED))
            for result in self._in_order(asked)
            if result.status.startswith(FAILED)
        ]
        return Summary(made, failures, results)

    def _in_order(self, results: list[Result]) -> list[Result]:
        """Sort by task as published, then method as requested, then seed."""
        tasks = [*self.suite.all_tasks, *self.tasks]
        tasks += sorted({result.task for result in results})
        methods = [*self.configs, *sorted({result.method for result in results})]
        return sorted(results, key=lambda r: (tasks.index(r.task), methods.index(r.method), r.seed))

    def _baseline(self, results: Sequence[Result]) -> str | None:
        methods = {result.method for result in results}
        usual = [name for name in ("basic", "source_only") if name in methods]
        return self.baseline or (usual[0] if usual else None)


def _resolve_configs(options: BenchmarkOptions, suite: Suite) -> dict[str, Config]:
    """Return the settings of each variant, by its label."""
    variants = read_variants(options.methods, options.vary)
    check_given(options.settings, variants)
    file = read_settings_file(options.config) if options.config is not None else {}
    of_suite = suite.settings
    if options.preset is not None and suite.own_images:  # the preset sets how long runs are
        of_suite = {k: v for k, v in of_suite.items() if not k.startswith("training.")}
    preset = options.preset or suite.preset
    return {
        variant.label: settings_of(variant, preset, of_suite, file, options.settings)
        for variant in variants
    }
