"""The command line. Torch is imported by the commands that need it, never for `--help`."""

import argparse
import difflib
import errno
import glob
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from certvol.errors import CertvolError, Interrupted, UserError
from certvol.stopping import StopSignal

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
    check.add_argument("--source", required=True, metavar="FOLDER", help="labelled images, a sub-folder per class")
    check.add_argument("--target", required=True, metavar="FOLDER", help="unlabelled images, in any layout")
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

    evaluate = commands.add_parser("evaluate", help="figures of a run on a labelled folder")
    evaluate.add_argument("run", metavar="RUN")
    evaluate.add_argument("--data", required=True, metavar="FOLDER", help="images in folders named like the classes")
    evaluate.add_argument("--json", metavar="FILE", help="write the same figures as JSON")
    evaluate.add_argument("--device", default="auto")
    evaluate.set_defaults(act=_evaluate)

    predict = commands.add_parser("predict", help="labels and certainty for any images, as CSV")
    predict.add_argument("run", metavar="RUN")
    predict.add_argument(
        "images", nargs="+", metavar="IMAGES", help="folders, files or quoted globs; or .npz files of features"
    )
    predict.add_argument("--out", required=True, metavar="FILE", help="the CSV file to write")
    predict.add_argument(
        "--coverage", type=float, metavar="SHARE", help="accept this share of the target, reject its least certain rest"
    )
    predict.add_argument("--device", default="auto")
    predict.set_defaults(act=_predict)

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

    listing = commands.add_parser("list", help="methods, backbones, presets or settings there are")
    listing.add_argument("what", choices=["methods", "backbones", "presets", "settings"])
    listing.set_defaults(act=_list)
    return parser


SHORTHANDS = (
    ("--method", "method.name", "cvp, basic, source_only ..."),
    ("--backbone", "model.backbone", "a timm name, or small_cnn"),
    ("--weights", "model.weights", "a local weights file, or none to train from scratch"),
    ("--seed", "training.seed", "the seed of everything random"),
    ("--device", "training.device", "auto, cpu, cuda or cuda:N"),
)


def run(arguments: Sequence[str]) -> int:
    """Exit code of a command: 0, 1 a run failed, 2 a user's mistake, 130 and 143 stopped."""
    try:
        return _run(arguments)
    except CertvolError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _fail("stopped", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.filename is None or error.strerror is None:
            raise
        reason = "no space left" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror.lower()
        return _fail(f"{reason}: {error.filename}. A run that was under way goes on with `certvol adapt --resume`", 2)


def _fail(message: str, code: int) -> int:
    where = f" (process {_rank()})" if _rank() > 0 else ""
    print(f"certvol{where}: {message}", file=sys.stderr)
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
        options.settings = _settings(rest)
    code: int = options.act(options)
    return code


def _command_names(parser: argparse.ArgumentParser) -> list[str]:
    actions = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return list(next(actions).choices)


def _settings(rest: Sequence[str]) -> dict[str, str]:
    """--section.field value and --section.field=value."""
    settings: dict[str, str] = {}
    words = list(rest)
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or "." not in name:
            hint = f"; did you mean `--{close[0]}`?" if (close := _near_option(name)) else ""
            raise UserError(
                f"`certvol adapt` does not know `{word}`{hint} (settings are given as --section.field value)"
            )
        if not equals:
            if not words:
                raise UserError(f"--{name} needs a value")
            value = words.pop(0)
        settings[name] = value
    return settings


def _near_option(name: str) -> list[str]:
    options = ["source", "target", "out", "resume", "config", "preset", *(flag[2:] for flag, _, _ in SHORTHANDS)]
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


def _adapt(options: argparse.Namespace) -> int:
    from certvol import api
    from certvol.console import ConsoleReporter

    settings = dict(options.settings)
    for flag, field, _ in SHORTHANDS:
        value = getattr(options, flag[2:])
        if value is not None:
            settings[field] = value
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
    return 0


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
    return 0


def _check(options: argparse.Namespace) -> int:
    from certvol.config import DataConfig
    from certvol.console import ConsoleReporter, print_table
    from certvol.data.check import check

    report = check(options.source, options.target, DataConfig(), ConsoleReporter())
    rows = [[name, str(count)] for name, count in report.source_counts.items()]
    rows.append([f"all {len(report.source_counts)} classes", str(sum(report.source_counts.values()))])
    print_table("source", ["class", "images"], rows)
    print_table("target", ["", "images"], [["all", str(report.target_count)]])
    if report.findings:
        print_table(
            "findings", ["", "what"], [[finding.level, finding.text] for finding in report.findings], text_columns=2
        )
    print("adaptation can start" if report.can_adapt else "adaptation cannot start: mend the errors above")
    return 0 if report.can_adapt else 2


def _evaluate(options: argparse.Namespace) -> int:
    from certvol import api
    from certvol.console import ConsoleReporter, accuracy_rows, percent, print_table

    found = api.evaluate(options.run, options.data, options.device, ConsoleReporter())
    print_table(
        f"accuracy on {options.data}, %, {found['adapted']['images']} images",
        ["", "all images", "mean of classes"],
        accuracy_rows(found),
    )
    before, after = found["source_only"]["per_class"], found["adapted"]["per_class"]
    rows = [[name, percent(before[name]), percent(after[name])] for name in after]
    print_table("accuracy per class, %", ["class", "source only", "adapted"], rows)
    if options.json is not None:
        _write_out(Path(options.json), json.dumps(found, indent=2) + "\n")
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
    from certvol import model
    from certvol.console import ConsoleReporter, printable
    from certvol.data.feature_files import is_feature_file
    from certvol.tables import predictions_csv

    if options.coverage is not None and not 0 < options.coverage <= 1:
        raise UserError(f"--coverage is a share above 0 and at most 1, found {options.coverage}")
    reporter = ConsoleReporter()
    of_features = any(is_feature_file(word) for word in options.images)
    paths, problems = (options.images, []) if of_features else _image_paths(options.images)
    loaded = model.load(options.run, options.device)
    if options.coverage is not None and not (Path(options.run) / "predictions.csv").exists():
        raise UserError(f"--coverage needs {options.run}/predictions.csv, which is missing")
    failures: list[tuple[str, str]] = []
    if of_features:
        readable, outputs = model.predict_feature_files(loaded, paths)
    else:
        readable, outputs, failures = model.predict_files(loaded, paths, reporter)
    if not readable:
        raise UserError(
            f"none of the {len(paths)} files can be read (such as {printable(failures[0][0])}: {failures[0][1]})"
        )
    accepted = None
    if options.coverage is not None:
        accepted = model.accept(options.run, outputs, options.coverage)
    _write_out(Path(options.out), predictions_csv(readable, loaded.classes, outputs, accepted))
    failures += problems
    for path, reason in failures[:5]:
        reporter.warn(f"skipped {printable(path)}: {reason}")
    skipped = f", {len(failures)} unreadable skipped" if failures else ""
    rejected = f", {int((~accepted).sum())} rejected" if accepted is not None else ""
    print(f"{len(readable)} images predicted{rejected}{skipped}: {printable(options.out)}")
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
    elif options.what == "methods":
        from certvol.methods import discover

        print_table("methods", ["name", "what"], [[n, m.summary] for n, m in discover().items()], text_columns=2)
    else:
        from certvol.nn.backbones import list_backbones

        print("\n".join(list_backbones()))
    return 0
