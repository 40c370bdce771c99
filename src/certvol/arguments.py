"""What the command line takes: commands, options, and any setting as --section.field."""

import argparse
import difflib
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Any, NoReturn

from certvol.errors import UserError

SETTINGS_HELP = """any setting: --section.field value, such as --training.cycles 40 --method.num_samples 128;
`certvol list settings` names them all, RUN/config.yaml holds those of a run"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see `{self.prog} --help`)")


_Commands = Any  # what `add_subparsers` gives has no public name
SHORTHANDS = (
    ("--method", "method.name", "cvp, basic, source_only ..."),
    ("--backbone", "model.backbone", "a timm name, or small_cnn"),
    ("--weights", "model.weights", "a local weights file, or none to train from scratch"),
    ("--seed", "training.seed", "the seed of everything random"),
    ("--device", "training.device", "auto, cpu, cuda or cuda:N"),
    ("--select", "guard.select", "last, or the label-free score that chooses the cycle to deliver"),
)
BENCHMARK_SHORTHANDS = tuple(entry for entry in SHORTHANDS if entry[0] in ("--backbone", "--weights", "--device"))


def read(arguments: Sequence[str]) -> argparse.Namespace | None:
    """The command and its options, with `settings` where it takes any; None where only `--help` could be meant."""
    parser = _parser()
    known = list(_ARGUMENTS)
    if arguments and not arguments[0].startswith("-") and arguments[0] not in known:
        close = difflib.get_close_matches(arguments[0], known, n=1)
        hint = f"; did you mean `{close[0]}`?" if close else ""
        raise UserError(f"there is no command `{arguments[0]}`{hint} (commands: {', '.join(known)})")
    options, rest = parser.parse_known_args(arguments)
    if options.command is None:
        parser.print_help()
        return None
    if rest and not getattr(options, "takes_settings", False):
        raise UserError(
            f"`certvol {options.command}` does not know `{rest[0]}` (see `certvol {options.command} --help`)"
        )
    if getattr(options, "takes_settings", False):
        options.settings = _settings(rest, options.command)
    for name, value in vars(options).items():
        # Of a shell's variable that is not set, most likely: no folder is meant, not even this one.
        if value == "" or (isinstance(value, list) and "" in value):
            raise UserError(f"`{name}` was given as nothing; give a value, or leave it out (this folder is `.`)")
    return options


def given_settings(options: argparse.Namespace, shorthands: Iterable[tuple[str, str, str]]) -> dict[str, Any]:
    """Those given as --section.field and those with an option of their own."""
    settings = dict(options.settings)
    for flag, field, _ in shorthands:
        value = getattr(options, flag[2:])
        if value is not None and settings.get(field, value) != value:
            raise UserError(
                f"{flag} is short for --{field}, and they are given as {value} and {settings[field]}: leave one out"
            )
        if value is not None:
            settings[field] = value
    return settings


def _version() -> str:
    try:
        return metadata.version("certvol")
    except metadata.PackageNotFoundError:
        return "of a folder that is not installed"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="certvol",
        description="Labelled source images and unlabelled target images in; a classifier for the target with a certainty per "
        "image out.",
    )
    parser.add_argument("--version", action="version", version=f"certvol {_version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for add in _ARGUMENTS.values():
        add(commands)
    return parser


def _settings(rest: Sequence[str], command: str) -> dict[str, str]:
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


# --- commands ----------------------------------------------------------------------------------------------------------


def _demo(commands: _Commands) -> None:
    command = commands.add_parser(
        "demo", help="adapt embedded synthetic digits to real ones, by three methods or others"
    )
    command.add_argument("--out", required=True, metavar="RUNS", help="folder for the runs and summary.json")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument(
        "--methods", metavar="NAME,NAME", help="source_only,basic,cvp where left out; see `certvol list methods`"
    )


def _check(commands: _Commands) -> None:
    command = commands.add_parser("check", help="what is in the folders, and what is wrong with them")
    command.add_argument(
        "--source",
        required=True,
        metavar="FOLDER",
        help="labelled images, a sub-folder per class; or a .npz of features",
    )
    command.add_argument(
        "--target", required=True, metavar="FOLDER", help="unlabelled images, in any layout; or a .npz of features"
    )
    command.add_argument("--json", metavar="FILE", help="write all that was found, every file by its name")


def _adapt(commands: _Commands) -> None:
    command = commands.add_parser(
        "adapt",
        help="pretrain on the source, adapt to the target, predict",
        epilog=SETTINGS_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--source", metavar="FOLDER", help="labelled images, a sub-folder per class; or a .npz of features"
    )
    command.add_argument("--target", metavar="FOLDER", help="images to adapt to, in any layout; or a .npz of features")
    command.add_argument("--out", metavar="RUN", help="new folder for everything the run makes")
    command.add_argument("--resume", metavar="RUN", help="go on with a run that was stopped")
    command.add_argument("--config", metavar="FILE", help="settings as YAML; RUN/config.yaml repeats a run")
    command.add_argument(
        "--preset", metavar="NAME", help="default, paper, authors or quick; see `certvol list presets`"
    )
    for flag, field, text in SHORTHANDS:
        command.add_argument(flag, metavar="VALUE", help=f"{text}; short for --{field}")
    command.set_defaults(takes_settings=True)


def _benchmark(commands: _Commands) -> None:
    command = commands.add_parser(
        "benchmark",
        help="every task of a benchmark by several methods and seeds, as a table",
        epilog=SETTINGS_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("suite", metavar="SUITE", help="see `certvol list suites`; digits needs no data")
    command.add_argument("--data", metavar="ROOT", help="folder that holds the suite's domains")
    command.add_argument("--out", required=True, metavar="DIR", help="folder for runs and tables; the same one goes on")
    command.add_argument(
        "--methods",
        default="source_only,basic,cvp",
        metavar="NAMES",
        help="such as basic,cvp,cvp@method.samples_weight=0",
    )
    command.add_argument("--tasks", metavar="TASKS", help="such as A-W,W-A; all where left out")
    command.add_argument("--split", metavar="NAME", help="validation or test, of visda-2017")
    command.add_argument("--seeds", default="0", metavar="NUMBERS", help="such as 0,1,2")
    command.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="SETTING=VALUES",
        help="a row per value, and a figure; repeatable",
    )
    command.add_argument("--baseline", metavar="NAME", help="what gains are tested against; basic where it is run")
    command.add_argument(
        "--select", default="mutual_information", metavar="NAME", help="of the label-free choice's column"
    )
    command.add_argument("--workers", type=int, default=1, metavar="N", help="runs at a time")
    command.add_argument("--ray", metavar="ADDRESS", help="run on a Ray cluster; `local` starts one here")
    command.add_argument("--gpu-share", type=float, default=1.0, metavar="SHARE", help="of a GPU per run, with --ray")
    command.add_argument(
        "--config", metavar="FILE", help="settings of all runs as YAML, such as recipes/office-31-authors.yaml"
    )
    command.add_argument("--preset", metavar="NAME", help="of all runs; see `certvol list presets`")
    for flag, field, text in BENCHMARK_SHORTHANDS:
        command.add_argument(flag, metavar="VALUE", help=f"{text}; short for --{field}")
    command.set_defaults(takes_settings=True)


def _evaluate(commands: _Commands) -> None:
    command = commands.add_parser("evaluate", help="figures of a run on a labelled folder")
    command.add_argument("run", metavar="RUN")
    command.add_argument(
        "--data",
        required=True,
        metavar="FOLDER",
        help="images in folders named like the classes; or a .npz file of features with labels",
    )
    command.add_argument("--json", metavar="FILE", help="write the same figures as JSON")
    command.add_argument(
        "--unknown", metavar="FOLDER", help="images of classes the run does not have: are they told from --data's?"
    )
    command.add_argument("--oscillation", action="store_true", help="how often the class changes between two features")
    command.add_argument("--device", default="auto")


def _predict(commands: _Commands) -> None:
    command = commands.add_parser("predict", help="labels and certainty for any images, as CSV")
    command.add_argument("run", metavar="RUN")
    command.add_argument(
        "images", nargs="+", metavar="IMAGES", help="folders, files or quoted globs; or .npz files of features"
    )
    command.add_argument("--out", required=True, metavar="FILE", help="the CSV file to write")
    command.add_argument(
        "--coverage",
        type=float,
        metavar="SHARE",
        help="reject images less certain than this share of the run's own target, such as 0.9",
    )
    command.add_argument(
        "--min-certainty",
        type=float,
        metavar="X",
        help="reject images less certain than X, in the measure's own units (entropy, mcd_sigma: those above X)",
    )
    command.add_argument(
        "--measure",
        metavar="NAME",
        help="what certainty is: sigma (where the method has it), probability, entropy, logit (the largest), logit_diff "
        "(the two largest), mcd_mu or mcd_sigma (MC-dropout)",
    )
    command.add_argument(
        "--rejected-dir",
        metavar="DIR",
        help="copies of the rejected images, the least certain first, for a person to look at",
    )
    command.add_argument("--device", default="auto")


def _export(commands: _Commands) -> None:
    command = commands.add_parser(
        "export", help="the model as one file that needs no certvol: images to logits and sigma"
    )
    command.add_argument("run", metavar="RUN")
    command.add_argument(
        "--format", required=True, metavar="FORMAT", help="onnx, or torch (a torch.export program, .pt2)"
    )
    command.add_argument("--out", required=True, metavar="FILE")


def _report(commands: _Commands) -> None:
    command = commands.add_parser(
        "report", help="one page to look at a run, or to compare several; it needs no network and no other file"
    )
    command.add_argument("runs", nargs="+", metavar="RUN")
    command.add_argument(
        "--out", metavar="FILE", help="where to write the page, by default RUN/report.html; a comparison needs it"
    )
    command.add_argument(
        "--figures", action="store_true", help="also each figure as PNG and SVG, in figures/ beside the page"
    )
    command.add_argument("--target", metavar="FOLDER", help="where the target images are now, if they were moved")


def _extract(commands: _Commands) -> None:
    command = commands.add_parser("extract", help="features of a folder's images, for adapting without a GPU")
    command.add_argument("folder", metavar="FOLDER", help="images; with a sub-folder per class, labels are kept too")
    command.add_argument("--backbone", required=True, metavar="NAME", help="a timm name, or small_cnn")
    command.add_argument("--weights", metavar="FILE", help="a local weights file, or none for random ones")
    command.add_argument("--out", required=True, metavar="FILE", help="the .npz file to write")
    command.add_argument("--image-size", type=int, metavar="PIXELS", help="default: what the backbone was made for")
    command.add_argument(
        "--views", type=int, default=1, metavar="K", help="views of each image; the first is the test view"
    )
    command.add_argument("--device", default="auto")


def _list(commands: _Commands) -> None:
    command = commands.add_parser("list", help="methods, backbones, presets, settings or suites there are")
    command.add_argument("what", choices=["methods", "backbones", "presets", "settings", "suites"])


_ARGUMENTS = {
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
