"""`certvol completion`: print a script that completes commands, options and settings."""

import argparse

from certvol.progress import Reporter

HELP = "print a completion script for a shell, such as `source <(certvol completion bash)`"
FOLDERS = ("FOLDER", "RUN", "RUNS", "DIR", "ROOT")
FILES = ("FILE", "IMAGES")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash", "zsh", "fish"])


def run(options: argparse.Namespace, reporter: Reporter) -> int:
    import shtab

    from certvol.cli import discover
    from certvol.cli._options import build_parser

    parser, commands = build_parser(discover())
    for command in commands.values():
        if command.get_default("takes_settings"):
            _add_settings(command)
        for action in command._actions:
            if action.metavar in (*FOLDERS, *FILES):
                kind = shtab.DIRECTORY if action.metavar in FOLDERS else shtab.FILE
                action.complete = kind  # type: ignore[attr-defined]
    print(shtab.complete(parser, shell=options.shell))
    return 0


def _add_settings(command: argparse.ArgumentParser) -> None:
    """Declare every setting as an option, and the choices of those that have some."""
    from certvol.methods import config_classes
    from certvol.settings import PRESETS, SECTIONS, settings_of
    from certvol.training import named_choices, pseudo_labels

    methods, rules = config_classes(), pseudo_labels.config_classes()
    choices = {"method.name": list(methods), "preset": list(PRESETS)}
    plugins = [("method", cls) for cls in methods.values()]
    plugins += [("pseudo_labels", cls) for cls in rules.values()]
    for section, cls in [*SECTIONS.items(), *plugins]:
        for each in settings_of(cls):
            choices[f"{section}.{each.name}"] = [str(choice) for choice in each.choices]
    choices["training.pseudo_labels"] = list(rules)
    choices.update({name: list(words) for name, words in named_choices().items()})
    for action in command._actions:
        action.choices = choices.get(action.dest) or action.choices
    for name in sorted(choices.keys() - {"preset"}):
        command.add_argument(f"--{name}", dest=f"--{name}", choices=choices[name] or None)
