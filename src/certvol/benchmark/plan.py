"""Plan the runs of a benchmark: every task by every method, variant and seed."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from certvol.errors import UserError
from certvol.methods import config_classes
from certvol.settings import SECTIONS, Config, absolute_path, for_method, nearest, resolve
from certvol.training import named_choices, pseudo_labels
from certvol.training.setup import with_trained_part

RunKey = tuple[str, str, int]  # task, variant label, seed

# Settings that a benchmark gives each run itself -> the option to use instead.
SET_PER_RUN = {
    "training.seed": "--seeds",
    "data.source": "--data and --tasks",
    "data.target": "--data and --tasks",
    "method.name": "--methods",
}


@dataclass(frozen=True, kw_only=True)
class BenchmarkOptions:
    """The options of `certvol benchmark`."""

    suite: str
    out: Path
    data: Path | None = None
    methods: Sequence[str] = ("source_only", "basic", "cvp")
    tasks: Sequence[str] | None = None
    variant: str | None = None
    seeds: Sequence[int] = (0,)
    preset: str | None = None
    config: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    vary: Sequence[str] = ()
    baseline: str | None = None
    validator: str = "mutual_information"
    workers: int = 1
    ray: str | None = None
    gpu_share: float = 1.0


@dataclass(frozen=True)
class Variant:
    """A method with settings of its own."""

    method: str
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """`method@setting=value`, also the name of a folder."""
        words = "+".join(f"{name}={_as_file_name(value)}" for name, value in self.settings)
        return f"{self.method}@{words}" if words else self.method


def _as_file_name(value: str) -> str:
    """Replace characters that may not be in a file name, and write `0.50` as `0.5`."""
    if re.fullmatch(r"-?[0-9]+\.[0-9]*", value):
        return value.rstrip("0").rstrip(".")
    return re.sub(r"[^-.,\w]", "_", value)


def parse_label(label: str) -> Variant:
    """Return the variant that has this label, with values as the label spells them."""
    method, _, rest = label.partition("@")
    pairs = [part.partition("=") for part in rest.split("+")] if rest else []
    return Variant(method, tuple((name, value) for name, _, value in pairs))


def run_name(key: RunKey) -> str:
    """Return a run's folder, relative to the benchmark's."""
    task, method, seed = key
    return f"runs/{task}/{method}/{seed}"


@dataclass(frozen=True)
class RunIdentity:
    task: str
    method: str
    """A variant's label."""
    seed: int

    @property
    def name(self) -> str:
        return f"{self.task} {self.method} seed {self.seed}"

    @property
    def key(self) -> RunKey:
        return self.task, self.method, self.seed


@dataclass(frozen=True)
class BenchmarkJob(RunIdentity):
    """One run of the benchmark in the folder `out`."""

    out: Path
    sources: tuple[Path, ...]
    target: Path

    @property
    def folder(self) -> Path:
        return self.out / run_name(self.key)

    @property
    def settings(self) -> Path:
        return self.out / "settings" / f"{self.method}.yaml"

    @property
    def log(self) -> Path:
        return self.out / "logs" / self.task / self.method / f"{self.seed}.log"


def read_variants(words: Sequence[str], vary: Sequence[str] = ()) -> list[Variant]:
    """Read `cvp` and `cvp@method.samples_weight=0`; then vary each.

    `vary` holds `SETTING=VALUE,VALUE`. A variant that has the setting is run once per value.
    """
    methods = config_classes()
    found: list[Variant] = []
    for word in words:
        name, _, rest = word.partition("@")
        if name not in methods:
            hint, known = nearest(name, list(methods)), ", ".join(sorted(methods))
            raise UserError(f"unknown method `{name}`{hint} (methods: {known})")
        settings = tuple(_assignment(part, "--methods") for part in rest.split("+")) if rest else ()
        found.append(Variant(name, settings))
    pairs: list[tuple[str, str]] = []
    for setting, values in (_assignment(word, "--vary") for word in vary):
        if not any(_has(setting, methods[variant.method]) for variant in found):
            raise UserError(f"--vary {setting}: not a setting of {', '.join(words)}")
        if not all(values.split(",")):
            raise UserError(
                f"--vary {setting} needs values such as {setting}=1,2; found `{values}`"
            )
        pairs += [(setting, value) for value in values.split(",")]
    by_label: dict[str, Variant] = {}
    for variant in found:
        own = [pair for pair in pairs if _has(pair[0], methods[variant.method])]
        varied = [Variant(variant.method, (*variant.settings, pair)) for pair in own]
        for each in varied or [variant]:
            other = by_label.setdefault(each.label, each)
            if other != each:
                raise UserError(
                    f"{dict(other.settings)} and {dict(each.settings)} would share the folder "
                    f"{each.label}; run them with separate --out folders"
                )
    return list(by_label.values())


def _assignment(text: str, option: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name or not value:
        raise UserError(f"{option}: expected SETTING=VALUE, found `{text}`")
    check_not_set_per_run(name, f"{option} {text}")
    return name, value


def check_not_set_per_run(setting: str, found: str) -> None:
    if setting in SET_PER_RUN:
        raise UserError(
            f"{found}: a benchmark sets `{setting}` for each run; use {SET_PER_RUN[setting]}"
        )


def _has(setting: str, method_settings: type) -> bool:
    section, _, name = setting.partition(".")
    owner = method_settings if section == "method" else SECTIONS.get(section)
    return owner is not None and name in {each.name for each in dataclasses.fields(owner)}


def check_given(given: Mapping[str, Any], variants: Sequence[Variant]) -> None:
    """Refuse settings that no run would use: those of other methods, and those set per run."""
    for setting in given:
        check_not_set_per_run(setting, f"--{setting}")
        owners = [name for name, cls in config_classes().items() if _has(setting, cls)]
        if owners and not any(variant.method in owners for variant in variants):
            names = ", ".join(variant.method for variant in variants)
            raise UserError(f"`{setting}` is not a setting of {names}; leave it out")


def settings_of(
    variant: Variant,
    preset: str = "default",
    of_suite: Mapping[str, Any] | None = None,
    file: Mapping[str, Any] | None = None,
    given: Mapping[str, Any] | None = None,
) -> Config:
    """Resolve a variant's settings.

    The variant's settings override the command line's (`given`), which override the file's, the
    suite's and the preset's. A method ignores settings that only other methods have.
    """
    joined = {**(of_suite or {}), **for_method(file or {}, variant.method), **(given or {})}
    config = checked({**joined, "method.name": variant.method}, preset, dict(variant.settings))
    weights, cache = (absolute_path(path) for path in (config.model.weights, config.data.cache_dir))
    model = dataclasses.replace(config.model, weights=weights)
    data = dataclasses.replace(config.data, cache_dir=cache, source=None, target=None)
    return with_trained_part(dataclasses.replace(config, model=model, data=data))


def checked(
    settings: Mapping[str, Any], preset: str = "default", overrides: Mapping[str, Any] | None = None
) -> Config:
    rules, choices = pseudo_labels.config_classes(), named_choices()
    return resolve(config_classes(), preset, settings, overrides, rules, choices)
