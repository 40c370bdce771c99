"""Merge preset, settings file and command line into one checked `Config`.

A setting is named `section.field`. The command line overrides the file, which overrides the preset.
The section `method` holds the settings of the chosen method, and `pseudo_labels` those of the
chosen pseudo-label rule; each declares its own.
"""

import dataclasses
import difflib
import reprlib
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, get_args

import yaml

from certvol.errors import UserError
from certvol.files import expanded
from certvol.settings.data_sections import AugmentConfig, DataConfig
from certvol.settings.declare import Setting, settings_by_name
from certvol.settings.presets import PRESETS
from certvol.settings.sections import SECTIONS, GuardConfig, ModelConfig, TrainingConfig
from certvol.settings.yaml_file import read_yaml

YAML_WIDTH = 100
LONGEST_NUMBER = 256  # bits
Choices = Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class NoSettings:
    """Settings of a pseudo-label rule that declares none."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run, by section.

    `method` is an instance of the chosen method's own `Config`, `pseudo_labels` one of the chosen
    pseudo-label rule's.
    """

    method_name: str
    method: Any
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    pseudo_labels: Any = field(default_factory=NoSettings)
    guard: GuardConfig = field(default_factory=GuardConfig)

    def sections(self) -> dict[str, Any]:
        """Return every section that has settings, in the order of the file."""
        found = {"method": self.method, **{name: getattr(self, name) for name in SECTIONS}}
        if dataclasses.fields(self.pseudo_labels):
            found["pseudo_labels"] = self.pseudo_labels
        return found

    def as_dict(self) -> dict[str, dict[str, Any]]:
        values = {name: dataclasses.asdict(section) for name, section in self.sections().items()}
        return {**values, "method": {"name": self.method_name, **values["method"]}}

    def to_yaml(self) -> str:
        """Return all settings as YAML, each with its help as a comment."""
        declared = settings_by_name(self.sections())
        lines = []
        for section, values in self.as_dict().items():
            lines.append(f"{section}:")
            for name, value in values.items():
                if (each := declared.get(f"{section}.{name}")) is not None:
                    lines += [f"  # {line}" for line in textwrap.wrap(each.help, YAML_WIDTH - 4)]
                dumped = yaml.safe_dump({name: value}, width=10**6, sort_keys=False)
                lines += [f"  {line}" for line in dumped.splitlines()]
        return "\n".join(lines) + "\n"


def list_settings(
    methods: Mapping[str, type],
    rules: Mapping[str, type] | None = None,
    choices: Choices | None = None,
) -> list[tuple[str, str, str, str]]:
    """Return (name, value under the default preset, allowed values, help) of every setting."""
    named = {name: ", ".join(words) for name, words in (choices or {}).items()}
    preset = _preset("default")
    rows = [
        (name, _text(preset.get(name, each.default)), named.get(name, each.allowed), each.help)
        for name, each in settings_by_name(SECTIONS).items()
    ]
    rows.append(("method.name", "cvp", "", "The method that adapts (see `certvol list methods`)."))
    for section, plugins in (("method", methods), ("pseudo_labels", rules or {})):
        for owner, cls in plugins.items():
            for name, each in settings_by_name({section: cls}).items():
                help = f"{owner}: {each.help}"
                rows.append((name, _text(each.default), each.allowed, help))
    return rows


def _text(value: Any) -> str:
    """Format a value as YAML does, but without quotes."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def flatten(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Turn `{"training": {"cycles": 4}}` into `{"training.cycles": 4}`.

    Names that contain a dot are kept. `{"method": "basic"}` is short for `method.name`.
    """
    flat: dict[str, Any] = {}

    def add(name: str, value: Any) -> None:
        if name in flat:
            raise UserError(f"{where}: `{name}` is given twice; leave one out")
        flat[name] = value

    for key, value in settings.items():
        if not isinstance(key, str):
            raise UserError(f"{where}: the name of a setting must be text, found {shown(key)}")
        if isinstance(value, Mapping):
            for name, inner in value.items():
                add(f"{key}.{name}", inner)
        elif "." in key:
            add(key, value)
        elif value is None and (key in SECTIONS or key in ("method", "pseudo_labels")):
            continue  # an empty section of a YAML file
        elif key == "method" and isinstance(value, str):
            add("method.name", value)
        else:
            raise UserError(
                f"{where}: expected `{key}` to be a section with settings, found {shown(value)}"
            )
    return flat


def read_settings_file(path: Path) -> dict[str, Any]:
    """Read a YAML file of settings as a flat dictionary."""
    loaded = read_yaml(path)
    if loaded is None:
        return {}
    if not isinstance(loaded, Mapping):
        kind = type(loaded).__name__
        raise UserError(
            f"{path} should hold sections of settings (such as `training:`), found {kind}"
        )
    return flatten(loaded, str(path))


def absolute_path(path: str | None) -> str | None:
    """Make a path absolute, so that a run can be resumed from any folder; keep `none` and None."""
    if path is not None and (not path or "\0" in path):
        raise UserError(f"expected a path, found {shown(path)} (the current folder is `.`)")
    return path if path in (None, "none") else str(expanded(path).absolute())


def shown(value: Any) -> str:
    """Shorten a value for a message; YAML aliases can make one longer than memory."""
    if isinstance(value, int) and value.bit_length() > LONGEST_NUMBER:
        return f"a whole number of {value.bit_length():,} bits"
    brief = reprlib.Repr()
    brief.maxlevel, brief.maxstring, brief.maxother = 2, 80, 80
    try:
        return brief.repr(value)
    except ValueError:  # it holds a number that is too long for Python to print
        return f"a {type(value).__name__} with a very large number"


def nearest(word: str, choices: list[str]) -> str:
    """Return `; did you mean X?`, or an empty text if no choice is similar.

    `cycles` suggests `training.cycles`: the last part of a name is compared too.
    """
    last_parts = {choice.rpartition(".")[2]: choice for choice in reversed(choices)}
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    if (exact := last_parts.get(word.rpartition(".")[2])) is not None:
        close = [exact]
    return f"; did you mean `{close[0]}`?" if close else ""


def for_method(file: Mapping[str, Any], name: Any) -> dict[str, Any]:
    """Drop a file's method settings if the file is for another method.

    A setting such as `method.weight` means something else there.
    """
    of_another = file.get("method.name", name) != name
    return {
        key: value for key, value in file.items() if not (of_another and key.startswith("method."))
    }


def resolve(
    methods: Mapping[str, type],
    preset: str = "default",
    file: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    rules: Mapping[str, type] | None = None,
    choices: Choices | None = None,
) -> Config:
    """Merge preset, file and overrides (flat dictionaries) into one checked `Config`.

    `methods` and `rules` (pseudo-label rules) map names to settings classes. Without `rules`, the
    name and the settings of the rule are not checked. `choices` holds the allowed values of
    settings that depend on packages above this one; without it, they are not checked.
    """
    file, overrides = file or {}, overrides or {}
    chosen = {**_preset(preset), **file, **overrides}
    name = chosen.get("method.name", "cvp")
    method = _plugin("method", name, methods)
    rule_name = chosen.get("training.pseudo_labels", TrainingConfig.pseudo_labels)
    rule = NoSettings if rules is None else _plugin("pseudo-label rule", rule_name, rules)
    sections = {"method": method, **SECTIONS, "pseudo_labels": rule}
    known = settings_by_name(sections)
    owners = {
        **_owners("method", "method", methods),
        **_owners("pseudo_labels", "pseudo-label rule", rules or {}),
    }
    given = {key: value for key, value in _preset(preset).items() if key in known}
    for key, value in {**for_method(file, name), **overrides}.items():
        if key in known:
            given[key] = value
        elif rules is None and key.startswith("pseudo_labels."):
            continue  # a run that is only read needs no rules
        elif key in owners and key in overrides:
            other = rule_name if key.startswith("pseudo_labels.") else name
            raise UserError(f"`{key}` is a setting of the {owners[key]}, not of {other}")
        elif key not in owners and key != "method.name":  # a file may serve several methods
            raise UserError(f"unknown setting `{key}`{nearest(key, [*known, 'method.name'])}")
    parsed = {section: _typed(section, cls, given) for section, cls in sections.items()}
    for key, each in known.items():
        section, _, field_name = key.partition(".")
        value = getattr(parsed[section], field_name)
        if (fault := each.fault(value)) is not None:
            raise UserError(f"`{key}` {fault}, found {shown(value)}")
        if choices is not None and value not in choices.get(key, [value]):
            names = ", ".join(choices[key])
            raise UserError(f"`{key}` should be one of {names}, found {shown(value)}")
    return Config(method_name=name, **parsed)


def _preset(name: str) -> dict[str, Any]:
    if name not in PRESETS:
        known = ", ".join(PRESETS)
        raise UserError(f"unknown preset `{name}`{nearest(name, list(PRESETS))} (presets: {known})")
    return PRESETS[name][1]


def _plugin(kind: str, name: Any, known: Mapping[str, type]) -> type:
    """Return the settings class of a method or rule."""
    if isinstance(name, str) and name in known:
        return known[name]
    text = name[:50] if isinstance(name, str) else shown(name)
    names = sorted(known)
    raise UserError(f"unknown {kind} `{text}`{nearest(text, names)} ({kind}s: {', '.join(names)})")


def _owners(section: str, kind: str, plugins: Mapping[str, type]) -> dict[str, str]:
    """Map each setting's full name to the method or rule that declares it."""
    return {
        name: f"{kind} {owner}"
        for owner, cls in plugins.items()
        for name in settings_by_name({section: cls})
    }


def _typed(section: str, cls: type, flat: Mapping[str, Any]) -> Any:
    """Build `cls` from the flat settings of its section, checking each value's type."""
    from argparse import ArgumentError

    values: dict[str, Any] = {}
    for key, each in settings_by_name({section: cls}).items():
        if key not in flat:
            continue
        value = flat[key]
        try:
            if isinstance(value, list | tuple | set | Mapping):
                raise ValueError("no setting is a list or a mapping")
            if value is None and type(None) not in get_args(each.kind):
                raise ValueError("jsonargparse takes null for every type")
            values[each.name] = _parser_of(each.kind).parse_object({"value": value})["value"]
        except (ArgumentError, TypeError, ValueError, RecursionError):
            raise UserError(
                f"`{key}` should be {_kind_in_words(each)}, found {shown(value)}"
            ) from None
    return cls(**values)


@cache
def _parser_of(kind: Any) -> Any:
    """Return a parser of one value; building one takes much longer than using it."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False, add_help=False)
    parser.add_argument("--value", type=kind)
    return parser


def _kind_in_words(each: Setting) -> str:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if each.choices:
        return "one of " + ", ".join(map(str, each.choices))
    if each.kind in words:
        return words[each.kind]
    inner = next(kind for kind in get_args(each.kind) if kind is not type(None))
    return f"{words.get(inner, inner)} or null"
