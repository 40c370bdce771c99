"""Read the command line: the command, its options, and settings as `--section.field value`."""

import argparse
from collections.abc import Mapping, Sequence
from importlib import metadata
from itertools import pairwise
from types import ModuleType
from typing import Any, NoReturn

from certvol.errors import UserError
from certvol.settings import PRESETS, list_settings, nearest

SETTINGS_HELP = """Any setting can be given as --section.field value, such as --training.cycles 40.
`certvol list settings` names them all; RUN/config.yaml holds those of a run."""
SHORTHANDS = {
    "--method": "method.name",
    "--backbone": "model.backbone",
    "--weights": "model.weights",
    "--image-size": "data.image_size",
    "--views": "data.views",
    "--seed": "training.seed",
    "--device": "training.device",
    "--select": "guard.select",
    "--target-prior": "data.target_prior",
    "--target-classes": "data.target_classes",
}


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `UserError` instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see `{self.prog} --help`)")


def help_of(setting: str) -> str:
    """Return the help that a setting was declared with, without the full stop."""
    helps = {name: text for name, *_, text in list_settings({})}
    return helps[setting].rstrip(".").replace("%", "%%")


def add_settings(parser: argparse.ArgumentParser, *shorthands: str) -> None:
    """Let a command take any setting, with short options for some."""
    config = "settings as YAML; RUN/config.yaml repeats a run"
    parser.add_argument("--config", metavar="FILE", help=config)
    presets = f"a group of settings: {', '.join(PRESETS)}; see `certvol list presets`"
    parser.add_argument("--preset", metavar="NAME", help=presets)
    for flag in shorthands:
        name = SHORTHANDS[flag]
        text = f"{help_of(name)}; short for --{name}"
        parser.add_argument(flag, metavar="VALUE", dest=name, help=text)
    parser.set_defaults(takes_settings=True)
    parser.epilog = SETTINGS_HELP
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def given_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Merge the settings given as `--section.field` with those given by short options."""
    settings: dict[str, Any] = dict(options.settings)
    for flag, name in SHORTHANDS.items():
        value = getattr(options, name, None)
        if value is not None and (other := settings.setdefault(name, value)) != value:
            differ = f"{flag} is short for --{name}, but they differ: {value} and {other}"
            raise UserError(f"{differ}; leave one out")
    return settings


def words_of(text: str, flag: str) -> list[str]:
    """Split `a,b` and drop repetitions."""
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise UserError(f"{flag} takes names separated by commas, found `{text}`")
    return list(dict.fromkeys(words))


def build_parser(commands: Mapping[str, ModuleType]) -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of the whole command line, and each command's own."""
    parser = Parser(
        prog="certvol",
        description="Turn labelled source images and unlabelled target images into a classifier "
        "for the target that says how certain it is of every image.",
    )
    try:
        version = metadata.version("certvol")
    except metadata.PackageNotFoundError:
        version = "(not installed)"
    parser.add_argument("--version", action="version", version=f"certvol {version}")
    below = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    own = {}
    for name, module in commands.items():
        texts = {"help": module.HELP, "description": module.HELP}
        own[name] = below.add_parser(name, **texts, allow_abbrev=False)
        module.add_options(own[name])
    return parser, own


def read(arguments: Sequence[str], commands: Mapping[str, ModuleType]) -> argparse.Namespace | None:
    """Parse the arguments, with all settings in `settings`; None if help was printed instead."""
    for option, word in pairwise(["", *arguments]):
        without_value = word.startswith("--") and word.partition("=")[1:] == ("=", "")
        if word == "" or without_value:
            name = word[:-1] or (option if option.startswith("--") else "an argument")
            raise UserError(f"`{name}` is empty; give a value, or `.` for the current folder")
    if arguments and not arguments[0].startswith("-") and arguments[0] not in commands:
        hint, known = nearest(arguments[0], list(commands)), ", ".join(commands)
        raise UserError(f"unknown command `{arguments[0]}`{hint} (commands: {known})")
    parser, own = build_parser(commands)
    words, settings = _split_settings(arguments)
    options, unknown = parser.parse_known_args(words)
    if options.command is None:
        parser.print_help()
        return None
    options.settings = settings
    takes_settings = getattr(options, "takes_settings", False)
    if settings and not takes_settings:
        unknown += [f"--{name}" for name in settings]
    if unknown:
        _refuse(unknown[0], options.command, own[options.command], takes_settings)
    return options


def _split_settings(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Separate `--section.field value` and `--section.field=value` from all other arguments."""
    rest, settings = [], {}
    words = iter(arguments)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if word == "--":
            rest += [word, *words]
        elif not word.startswith("--") or "." not in name:
            rest.append(word)
        else:
            value = value if equals else next(words, "--")
            if value.startswith("--"):
                raise UserError(f"`--{name}` needs a value")
            settings[name] = value
    return rest, settings


def _refuse(word: str, command: str, parser: Parser, takes_settings: bool) -> NoReturn:
    choices = [option.removeprefix("--") for option in parser._option_string_actions]
    if takes_settings:
        from certvol.methods import config_classes  # imports torch, but only for this message
        from certvol.training import pseudo_labels

        settings = list_settings(config_classes(), pseudo_labels.config_classes())
        choices += dict.fromkeys(name for name, *_ in settings)
    hint = nearest(word.lstrip("-").partition("=")[0], choices).replace("`", "`--", 1)
    see = f"see `certvol {command} --help`"
    raise UserError(f"`certvol {command}` does not know `{word}`{hint} ({see})")
