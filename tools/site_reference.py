"""Write the reference pages of the documentation from what the code declares.

Each function returns Markdown. `PAGES` names the pages; `site_hook.py` adds them to the site.
"""

import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import yaml

from certvol.api import resolve_settings
from certvol.benchmark.suites import SUITES, describe
from certvol.cli import discover as discover_commands
from certvol.cli._options import build_parser
from certvol.methods import config_classes as method_configs
from certvol.methods import discover as discover_methods
from certvol.runs.folder import RunFolder
from certvol.scores.uncertainty import MEASURES
from certvol.settings import PRESETS, SECTIONS, list_settings
from certvol.training import named_choices, pseudo_labels

WIDTH = "96"
PARTS = ("Implemented:", "Deliberate differences:", "Our choices")
RUN_FILES = {
    "config": "every resolved setting; `certvol adapt --config RUN/config.yaml` repeats the run",
    "environment": "versions, device, commit and command of the run and of each resumption",
    "history": "a line per logged step: phase, cycle, step, learning rate, each loss term, median "
    "sigma of source and target",
    "timing": "how long each part took",
    "warnings": "the warnings that were printed",
    "checkpoints": "the newest full state, for `--resume`; replaced atomically",
    "cycles": "label-free scores of each cycle (`scores.jsonl`), predictions on the watched "
    "images, and the weights of the best cycle by the chosen validator",
    "pretrained": "weights after pretraining, before adaptation; with `--from`, the other run's",
    "model": "the delivered weights, with classes and settings. The run is complete once it exists",
    "predictions": "path, label, probability and sigma of every target image",
    "measures": "every certainty measure of every target image",
    "metrics": "accuracy before and after adaptation, per class too; only if the target's folders "
    "name the classes",
    "evaluation": "how good each certainty measure is; what needs labels is there only with labels",
    "verdict": "whether the run can be used, judged without labels: the word, its reasons, and the "
    "estimates behind it",
    "review": "the labels given with `certvol review`, a line per answer",
    "labels": "the reviewed labels that the run was given with `--labels`; those of the kind "
    "`chosen` trained it",
    "trained": "the target images whose labels trained the model, or one that it continues from: "
    "they never judge it",
    "drawn": "the stratum that each given random label was drawn from, which weights the estimate",
    "guesses": "what both models think of the images to label, so that the page opens at once",
    "features": "features of at most 2,000 target images, for the report's map",
    "report": "the report: one page that needs no other file and no network",
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; `|` in cells is escaped."""
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def prose(text: str) -> str:
    """Escape what Markdown would take for markup, except in `code`."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else _escaped(part) for part in parts)


def _escaped(text: str) -> str:
    """Escape markup. A backslash before `<` would be shown."""
    return re.sub(r"([*_>\[\]|])", r"\\\1", text).replace("<", "&lt;")


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def commands() -> str:
    """Return the help of every command, as `certvol COMMAND --help` prints it."""
    os.environ["COLUMNS"] = WIDTH
    modules = discover_commands()
    _, parsers = build_parser(modules)
    page = [
        "# Commands\n",
        "Every command exits 0 on success, 1 if a run failed, 2 on a mistake of yours (one "
        "sentence on stderr says what to do), 130 on Ctrl-C and 143 on SIGTERM. `python -m "
        "certvol` is the same command.\n",
        "Commands that take settings accept every [setting](settings.md) as `--section.field "
        "value`.\n",
        table(
            ["command", "what it does"],
            [[f"[`{name}`](#{name})", prose(module.HELP)] for name, module in modules.items()],
        ),
    ]
    for name, parser in parsers.items():
        page += [f"## {name}\n", f"```text\n{parser.format_help().strip()}\n```\n"]
    return "\n".join(page)


def settings() -> str:
    """Return every setting with its default, allowed values and help, by section."""
    rows = list_settings(method_configs(), pseudo_labels.config_classes(), named_choices())
    page = [
        "# Settings\n",
        "Give a setting on the command line (`--training.cycles 40`), in a YAML file (`--config "
        "FILE`) or by a [preset](presets.md) (`--preset NAME`; the defaults below are those of "
        "the preset `default`). The command line beats the file, "
        "and the file beats the preset. `certvol list settings WORD` searches this list.\n",
        "From Python, pass a section as a dictionary: `certvol.adapt(source, target, out=..., "
        'training={"cycles": 40})`.\n',
    ]
    for section, cls in SECTIONS.items():
        named = [row for row in rows if row[0].startswith(f"{section}.")]
        page += [f"## {section}\n", prose(" ".join((cls.__doc__ or "").split())) + "\n"]
        page.append(_settings_table(named))
    page += [
        "## method\n",
        "`method.name` (short: `--method`) chooses the method, `cvp` by default. Each method's own "
        "settings are on its [page](methods.md).\n",
        "## pseudo_labels\n",
        "`training.pseudo_labels` chooses the rule. Each rule's own settings are listed with the "
        "[rules](rules.md).\n",
    ]
    return "\n".join(page)


def _settings_table(rows: Iterable[Sequence[str]]) -> str:
    """Return a table of settings, in a block that site.css lays out for narrow screens."""
    cells = [
        [code(name), code(default), prose(_unbroken(allowed)), prose(text)]
        for name, default, allowed, text in rows
    ]
    content = table(["setting", "default", "values", "meaning"], cells)
    return f'<div class="settings" markdown>\n\n{content}\n</div>\n'


def _unbroken(allowed: str) -> str:
    """Keep the sign and the number of a limit, such as `>= 8`, on one line."""
    return re.sub(r"([<>]=?) ", "\\1\u00a0", allowed)


def _own_settings(section: str, cls: type, owner: str) -> str:
    rows = list_settings({owner: cls}) if section == "method" else list_settings({}, {owner: cls})
    own = [row for row in rows if row[0].startswith(f"{section}.") and row[0] != "method.name"]
    stripped = [
        (name, default, values, text.removeprefix(f"{owner}: "))
        for name, default, values, text in own
    ]
    return _settings_table(stripped) if stripped else ""


def methods() -> str:
    """Return every method: paper, what is implemented, differences, settings."""
    found = discover_methods()
    page = [
        "# Methods\n",
        "Choose one with `--method NAME`. [Comparators](../comparators.md) says how they were "
        "made comparable, which settings are closer to each paper, and [which systems of the paper "
        "run](../comparators.md#every-system-of-the-paper). To add one, see [Adding a "
        "method](../adding-a-method.md).\n",
        table(
            ["method", "summary"],
            [[f"[`{name}`](#{name})", prose(each.summary)] for name, each in found.items()],
        ),
    ]
    for name, method in found.items():
        text = _module_text(method)
        page += [f"## {name}\n", *_paragraphs(text)]
        page.append(
            _own_settings("method", method.Config, name) or "It has no settings of its own.\n"
        )
    return "\n".join(page)


def _module_text(cls: type) -> str:
    return (sys.modules[cls.__module__].__doc__ or "").strip()


def _paragraphs(text: str) -> list[str]:
    """Split a module's docstring into paragraphs; each part that is named gets a bold head."""
    lines = text.splitlines()
    broken = "\n".join(f"\n{line}" if line.startswith(PARTS) else line for line in lines)
    found = []
    for paragraph in re.split(r"\n\s*\n", broken):
        flat = prose(" ".join(paragraph.split()))
        for part in PARTS:
            if flat.startswith(part):
                flat = f"**{part}**{flat.removeprefix(part)}"
        found.append(flat + "\n")
    return found


def rules() -> str:
    """Return every pseudo-label rule with its settings."""
    found = pseudo_labels.discover()
    page = [
        "# Pseudo-label rules\n",
        "Before each cycle a rule labels the target images that the cycle trains on. Choose one "
        "with `--training.pseudo_labels NAME`. A method that makes its own labels ignores this "
        "setting. A new rule is one new file in `src/certvol/training/pseudo_labels/`.\n",
    ]
    for name, rule in found.items():
        text = _module_text(rule)
        page += [
            f"## {name}\n",
            *_paragraphs(text),
            _own_settings("pseudo_labels", rule.Config, name),
        ]
    return "\n".join(page)


def presets() -> str:
    """Return every preset with the settings that it changes."""
    page = [
        "# Presets\n",
        "A preset is a named group of settings: `certvol adapt --preset NAME ...`. Settings that "
        "you give yourself win. Without `--preset` you get `default`; the [settings](settings.md) "
        "page shows its values. Each other preset is listed by what differs from it.\n",
    ]
    settings_of_preset = {name: _resolved(name) for name in PRESETS}
    usual = settings_of_preset["default"]
    for name, (purpose, _) in PRESETS.items():
        page += [f"## {name}\n", prose(purpose[0].upper() + purpose[1:]) + ".\n"]
        rows = [
            [code(key), code(value), code(usual[key])]
            for key, value in settings_of_preset[name].items()
            if value != usual[key]
        ]
        if rows:
            page.append(table(["setting", name, "default"], rows))
    return "\n".join(page)


def _resolved(preset: str) -> dict[str, str]:
    """Return every setting of a run of `cvp` with this preset, as YAML writes it."""
    config = resolve_settings(preset)
    found = {}
    for section, values in config.as_dict().items():
        for key, value in values.items():
            if section != "pseudo_labels":  # of the rule that the preset names
                found[f"{section}.{key}"] = yaml.safe_dump(value).split("\n")[0]
    return found


def suites() -> str:
    """Return every benchmark suite, as `certvol list suites` prints it."""
    page = [
        "# Benchmark suites\n",
        "`certvol benchmark SUITE --data ROOT --out DIR` runs one; see "
        "[Benchmarks](../benchmarks.md).\n",
    ]
    for suite in SUITES.values():
        page += [f"## {suite.name}\n", f"```text\n{describe(suite).strip()}\n```\n"]
    return "\n".join(page)


def run_folder() -> str:
    """Return the files of a run, in the order of `RUN_FILES`."""
    folder = RunFolder("RUN")
    own = {name: place for name, place in vars(folder).items() if isinstance(place, Path)}
    places = {
        **own,
        "history": folder.journal.history,
        "checkpoints": folder.checkpoints.folder,
        "report": folder.path / "report.html",
    }
    rows = [
        [code(places[name].as_posix() + ("/" if not places[name].suffix else "")), text]
        for name, text in RUN_FILES.items()
        if name in places
    ]
    measures = [
        [code(name), prose(each.title), "more" if each.more_is_certain else "less"]
        for name, each in MEASURES.items()
    ]
    return "\n".join(
        [
            "# The run folder\n",
            "Weights and checkpoints are safetensors; everything else is YAML, JSON or CSV in "
            "UTF-8. Nothing is a pickle. Accuracies in files are shares between 0 and 1.\n",
            table(["file", "content"], rows),
            "A benchmark leaves `DIR/results.csv`, `DIR/table.md` and `DIR/table.tex`, and an "
            "ordinary run per task, method and seed in `DIR/runs/`.\n",
            "## Columns of measures.csv\n",
            "Names are also the values of `certvol predict --measure`.\n",
            table(["measure", "meaning", "more certain if"], measures),
        ]
    )


PAGES: dict[str, Callable[[], str]] = {
    "reference/commands.md": commands,
    "reference/settings.md": settings,
    "reference/methods.md": methods,
    "reference/rules.md": rules,
    "reference/presets.md": presets,
    "reference/suites.md": suites,
    "reference/run-folder.md": run_folder,
}
