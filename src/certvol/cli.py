"""The command line. Torch is imported by the commands that need it, never for `--help`."""

import argparse
import contextlib
import dataclasses
import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from certvol.arguments import BENCHMARK_SHORTHANDS, SHORTHANDS, given_settings, read
from certvol.errors import CertvolError, Interrupted, UserError
from certvol.stopping import StopSignal
from certvol.streams import LastingStderr, silence

if TYPE_CHECKING:
    from certvol.data.check import CheckReport

LISTED_FILES = 20  # by `certvol check` on the terminal


def run(arguments: Sequence[str]) -> int:
    """Exit code of a command: 0, 1 a run failed, 2 a user's mistake, 130 and 143 stopped."""
    try:
        code = _run(arguments)
        sys.stdout.flush()  # what cannot be written is noticed here, not after the exit code
        return code
    except (CertvolError, Interrupted) as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("stopped", 130)
    except BrokenPipeError:
        silence(sys.stdout)
        return 1
    except OSError as error:
        if error.strerror is None or (error.filename is None and error.errno not in _OF_STREAMS):
            raise
        reason = "no space left" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror.lower()
        if error.filename is None:  # what fails in writing a file says which
            silence(sys.stdout)
            return _fail(f"cannot print on: {reason}. Files that the command had written by then are whole", 2)
        way_on = "a run that was under way goes on with `certvol adapt --resume`, a benchmark with the same command"
        return _fail(f"{reason}: {error.filename}; {way_on}", 2)


_OF_STREAMS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _fail(message: str, code: int) -> int:
    where = f" (process {_rank()})" if _rank() > 0 else ""
    with contextlib.suppress(OSError):  # the exit code still tells
        print(f"certvol{where}: {message}", file=sys.stderr, flush=True)
        return code
    silence(sys.stderr)
    return code


def _rank() -> int:
    """Of this process among those that torchrun started; 0 where it did not."""
    return int(os.environ.get("RANK", "0"))


def _run(arguments: Sequence[str]) -> int:
    options = read(arguments)
    try:
        return 0 if options is None else ACTIONS[options.command](options)
    finally:
        console = sys.modules.get("certvol.console")
        if console is not None:  # before anything is said about the end
            console.end_bars()


class _Signals(StopSignal):
    """Ctrl-C and SIGTERM: at once, or remembered where the step under way must end first. A second one always acts at once."""

    def __init__(self) -> None:
        self.received: int | None = None
        self.waits = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: Any) -> None:
        if not self.waits or self.received is not None:
            raise Interrupted("stopped", 128 + number)
        self.received = number
        if _rank() == 0:
            # Ctrl-C may have ended whoever reads stderr too, or have come in the middle of a line. The step must still end.
            with contextlib.suppress(OSError, RuntimeError):
                LastingStderr().write("certvol: stopping after this step ...\n")

    def __call__(self) -> int | None:
        return self.received

    @contextmanager
    def deferred(self) -> Iterator[None]:
        self.waits = True
        try:
            yield
        finally:
            self.waits = False


def _adapt(options: argparse.Namespace) -> int:
    from certvol import api
    from certvol.console import ConsoleReporter
    from certvol.report.page import report_on_finished

    settings = given_settings(options, SHORTHANDS)
    finished = api.adapt(
        options.source,
        options.target,
        options.out,
        resume=options.resume,
        preset=options.preset,
        config=options.config,
        reporter=ConsoleReporter(),
        stop_signal=_Signals(),
        **settings,
    )
    if _rank() == 0:
        report = report_on_finished(finished.path, ConsoleReporter())
        _closing_words(finished)
        _say_report(report)
    return 0


def _benchmark(options: argparse.Namespace) -> int:
    from certvol.benchmark import command
    from certvol.console import ConsoleReporter, printable
    from certvol.methods import config_classes

    settings = given_settings(options, BENCHMARK_SHORTHANDS)
    request = command.Request(
        suite=options.suite,
        out=Path(options.out),
        data=None if options.data is None else Path(options.data),
        methods=_words(options.methods, "--methods"),
        tasks=None if options.tasks is None else _words(options.tasks, "--tasks"),
        split=options.split,
        seeds=_numbers(options.seeds),
        preset=options.preset,
        config=None if options.config is None else Path(options.config),
        settings=settings,
        vary=options.vary,
        baseline=options.baseline,
        selector=options.select,
        workers=options.workers,
        ray=options.ray,
        gpu_share=options.gpu_share,
    )
    summary = command.run(request, config_classes(), ConsoleReporter(), _Signals())
    command.show(summary.tables)
    for name, reason in summary.failures:
        print(f"failed: {name}: {printable(reason)}", file=sys.stderr)
    shown = printable(options.out)
    print(f"tables: {shown}/table.md, .tex, .csv; runs: {shown}/results.csv")
    return 1 if summary.failures else 0


def _words(text: str, flag: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UserError(f"{flag}: expected one or more, with commas between them, found `{text}`")
    return list(dict.fromkeys(words))


def _numbers(text: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(word) for word in _words(text, "--seeds")))
    except ValueError:
        raise UserError(f"--seeds should be whole numbers, such as 0,1,2; found `{text}`") from None


def _say_report(place: Path | None) -> None:
    from certvol.console import printable

    if place is not None:
        print(f"report: {printable(str(place))}")


def _closing_words(run: Any) -> None:
    from certvol.console import accuracy_rows, print_table, printable

    if run.metrics is not None:
        print_table("target accuracy, %", ["", "all images", "mean of classes"], accuracy_rows(run.metrics))
    print(f"delivered: {run.delivery.model} ({run.delivery.why})")
    print(f"predictions for every target image: {printable(str(run.path / 'predictions.csv'))}")


def _demo(options: argparse.Namespace) -> int:
    from certvol import demo
    from certvol.console import ConsoleReporter, percent, print_table, printable
    from certvol.report.page import report_on_finished

    methods = demo.METHODS if options.methods is None else _words(options.methods, "--methods")
    accuracies = demo.run(Path(options.out), options.seed, methods, ConsoleReporter(), _Signals())
    rows = [[name, percent(value)] for name, value in accuracies.items()]
    print_table("synthetic digits to real ones: target accuracy, %", ["method", "accuracy"], rows)
    print("every method is a run of its own, which starts from a pretrained model of its own")
    print(f"each run, with a prediction for every image, is in {printable(str(Path(options.out)))}/<method>/")
    for method in accuracies:
        _say_report(report_on_finished(Path(options.out) / method, ConsoleReporter()))
    _demo_comparison(Path(options.out), list(accuracies))
    return 0


def _demo_comparison(out: Path, methods: list[str]) -> None:
    from certvol.console import ConsoleReporter, printable
    from certvol.report.page import write_comparison

    try:
        place = write_comparison([out / method for method in methods], out / "report.html")
        print(f"all on one page: {printable(str(place))}")
    except Exception as error:  # the runs are complete whatever happens here
        ConsoleReporter().warn(f"the comparison could not be made ({printable(str(error))})")


def _check(options: argparse.Namespace) -> int:
    from certvol.config import DataConfig
    from certvol.console import ConsoleReporter, print_table
    from certvol.data.check import check
    from certvol.data.check_features import check_features
    from certvol.data.feature_files import is_feature_file
    from certvol.outputs import check_output
    from certvol.tables import write_text_anywhere

    if options.json is not None:
        check_output(options.json, "--json")
    of_features = is_feature_file(options.source) or is_feature_file(options.target)
    what = "rows" if of_features else "images"
    if of_features:
        report = check_features(options.source, options.target)
    else:
        report = check(options.source, options.target, DataConfig(), ConsoleReporter())
    rows = [[name, str(count)] for name, count in report.source_counts.items()]
    rows.append([f"all {len(report.source_counts)} classes", str(sum(report.source_counts.values()))])
    print_table("source", ["class", what], rows)
    print_table("target", ["", what], [["all", str(report.target_count)]])
    if report.findings:
        print_table(
            "findings", ["", "what"], [[finding.level, finding.text] for finding in report.findings], text_columns=2
        )
    _print_files(report)
    if options.json is not None:
        write_text_anywhere(Path(options.json), json.dumps(dataclasses.asdict(report), indent=2) + "\n")
    print("adaptation can start" if report.can_adapt else "adaptation cannot start: mend the errors above")
    return 0 if report.can_adapt else 2


def _print_files(report: "CheckReport") -> None:
    """The first of those that cannot be used."""
    from certvol.console import print_table

    rows = [
        [domain, path, reason]
        for domain, unreadable, empty in (
            ("source", report.source_unreadable, report.source_empty),
            ("target", report.target_unreadable, report.target_empty),
        )
        for path, reason in [*unreadable, *((path, "empty") for path in empty)]
    ]
    if rows:
        print_table("files that are left out", ["", "file", "why"], rows[:LISTED_FILES], text_columns=3)
    if len(rows) > LISTED_FILES:
        print(f"and {len(rows) - LISTED_FILES} more: --json FILE lists all")


def _evaluate(options: argparse.Namespace) -> int:
    from certvol import api
    from certvol.console import ConsoleReporter, accuracy_rows, certainty_tables, percent, print_table
    from certvol.outputs import check_output
    from certvol.tables import write_text_anywhere

    if options.json is not None:
        check_output(options.json, "--json")
    found = api.evaluate(
        options.run,
        options.data,
        options.device,
        ConsoleReporter(),
        unknown=options.unknown,
        oscillation=options.oscillation,
    )
    if options.json is not None:  # before anything is printed: a pipe may be closed by whoever reads it
        write_text_anywhere(Path(options.json), json.dumps(found, indent=2) + "\n")
    print_table(
        f"accuracy on {options.data}, %, {found['adapted']['images']} images",
        ["", "all images", "mean of classes"],
        accuracy_rows(found),
    )
    before, after = found["source_only"]["per_class"], found["adapted"]["per_class"]
    rows = [[name, percent(before[name]), percent(after[name])] for name in after]
    print_table("accuracy per class, %", ["class", "source only", "adapted"], rows)
    for title, columns, rows, note in certainty_tables(found):
        print_table(title, columns, rows)
        print(note)
    return 0


def _report(options: argparse.Namespace) -> int:
    from certvol.console import ConsoleReporter, printable
    from certvol.outputs import check_output
    from certvol.report import page, papers
    from certvol.report.records import read_record

    several = len(options.runs) > 1
    if several and options.out is None:
        raise UserError("a comparison of runs needs a place: add --out FILE, such as --out compared.html")
    if several and options.target is not None:
        raise UserError("--target is for the report of one run")
    if options.out is not None:
        check_output(options.out)
    records = [read_record(run) for run in options.runs]
    if several:
        place = page.write_comparison(records, options.out)
    else:
        place = page.write_report(records[0], ConsoleReporter(), options.target, options.out)
    print(f"report: {printable(str(place))}")
    if options.figures:
        folder = place.parent / "figures"
        if several:
            written = papers.write_comparison_figures(records, page.run_names(records), folder)
        else:
            written = papers.write_run_figures(records[0], folder)
        print(f"{len(written)} figures for papers: {printable(str(folder))}")
    return 0


def _extract(options: argparse.Namespace) -> int:
    from certvol import api
    from certvol.console import ConsoleReporter, printable

    count = api.extract(
        options.folder,
        options.out,
        options.backbone,
        options.weights,
        image_size=options.image_size,
        views=options.views,
        device=options.device,
        reporter=ConsoleReporter(),
    )
    print(f"features of {count} images: {printable(options.out)}")
    return 0


def _predict(options: argparse.Namespace) -> int:
    from certvol.console import ConsoleReporter, printable
    from certvol.prediction import Request, predict

    reporter = ConsoleReporter()
    request = Request(
        run=options.run,
        images=options.images,
        out=options.out,
        coverage=options.coverage,
        min_certainty=options.min_certainty,
        measure=options.measure,
        rejected_dir=options.rejected_dir,
        device=options.device,
    )
    found = predict(request, reporter)
    for path, reason in found.skipped[:5]:
        reporter.warn(f"skipped {printable(path)}: {reason}")
    skipped = f", {len(found.skipped)} unreadable skipped" if found.skipped else ""
    rejected = "" if found.accepted is None else f", {int((~found.accepted).sum())} rejected ({found.rule})"
    print(f"{len(found.paths)} images predicted{rejected}{skipped}: {printable(options.out)}")
    if options.rejected_dir is not None:
        print(f"rejected images, the least certain first: {printable(options.rejected_dir)}")
    return 0


def _export(options: argparse.Namespace) -> int:
    from certvol.console import printable
    from certvol.export import export

    found = export(options.run, options.out, options.format)
    size = found["input_size"]
    print(f"{options.format} model: {printable(options.out)}")
    if found["input"] == "features":
        print(f"input `features`: float32, N x {size}, as the backbone of the run's files gives them")
    else:
        print(
            f"input `images`: uint8, N x {size} x {size} x 3, RGB, squashed to that size; crop and normalisation are inside"
        )
    outputs = " and ".join(found["outputs"])
    print(f"output: {outputs}, {len(found['labels'])} classes; within {found['difference']:.1g} of the run's own model")
    return 0


def _list(options: argparse.Namespace) -> int:
    from certvol.console import print_table

    if options.what == "presets":
        from certvol.config import PRESETS

        print_table("presets", ["name", "what"], [[n, text] for n, (text, _) in PRESETS.items()], text_columns=2)
    elif options.what == "settings":
        from certvol.config import list_settings
        from certvol.methods import config_classes

        rows = [list(row) for row in list_settings(config_classes())]
        print_table("settings, given as --name value", ["name", "default", "what"], rows, text_columns=3)
    elif options.what == "suites":
        from certvol.benchmark.suites import SUITES, describe

        print("\n\n".join(map(describe, SUITES.values())))
    elif options.what == "methods":
        from certvol.methods import discover

        print_table("methods", ["name", "what"], [[n, m.summary] for n, m in discover().items()], text_columns=2)
    else:
        from certvol.nn.backbones import list_backbones

        print("\n".join(list_backbones()))
    return 0


ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "demo": _demo,
    "check": _check,
    "adapt": _adapt,
    "benchmark": _benchmark,
    "evaluate": _evaluate,
    "predict": _predict,
    "export": _export,
    "report": _report,
    "extract": _extract,
    "list": _list,
}
