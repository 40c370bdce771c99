"""The command line. Torch is imported by the commands that need it, never for `--help`."""

import argparse
import contextlib
import difflib
import errno
import glob
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from certvol.errors import CertvolError, Interrupted, UserError
from certvol.stopping import StopSignal
from certvol.streams import silence

SETTINGS_HELP = """any setting: --section.field value, such as --training.cycles 40 --method.num_samples 128;
`certvol list settings` names them all, RUN/config.yaml holds those of a run"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see `{self.prog} --help`)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="certvol",
        description="Labelled source images and unlabelled target images in; a classifier for the target with a certainty per "
        "image out.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)

    demo = commands.add_parser("demo", help="adapt embedded synthetic digits to real ones, by three methods")
    demo.add_argument("--out", required=True, metavar="RUNS", help="folder for the runs and summary.json")
    demo.add_argument("--seed", type=int, default=0)
    demo.set_defaults(act=_demo)

    check = commands.add_parser("check", help="what is in the folders, and what is wrong with them")
    check.add_argument(
        "--source",
        required=True,
        metavar="FOLDER",
        help="labelled images, a sub-folder per class; or a .npz of features",
    )
    check.add_argument(
        "--target", required=True, metavar="FOLDER", help="unlabelled images, in any layout; or a .npz of features"
    )
    check.set_defaults(act=_check)

    adapt = commands.add_parser(
        "adapt",
        help="pretrain on the source, adapt to the target, predict",
        epilog=SETTINGS_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    adapt.add_argument(
        "--source", metavar="FOLDER", help="labelled images, a sub-folder per class; or a .npz of features"
    )
    adapt.add_argument("--target", metavar="FOLDER", help="images to adapt to, in any layout; or a .npz of features")
    adapt.add_argument("--out", metavar="RUN", help="new folder for everything the run makes")
    adapt.add_argument("--resume", metavar="RUN", help="go on with a run that was stopped")
    adapt.add_argument("--config", metavar="FILE", help="settings as YAML; RUN/config.yaml repeats a run")
    adapt.add_argument("--preset", metavar="NAME", help="default, paper, authors or quick; see `certvol list presets`")
    for flag, field, text in SHORTHANDS:
        adapt.add_argument(flag, metavar="VALUE", help=f"{text}; short for --{field}")
    adapt.set_defaults(act=_adapt, takes_settings=True)

    benchmark = commands.add_parser(
        "benchmark",
        help="every task of a benchmark by several methods and seeds, as a table",
        epilog=SETTINGS_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    benchmark.add_argument("suite", metavar="SUITE", help="see `certvol list suites`; digits needs no data")
    benchmark.add_argument("--data", metavar="ROOT", help="folder that holds the suite's domains")
    benchmark.add_argument(
        "--out", required=True, metavar="DIR", help="folder for runs and tables; the same one goes on"
    )
    benchmark.add_argument(
        "--methods",
        default="source_only,basic,cvp",
        metavar="NAMES",
        help="such as basic,cvp,cvp@method.samples_weight=0",
    )
    benchmark.add_argument("--tasks", metavar="TASKS", help="such as A-W,W-A; all where left out")
    benchmark.add_argument("--split", metavar="NAME", help="validation or test, of visda-2017")
    benchmark.add_argument("--seeds", default="0", metavar="NUMBERS", help="such as 0,1,2")
    benchmark.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="SETTING=VALUES",
        help="a row per value, and a figure; repeatable",
    )
    benchmark.add_argument("--baseline", metavar="NAME", help="what gains are tested against; basic where it is run")
    benchmark.add_argument(
        "--select", default="mutual_information", metavar="NAME", help="of the label-free choice's column"
    )
    benchmark.add_argument("--workers", type=int, default=1, metavar="N", help="runs at a time")
    benchmark.add_argument("--ray", metavar="ADDRESS", help="run on a Ray cluster; `local` starts one here")
    benchmark.add_argument("--gpu-share", type=float, default=1.0, metavar="SHARE", help="of a GPU per run, with --ray")
    benchmark.add_argument(
        "--config", metavar="FILE", help="settings of all runs as YAML, such as recipes/office-31-authors.yaml"
    )
    benchmark.add_argument("--preset", metavar="NAME", help="of all runs; see `certvol list presets`")
    for flag, field, text in BENCHMARK_SHORTHANDS:
        benchmark.add_argument(flag, metavar="VALUE", help=f"{text}; short for --{field}")
    benchmark.set_defaults(act=_benchmark, takes_settings=True)

    evaluate = commands.add_parser("evaluate", help="figures of a run on a labelled folder")
    evaluate.add_argument("run", metavar="RUN")
    evaluate.add_argument(
        "--data",
        required=True,
        metavar="FOLDER",
        help="images in folders named like the classes; or a .npz file of features with labels",
    )
    evaluate.add_argument("--json", metavar="FILE", help="write the same figures as JSON")
    evaluate.add_argument(
        "--unknown", metavar="FOLDER", help="images of classes the run does not have: are they told from --data's?"
    )
    evaluate.add_argument("--oscillation", action="store_true", help="how often the class changes between two features")
    evaluate.add_argument("--device", default="auto")
    evaluate.set_defaults(act=_evaluate)

    predict = commands.add_parser("predict", help="labels and certainty for any images, as CSV")
    predict.add_argument("run", metavar="RUN")
    predict.add_argument(
        "images", nargs="+", metavar="IMAGES", help="folders, files or quoted globs; or .npz files of features"
    )
    predict.add_argument("--out", required=True, metavar="FILE", help="the CSV file to write")
    predict.add_argument(
        "--coverage",
        type=float,
        metavar="SHARE",
        help="reject images less certain than this share of the run's own target, such as 0.9",
    )
    predict.add_argument(
        "--min-certainty",
        type=float,
        metavar="X",
        help="reject images less certain than X, in the measure's own units (entropy, mcd_sigma: those above X)",
    )
    predict.add_argument(
        "--measure",
        metavar="NAME",
        help="what certainty is: sigma (where the method has it), probability, entropy, logit (the largest), logit_diff "
        "(the two largest), mcd_mu or mcd_sigma (MC-dropout)",
    )
    predict.add_argument(
        "--rejected-dir",
        metavar="DIR",
        help="copies of the rejected images, the least certain first, for a person to look at",
    )
    predict.add_argument("--device", default="auto")
    predict.set_defaults(act=_predict)

    export = commands.add_parser(
        "export", help="the model as one file that needs no certvol: images to logits and sigma"
    )
    export.add_argument("run", metavar="RUN")
    export.add_argument(
        "--format", required=True, metavar="FORMAT", help="onnx, or torch (a torch.export program, .pt2)"
    )
    export.add_argument("--out", required=True, metavar="FILE")
    export.set_defaults(act=_export)

    report = commands.add_parser(
        "report", help="one page to look at a run, or to compare several; it needs no network and no other file"
    )
    report.add_argument("runs", nargs="+", metavar="RUN")
    report.add_argument("--out", metavar="FILE", help="where to write a comparison; a single run has RUN/report.html")
    report.add_argument("--figures", action="store_true", help="also each figure as PNG and SVG, in RUN/figures/")
    report.add_argument("--target", metavar="FOLDER", help="where the target images are now, if they were moved")
    report.set_defaults(act=_report)

    extract = commands.add_parser("extract", help="features of a folder's images, for adapting without a GPU")
    extract.add_argument("folder", metavar="FOLDER", help="images; with a sub-folder per class, labels are kept too")
    extract.add_argument("--backbone", required=True, metavar="NAME", help="a timm name, or small_cnn")
    extract.add_argument("--weights", metavar="FILE", help="a local weights file, or none for random ones")
    extract.add_argument("--out", required=True, metavar="FILE", help="the .npz file to write")
    extract.add_argument("--image-size", type=int, metavar="PIXELS", help="default: what the backbone was made for")
    extract.add_argument(
        "--views", type=int, default=1, metavar="K", help="views of each image; the first is the test view"
    )
    extract.add_argument("--device", default="auto")
    extract.set_defaults(act=_extract)

    listing = commands.add_parser("list", help="methods, backbones, presets, settings or suites there are")
    listing.add_argument("what", choices=["methods", "backbones", "presets", "settings", "suites"])
    listing.set_defaults(act=_list)
    return parser


SHORTHANDS = (
    ("--method", "method.name", "cvp, basic, source_only ..."),
    ("--backbone", "model.backbone", "a timm name, or small_cnn"),
    ("--weights", "model.weights", "a local weights file, or none to train from scratch"),
    ("--seed", "training.seed", "the seed of everything random"),
    ("--device", "training.device", "auto, cpu, cuda or cuda:N"),
    ("--select", "guard.select", "last, or the label-free score that chooses the cycle to deliver"),
)
BENCHMARK_SHORTHANDS = tuple(entry for entry in SHORTHANDS if entry[0] in ("--backbone", "--weights", "--device"))


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
        return _fail(f"{reason}: {error.filename}. A run that was under way goes on with `certvol adapt --resume`", 2)


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
    parser = _parser()
    known = _command_names(parser)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in known:
        close = difflib.get_close_matches(arguments[0], known, n=1)
        hint = f"; did you mean `{close[0]}`?" if close else ""
        raise UserError(f"there is no command `{arguments[0]}`{hint} (commands: {', '.join(known)})")
    options, rest = parser.parse_known_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    if rest and not getattr(options, "takes_settings", False):
        raise UserError(
            f"`certvol {options.command}` does not know `{rest[0]}` (see `certvol {options.command} --help`)"
        )
    if getattr(options, "takes_settings", False):
        options.settings = _settings(rest, options.command)
    code: int = options.act(options)
    return code


def _command_names(parser: argparse.ArgumentParser) -> list[str]:
    actions = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return list(next(actions).choices)


def _settings(rest: Sequence[str], command: str = "adapt") -> dict[str, str]:
    """--section.field value and --section.field=value."""
    settings: dict[str, str] = {}
    words = list(rest)
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in name:
            hint = f"; did you mean `--{close[0]}`?" if (close := _near_option(name, command)) else ""
            raise UserError(
                f"`certvol {command}` does not know `{word}`{hint} (settings are given as --section.field value)"
            )
        if not equals:
            if not words:
                raise UserError(f"--{name} needs a value")
            value = words.pop(0)
        settings[name] = value
    return settings


def _near_option(name: str, command: str) -> list[str]:
    options = ["source", "target", "out", "resume", "config", "preset", *(flag[2:] for flag, _, _ in SHORTHANDS)]
    if command == "benchmark":
        options = "data out methods tasks split seeds vary baseline select workers ray gpu-share config preset".split()
        options += [flag[2:] for flag, _, _ in BENCHMARK_SHORTHANDS]
    return difflib.get_close_matches(name, options, n=1)


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
            print("certvol: stopping after this step ...", file=sys.stderr)

    def __call__(self) -> int | None:
        return self.received

    @contextmanager
    def deferred(self) -> Iterator[None]:
        self.waits = True
        try:
            yield
        finally:
            self.waits = False


def _given_settings(options: argparse.Namespace, shorthands: Iterable[tuple[str, str, str]]) -> dict[str, Any]:
    """Those given as --section.field and those with an option of their own."""
    given = {field: getattr(options, flag[2:]) for flag, field, _ in shorthands}
    return {**options.settings, **{field: value for field, value in given.items() if value is not None}}


def _adapt(options: argparse.Namespace) -> int:
    from certvol import api
    from certvol.console import ConsoleReporter

    settings = _given_settings(options, SHORTHANDS)
    others = (options.source, options.target, options.out, options.config, options.preset)
    if options.resume is not None and (settings or any(other is not None for other in others)):
        raise UserError("--resume goes on with a run as it was begun: give no other options with it")
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
        _closing_words(finished)
        _finished_report(finished.path)
    return 0


def _benchmark(options: argparse.Namespace) -> int:
    from certvol.benchmark import command
    from certvol.console import ConsoleReporter, printable
    from certvol.methods import config_classes

    settings = _given_settings(options, BENCHMARK_SHORTHANDS)
    request = command.Request(
        suite=options.suite,
        out=Path(options.out),
        data=None if options.data is None else Path(options.data),
        methods=_words(options.methods),
        tasks=None if options.tasks is None else _words(options.tasks),
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
    print(f"tables: {options.out}/table.md, .tex, .csv; runs: {options.out}/results.csv")
    return 1 if summary.failures else 0


def _words(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UserError(f"expected names between commas, found `{text}`")
    return list(dict.fromkeys(words))


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in _words(text)]
    except ValueError:
        raise UserError(f"--seeds should be whole numbers, such as 0,1,2; found `{text}`") from None


def _finished_report(run: Path) -> None:
    from certvol.console import ConsoleReporter, printable
    from certvol.report.page import report_on_finished

    place = report_on_finished(run, ConsoleReporter())
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
    from certvol.console import ConsoleReporter, percent, print_table

    accuracies = demo.run(Path(options.out), options.seed, ConsoleReporter(), _Signals())
    rows = [[name, percent(value)] for name, value in accuracies.items()]
    print_table("synthetic digits to real ones: target accuracy, %", ["method", "accuracy"], rows)
    print("source_only is a run of its own; basic and cvp each start from a pretrained model of theirs")
    print(f"each run, with a prediction for every image, is in {Path(options.out)}/<method>/")
    for method in accuracies:
        _finished_report(Path(options.out) / method)
    _demo_comparison(Path(options.out), list(accuracies))
    return 0


def _demo_comparison(out: Path, methods: list[str]) -> None:
    from certvol.console import ConsoleReporter, printable
    from certvol.report.page import write_comparison

    try:
        place = write_comparison([out / method for method in methods], out / "report.html")
        print(f"all three on one page: {printable(str(place))}")
    except Exception as error:  # the runs are complete whatever happens here
        ConsoleReporter().warn(f"the comparison could not be made ({printable(str(error))})")


def _check(options: argparse.Namespace) -> int:
    from certvol.config import DataConfig
    from certvol.console import ConsoleReporter, print_table
    from certvol.data.check import check
    from certvol.data.check_features import check_features
    from certvol.data.feature_files import is_feature_file

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
    print("adaptation can start" if report.can_adapt else "adaptation cannot start: mend the errors above")
    return 0 if report.can_adapt else 2


def _evaluate(options: argparse.Namespace) -> int:
    from certvol import api
    from certvol.console import ConsoleReporter, accuracy_rows, certainty_tables, percent, print_table

    found = api.evaluate(
        options.run,
        options.data,
        options.device,
        ConsoleReporter(),
        unknown=options.unknown,
        oscillation=options.oscillation,
    )
    if options.json is not None:  # before anything is printed: a pipe may be closed by whoever reads it
        _write_out(Path(options.json), json.dumps(found, indent=2) + "\n")
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
    from certvol.report import page, papers
    from certvol.report.records import read_record

    several = len(options.runs) > 1
    if several and options.out is None:
        raise UserError("a comparison of runs needs a place: add --out FILE, such as --out compared.html")
    if several and options.target is not None:
        raise UserError("--target is for the report of one run")
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


def _write_out(path: Path, text: str) -> None:
    from certvol.tables import write_text

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def _image_paths(images: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """(files, what folders hold that cannot be read). Folders are read whole, globs expanded, files taken as they are."""
    from certvol.data.folders import scan

    found: list[str] = []
    problems: list[tuple[str, str]] = []
    for word in images:
        if Path(word).is_dir():
            listing = scan(word)
            problems += [(os.path.join(word, path), reason) for path, reason in listing.problems]  # noqa: PTH118
            found += [os.path.join(word, path) for path in listing.paths]  # noqa: PTH118 (a glob may give bytes Path alters)
        elif Path(word).exists():
            found.append(word)
        elif matches := sorted(glob.glob(word, recursive=True)):  # noqa: PTH207 (absolute patterns, which Path.glob refuses)
            found += [match for match in matches if not Path(match).is_dir()]
        else:
            raise UserError(f"there is no file, folder or match for `{word}`")
    if not found:
        raise UserError(f"no images in {', '.join(images)}")
    return list(dict.fromkeys(found)), problems


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
    from certvol import analysis, model, rejection
    from certvol.console import ConsoleReporter, printable
    from certvol.data.feature_files import is_feature_file
    from certvol.inference import run_batches
    from certvol.nn.norm import TARGET
    from certvol.tables import predictions_csv

    rejection.check_options(options.coverage, options.min_certainty, options.rejected_dir)
    reporter = ConsoleReporter()
    of_features = any(is_feature_file(word) for word in options.images)
    paths, problems = (options.images, []) if of_features else _image_paths(options.images)
    if of_features and options.rejected_dir is not None:
        raise UserError(
            "--rejected-dir collects images, which files of features do not hold; the CSV marks what is rejected"
        )
    loaded = model.load(options.run, options.device)
    measure = rejection.choose_measure(options.measure, loaded.has_sigma)
    threshold: float | None = options.min_certainty
    if options.coverage is not None:
        threshold = rejection.target_threshold(options.run, measure, options.coverage)
    if options.rejected_dir is not None:
        rejection.check_folder(Path(options.rejected_dir), options.images)
    readable: list[str] = []
    failures: list[tuple[str, str]] = []
    if of_features:
        batches = model.feature_batches(loaded, paths, readable)
    else:
        batches = model.read_batches(loaded, paths, reporter, readable, failures)
    if measure in rejection.IN_PREDICTIONS:
        measured, column = analysis.measured_by(run_batches(loaded.method, batches, TARGET)), None
    else:
        measured = analysis.measure(loaded.method, batches, TARGET, loaded.config.training)
        column = (measure, measured.values[measure]) if readable else None
    if not readable:
        raise UserError(
            f"none of the {len(paths)} files can be read (such as {printable(failures[0][0])}: {failures[0][1]})"
        )
    accepted = rejection.accept(measured, measure, threshold) if threshold is not None else None
    _write_out(Path(options.out), predictions_csv(readable, loaded.classes, measured, accepted, column))
    if options.rejected_dir is not None and accepted is not None:
        rejection.collect(Path(options.rejected_dir), readable, loaded.classes, measured, measure, accepted)
    failures += problems
    for path, reason in failures[:5]:
        reporter.warn(f"skipped {printable(path)}: {reason}")
    skipped = f", {len(failures)} unreadable skipped" if failures else ""
    rejected = ""
    if accepted is not None and threshold is not None:
        rejected = f", {int((~accepted).sum())} rejected ({rejection.in_words(measure, threshold)})"
    print(f"{len(readable)} images predicted{rejected}{skipped}: {printable(options.out)}")
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
        from certvol.benchmark.suites import SUITES

        rows = [
            [
                suite.name,
                suite.summary,
                " ".join(suite.tasks),
                str(suite.classes),
                suite.metric.replace("_", " "),
                suite.where,
            ]
            for suite in SUITES.values()
        ]
        print_table("suites", ["name", "what", "tasks", "classes", "metric", "data from"], rows, text_columns=6)
    elif options.what == "methods":
        from certvol.methods import discover

        print_table("methods", ["name", "what"], [[n, m.summary] for n, m in discover().items()], text_columns=2)
    else:
        from certvol.nn.backbones import list_backbones

        print("\n".join(list_backbones()))
    return 0
