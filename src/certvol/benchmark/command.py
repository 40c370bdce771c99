"""`certvol benchmark`: plans the runs of a suite, has them run, and writes their tables."""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from certvol.benchmark import suites, tables
from certvol.benchmark.cluster import LOCAL, RayPool
from certvol.benchmark.figures import draw_ablations
from certvol.benchmark.grid import LocalPool, Pool, visible_gpus
from certvol.benchmark.plan import (
    Job,
    Methods,
    Variant,
    check_given,
    check_same_data,
    check_same_settings,
    read_variants,
    settings_of,
)
from certvol.benchmark.results import DONE, STOPPED, WAITING, Result, earlier_runs, read_run, results_csv
from certvol.benchmark.worker import STOP_CODES, Outcome, standing
from certvol.config import read_settings_file
from certvol.data.folders import printable
from certvol.errors import Interrupted, UserError
from certvol.file_systems import held_alone
from certvol.preflight import check_network
from certvol.reporting import Reporter
from certvol.selection import SELECTORS
from certvol.stopping import StopSignal
from certvol.tables import write_text
from certvol.training.checkpoint import append_line
from certvol.training.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line asks for."""

    suite: str
    out: Path
    data: Path | None = None
    methods: Sequence[str] = ("source_only", "basic", "cvp")
    tasks: Sequence[str] | None = None
    split: str | None = None
    seeds: Sequence[int] = (0,)
    preset: str | None = None
    config: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    vary: Sequence[str] = ()
    baseline: str | None = None
    selector: str = "mutual_information"
    workers: int = 1
    ray: str | None = None
    gpu_share: float = 1.0


@dataclass(frozen=True)
class Summary:
    tables: list[tables.Table]
    failures: list[tuple[str, str]]
    """(name of the job, reason) of those that were asked for."""
    results: list[Result]


class Benchmark:
    """Its folder: `results.csv`, the tables, `runs/<task>/<method>/<seed>/`, `logs/` of the same shape, and `settings/`."""

    def __init__(self, request: Request, methods: Methods, reporter: Reporter) -> None:
        self.request, self.methods, self.reporter, self.out = request, methods, reporter, request.out
        self.suite = suites.find_suite(request.suite)
        self.asked_tasks = suites.find_tasks(self.suite, request.tasks, request.split)
        self.variants = read_variants(request.methods, request.vary, methods)
        self._check_request()
        file = read_settings_file(request.config) if request.config is not None else {}
        check_given(request.settings, self.variants, methods)
        preset = request.preset or self.suite.preset
        of_suite = self.suite.settings if request.preset is None or not self.suite.embedded else _kept(self.suite)
        self.configs = {
            variant.label: settings_of(variant, methods, preset, of_suite, file, request.settings)
            for variant in self.variants
        }
        taken = self._check_folder()
        work = self.out / "data"
        located = suites.locate(self.suite, request.data, self.asked_tasks, work)
        unused = request.data is not None and all(domain.folder.parent != request.data for domain in located.values())
        if self.suite.embedded and unused:
            places = (printable(str(place)) for place in (request.data, work))
            reporter.warn("{} does not hold the digits, which are made: they go into {}".format(*places))
        folders = {letter: domain.given_as(work) for letter, domain in located.items()}
        self.jobs = [
            self._job(task, variant, seed, folders)
            for seed in request.seeds
            for task in self.asked_tasks
            for variant in self.variants
        ]
        asked = {job.key for job in self.jobs}
        self.earlier = [key for key in earlier_runs(self.out, self._knows) if key not in asked]
        """Of other calls with this folder: the tables hold them too."""
        for key in [*(job.key for job in self.jobs), *self.earlier]:
            folder = self.out / self._name(key)
            if key[1] in self.configs and (key in asked or RunFolder(folder).finished):
                check_same_settings(folder, self.configs[key[1]], methods)
        for label in dict.fromkeys(job.method for job in self.jobs if not RunFolder(job.folder).finished):
            check_network(self.configs[label], device_here=request.ray in (None, LOCAL))
        if not self.suite.embedded:  # what certvol makes itself is the same anywhere
            self._check_same_data(located, work)
        self._make_folder()
        suites.prepare(self.suite, located, work)
        if not taken:  # last of all: a mistaken call leaves the folder free
            write_text(self.out / "benchmark.json", json.dumps({"suite": self.suite.name}) + "\n")
        for remark in suites.count_remarks(self.suite, folders):
            reporter.warn(remark)
        self.seconds, self.reasons = _attempts_so_far(self.out / "attempts.jsonl")
        self.ends: dict[tuple[str, str, int], str] = {}
        self.read: dict[tuple[str, str, int], Result] = {}

    def _check_request(self) -> None:
        request = self.request
        if not request.seeds or min(request.seeds) < 0:
            raise UserError("--seeds needs whole numbers from 0, such as 0,1,2")
        if request.workers < 1:
            raise UserError(f"--workers should be 1 or more, found {request.workers}")
        if not 0 < request.gpu_share <= 1:
            raise UserError(f"--gpu-share is a share above 0 and at most 1, found {request.gpu_share}")
        if request.selector not in SELECTORS:
            raise UserError(f"there is no validator `{request.selector}` (validators: {', '.join(SELECTORS)})")
        labels = {word: variant.label for variant in self.variants for word in (variant.label, variant.words)}
        if request.baseline is not None and request.baseline not in labels:
            shown = ", ".join(dict.fromkeys(labels.values()))
            raise UserError(f"--baseline {request.baseline} is not among the methods to run: {shown}")
        self.baseline = None if request.baseline is None else labels[request.baseline]

    def _check_folder(self) -> bool:
        """Whether it is this suite's already; UserError where it is something else's."""
        if RunFolder(self.out).holds_a_run:
            raise UserError(f"{self.out} is a run itself; give a folder for the benchmark's runs as --out")
        mark = self.out / "benchmark.json"
        try:
            before = json.loads(mark.read_text(encoding="utf-8"))["suite"] if mark.exists() else None
        except OSError as error:
            raise UserError(f"cannot use {self.out} for the benchmark: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{mark} is damaged; give another --out") from None
        if before not in (None, self.suite.name):
            raise UserError(f"{self.out} holds the benchmark {before}, not {self.suite.name}; give another --out")
        return before is not None

    def _knows(self, task: str, label: str) -> bool:
        """Whether a folder of these names can be one of its runs, and no copy that somebody put beside them."""
        letters = task.split("-")
        of_suite = (len(letters) == 2 and {*letters} <= {*self.suite.letters}) or task in self.suite.splits.values()
        return of_suite and label.partition("@")[0] in self.methods

    def _make_folder(self) -> None:
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot use {self.out} for the benchmark: {error.strerror}") from None

    def _check_same_data(self, located: Mapping[str, suites.Located], work: Path) -> None:
        now = suites.usual_folders(self.suite, self.request.data)
        now |= {letter: domain.origin(work) for letter, domain in located.items()}
        for key in [*(job.key for job in self.jobs), *self.earlier]:
            check_same_data(self.out / self._name(key), key[0], now, lambda path: suites.origin_of(path, work))

    def _job(self, task: str, variant: Variant, seed: int, folders: Mapping[str, Path]) -> Job:
        source, target = task.split("-")
        folder = self.out / "runs" / task / variant.label / str(seed)
        settings = self.out / "settings" / f"{variant.label}.yaml"
        places = (path.absolute() for path in (folder, settings, folders[source], folders[target]))
        return Job(task, variant.label, seed, *places)

    def log_of(self, job: Job) -> Path:
        return (self.out / "logs" / job.task / job.method / f"{job.seed}.log").absolute()

    # --- running -------------------------------------------------------------------------------------------------------

    def run(self, stop_signal: StopSignal) -> Summary:
        with self._lock():
            for label, config in self.configs.items():
                (self.out / "settings").mkdir(exist_ok=True)
                write_text(self.out / "settings" / f"{label}.yaml", config.to_yaml())
            for job in self.jobs:
                job.folder.parent.mkdir(parents=True, exist_ok=True)
            open_jobs = [job for job in self.jobs if not RunFolder(job.folder).finished]
            done = len(self.jobs) - len(open_jobs)
            for job in self.jobs:
                self._make_room(job)
            self.reporter.say(
                f"{self.suite.name}: runs {len(self.jobs)} (tasks {len(self.asked_tasks)}, methods {len(self.variants)}, seeds "
                f"{len(self.request.seeds)}){f', {done} of them done already' if done else ''}"
            )
            stopped = self._run_jobs(open_jobs, stop_signal) if open_jobs else None
            summary = self.write()
            varied = list(dict.fromkeys(word.partition("=")[0] for word in self.request.vary))
            draw_ablations(self.out / "figures", self.suite, summary.results, self.asked_tasks, varied)
        if stopped is not None:
            raise Interrupted("stopped, with the state of every run saved; the same command goes on", 128 + stopped)
        return replace(summary, failures=[*summary.failures, *self._left_over(summary)])

    def _left_over(self, summary: Summary) -> list[tuple[str, str]]:
        """Runs that were asked for and are neither done nor known to have failed."""
        status = {result.key: result.status for result in summary.results}
        words = [(job.name, status[job.key]) for job in self.jobs]
        return [(name, f"not done, but {word}") for name, word in words if word in (STOPPED, WAITING)]

    @contextmanager
    def _lock(self) -> Iterator[None]:
        refusal = f"another benchmark is writing {self.out}; wait for it, or stop it first"
        with held_alone(self.out / "lock", refusal):
            yield

    def _pool(self) -> Pool:
        request = self.request
        if request.ray is not None:
            return RayPool(request.ray, request.workers, request.gpu_share, self.log_of)
        on_auto = all(config.training.device == "auto" for config in self.configs.values())
        return LocalPool(request.workers, self.log_of, visible_gpus() if on_auto else [])

    def _run_jobs(self, jobs: list[Job], stop_signal: StopSignal) -> int | None:
        pool = self._pool()
        self.reporter.start("runs", len(jobs))
        shown = ""

        def under_way(running: Sequence[Job]) -> None:
            nonlocal shown
            words = "; ".join(f"{job.name}: {standing(job.folder)}" for job in running[:3])
            if words != shown:
                shown = words
                self.reporter.note(words)
                self.reporter.advance(0)

        try:
            with stop_signal.deferred():
                return pool.run(jobs, self._ended, under_way, stop_signal)
        finally:
            self.reporter.finish()

    def _ended(self, job: Job, outcome: Outcome) -> None:
        key = job.key
        self.seconds[self._name(key)] = self.seconds.get(self._name(key), 0.0) + outcome.seconds
        stopped = outcome.asked_to_stop and (outcome.code < 0 or outcome.code in STOP_CODES)
        line = {
            "run": self._name(key),
            "seconds": round(outcome.seconds, 1),
            "code": outcome.code,
            "reason": outcome.reason,
            "failed": outcome.code != 0 and not stopped and not outcome.tried_again,
        }
        append_line(self.out / "attempts.jsonl", line)
        if outcome.tried_again:
            self.reporter.warn(f"{job.name}: {outcome.reason}; trying again")
            return
        if stopped:
            self.ends[key] = STOPPED
            return
        self.reporter.advance(1)
        if outcome.code != 0:
            self.ends[key] = f"failed: {outcome.reason}"
            self.reporter.warn(f"{job.name} failed: {outcome.reason} (log: {self.log_of(job)})")
        else:
            self.ends.pop(key, None)
            self._make_room(job)
            result = self._result(key)
            figure = "" if result.delivered is None else f"{100 * result.delivered:.1f}, "
            self.reporter.say(f"{job.name}: {figure}{outcome.seconds:.0f} s")
        self.write()

    def _make_room(self, job: Job) -> None:
        """Finished runs are never gone on with: of many runs, states and weights nobody asks for would fill a disk."""
        folder = RunFolder(job.folder)
        if folder.finished:
            folder.drop_state(weights_of_cycles=self.configs[job.method].guard.keep != "all")

    # --- what is written -----------------------------------------------------------------------------------------------

    @staticmethod
    def _name(key: tuple[str, str, int]) -> str:
        task, method, seed = key
        return f"runs/{task}/{method}/{seed}"

    def _result(self, key: tuple[str, str, int]) -> Result:
        task, method, seed = key
        name = self._name(key)
        folder = RunFolder(self.out / name)
        seconds = self.seconds.get(name)
        before = STOPPED if folder.holds_a_run else WAITING
        if name in self.reasons:
            before = f"failed: {self.reasons[name]}"
        asked = Result(task, method, seed, self.suite.metric, name, self.ends.get(key, before), seconds)
        if not folder.finished:
            return asked
        if key not in self.read:
            self.read[key] = read_run(folder.path, replace(asked, status=DONE), self.request.selector)
        return replace(self.read[key], seconds=seconds)

    def write(self) -> Summary:
        """Everything anew, from what the runs' folders hold."""
        asked = [self._result(job.key) for job in self.jobs]
        # Of earlier calls, what was never begun is forgotten, and what is not over is in no table: it would empty averages.
        earlier = [result for key in self.earlier if (result := self._result(key)).status != WAITING]
        order = {variant.label: number for number, variant in enumerate(self.variants)}
        tasks = self._tasks_in_order({result.task for result in (*asked, *earlier)})

        def in_order(results: Sequence[Result]) -> list[Result]:
            return sorted(
                results, key=lambda r: (tasks.index(r.task), order.get(r.method, len(order)), r.method, r.seed)
            )

        found, over = in_order([*asked, *earlier]), in_order([*asked, *(r for r in earlier if r.status != STOPPED)])
        columns = [task for task in tasks if any(result.task == task for result in over)]
        made = tables.all_tables(self.suite, over, columns, self.request.selector, self._baseline(over))
        write_text(self.out / "results.csv", results_csv(found))
        write_text(self.out / "table.md", tables.markdown(made))
        write_text(self.out / "table.tex", tables.latex(made))
        write_text(self.out / "table.csv", tables.long_csv(made))
        failed = [r for r in in_order(asked) if r.status.startswith("failed")]
        reasons = [(f"{r.task} {r.method} seed {r.seed}", r.status.removeprefix("failed: ")) for r in failed]
        return Summary(made, reasons, found)

    def _tasks_in_order(self, found: set[str]) -> list[str]:
        """As published, then others."""
        known = [*self.suite.tasks, *self.suite.splits.values(), *self.asked_tasks]
        return [task for task in dict.fromkeys([*known, *sorted(found)]) if task in found]

    def _baseline(self, found: Sequence[Result]) -> str | None:
        methods = list(dict.fromkeys(result.method for result in found))
        usual = [name for name in ("basic", "source_only") if name in methods]
        return self.baseline or (usual[0] if usual else None)


def _kept(suite: suites.Suite) -> dict[str, Any]:
    """Of an embedded suite's settings, with a preset asked for: those about its images; the lengths are the preset's."""
    return {name: value for name, value in suite.settings.items() if not name.startswith("training.")}


def _attempts_so_far(path: Path) -> tuple[dict[str, float], dict[str, str]]:
    """(seconds of each run over all attempts, why each failed whose last attempt did); an attempt that a kill of the benchmark
    ended is not known."""
    seconds: dict[str, float] = {}
    reasons: dict[str, str] = {}
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        with suppress(ValueError, KeyError, TypeError, AttributeError):  # of a line that was torn
            attempt = json.loads(line)
            run, code, took = attempt["run"], attempt["code"], float(attempt["seconds"])
            seconds[run] = seconds.get(run, 0.0) + took
            reasons.pop(run, None)
            if attempt.get("failed", code != 0 and code not in STOP_CODES):  # older lines have no `failed`
                reasons[run] = str(attempt["reason"])
    return seconds, reasons


def run(request: Request, methods: Methods, reporter: Reporter, stop_signal: StopSignal) -> Summary:
    return Benchmark(request, methods, reporter).run(stop_signal)


def show(made: Sequence[tables.Table]) -> None:
    """On stdout, for a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    room = Console().width if sys.stdout.isatty() else 160
    styles = {0: "", 1: "bold", 2: "underline"}
    for table in made:
        shown = Table(title=Text(table.title), title_justify="left", title_style="bold")
        widths = column_widths(table, room)
        for number, (column, width) in enumerate(zip(["", *table.columns], widths, strict=True)):
            left = number <= table.text_columns
            shown.add_column(Text(column), justify="left" if left else "right", width=width, overflow="fold")
        before = False
        for row in table.rows:
            if row.published and not before:
                shown.add_section()
            before = row.published
            cells = [Text(tables.cell_text(cell), styles[cell.rank]) for cell in row.cells]
            shown.add_row(Text(row.name, "italic" if row.published else ""), *cells)
        # Where the terminal is too narrow for the figures it breaks lines, rather than figures.
        console = Console(highlight=False, width=max(room, _beside_columns(widths) + sum(widths)))
        console.print(shown, soft_wrap=True)
        for note in table.notes:
            console.print(Text(note, "dim"), width=room)


_BREAKS = re.compile(r"(?<!±)\s+(?!±)")


def column_widths(table: tables.Table, room: int) -> list[int]:
    """Of the rows' names and each column, so that the table fits into `room` if it can be: text may be broken between words; a
    word stays whole, and so does a figure with its deviation."""
    columns = [["", *(row.name for row in table.rows)]]
    columns += [[name, *(tables.cell_text(row.cells[i]) for row in table.rows)] for i, name in enumerate(table.columns)]
    whole = [max(map(len, texts)) for texts in columns]
    widths = [max(len(part) for text in texts for part in _BREAKS.split(text)) for texts in columns]
    while sum(widths) + _beside_columns(widths) < room and widths != whole:
        most = max(range(len(widths)), key=lambda i: whole[i] - widths[i])
        widths[most] += 1
    return widths


def _beside_columns(widths: Sequence[int]) -> int:
    return 3 * len(widths) + 1  # a space on either side of each, and lines
