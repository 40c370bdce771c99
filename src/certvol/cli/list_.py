"""`certvol list`: methods, pseudo-label rules, backbones, presets, settings and suites."""

import argparse

from certvol.errors import UserError
from certvol.progress import Reporter
from certvol.settings import Setting

HELP = "list methods, pseudo-label rules, backbones, presets, settings or suites"
LISTED = ("methods", "rules", "backbones", "presets", "settings", "suites")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=LISTED)
    parser.add_argument(
        "word", nargs="?", metavar="WORD", help="list only entries that contain WORD"
    )


def run(options: argparse.Namespace, reporter: Reporter) -> int:
    from certvol.cli._console import print_table

    columns, entries = _entries(options.what)
    word = (options.word or "").lower()
    found = [entry for entry in entries if word in " ".join(entry).lower()]
    if not found:
        raise UserError(f"`certvol list {options.what}` has no entry with `{options.word}`")
    if columns:
        print_table(options.what, columns, found, text_columns=len(columns))
    else:
        print("\n".join(text for (text,) in found))
    return 0


def _entries(what: str) -> tuple[list[str], list[list[str]]]:
    """Return the columns of a table and its rows; no columns for a plain list of texts."""
    if what == "presets":
        from certvol.settings import PRESETS

        return ["name", "purpose"], [[name, text] for name, (text, _) in PRESETS.items()]
    if what == "settings":
        from certvol.methods import config_classes
        from certvol.settings import list_settings
        from certvol.training import named_choices, pseudo_labels

        rules = pseudo_labels.config_classes()
        settings = list_settings(config_classes(), rules, named_choices())
        rows = [[f"--{name}", *rest] for name, *rest in settings]
        return ["setting", "default", "values", "purpose"], rows
    if what == "suites":
        from certvol.benchmark.suites import SUITES, describe

        return [], [[f"{describe(suite)}\n"] for suite in SUITES.values()]
    if what == "methods":
        from certvol.methods import discover

        return ["name", "purpose"], [[name, each.summary] for name, each in discover().items()]
    if what == "rules":
        from certvol.settings import settings_of
        from certvol.training import pseudo_labels

        return ["name", "purpose", "settings and defaults"], [
            [name, rule.summary, " ".join(map(_with_default, settings_of(rule.Config)))]
            for name, rule in pseudo_labels.discover().items()
        ]
    from certvol.nn.backbones import list_backbones

    return [], [[name] for name in list_backbones()]


def _with_default(each: Setting) -> str:
    return f"--pseudo_labels.{each.name} {each.default}"
