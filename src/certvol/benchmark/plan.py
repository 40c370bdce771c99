"""What a benchmark runs: every task by every method, variant and seed, each in a folder of its own."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from certvol.config import SECTIONS, Config, absolute_path, flatten, for_method, nearest, read_settings_file, resolve
from certvol.data.folders import printable
from certvol.errors import UserError
from certvol.fixed_features import settled

Methods = Mapping[str, type]  # name -> class of its settings

# Settings that change where and how fast a run is, not what it computes; a seed has a folder of its own.
NO_MATTER = frozenset(
    "data.source data.target data.cache_dir data.cache_limit_gb data.workers data.device_share data.max_megapixels "
    "training.device training.seed training.log_every training.checkpoint_seconds training.checkpoint_previous "
    "training.tensorboard training.compile training.record model.hub guard.keep".split()
)

# Settings that a benchmark gives each run itself -> what says them instead.
SET_PER_RUN = {
    "training.seed": "--seeds",
    "data.source": "--data and --tasks",
    "data.target": "--data and --tasks",
    "method.name": "--methods",
}

_DECIMAL = re.compile(r"-?[0-9]+\.[0-9]*")
_NOT_IN_NAMES = re.compile(r"[^-.,\w]")


@dataclass(frozen=True)
class Variant:
    """A method with settings of its own."""

    method: str
    settings: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """method@setting=value, which is a folder's name too."""
        return self._named(lambda value: _NOT_IN_NAMES.sub("_", _as_one_number(value)))

    @property
    def words(self) -> str:
        """As it is given, which may be no folder's name."""
        return self._named(str)

    def _named(self, spelt: Callable[[str], str]) -> str:
        words = "+".join(f"{name}={spelt(value)}" for name, value in self.settings)
        return f"{self.method}@{words}" if words else self.method


def _as_one_number(value: str) -> str:
    """`0.0` and `0.50` as `0` and `0.5`; other values as they are."""
    return value.rstrip("0").rstrip(".") if _DECIMAL.fullmatch(value) else value


def variant_of(label: str) -> Variant:
    """The variant that has this label, its values as they are spelt there."""
    method, _, rest = label.partition("@")
    pairs = [part.partition("=") for part in rest.split("+")] if rest else []
    return Variant(method, tuple((name, value) for name, _, value in pairs))


@dataclass(frozen=True)
class Job:
    """One run."""

    task: str
    method: str
    """A variant's label."""
    seed: int
    folder: Path
    settings: Path
    """YAML."""
    source: Path
    target: Path

    @property
    def name(self) -> str:
        return f"{self.task} {self.method} seed {self.seed}"

    @property
    def key(self) -> tuple[str, str, int]:
        return self.task, self.method, self.seed


def read_variants(words: Sequence[str], vary: Sequence[str], methods: Methods) -> list[Variant]:
    """`cvp`, `cvp@method.samples_weight=0`, and each of them once per value of every `SETTING=VALUE,VALUE` that it has."""
    found: list[Variant] = []
    for word in words:
        name, _, rest = word.partition("@")
        if name not in methods:
            raise UserError(
                f"there is no method `{name}`{nearest(name, list(methods))} (methods: {', '.join(sorted(methods))})"
            )
        settings = tuple(_assignment(part, "--methods") for part in rest.split("+")) if rest else ()
        found.append(Variant(name, settings))
    varied: list[Variant] = []
    pairs = [_assignment(word, "--vary") for word in vary]
    for setting, values in pairs:
        if not any(_has(setting, methods[variant.method]) for variant in found):
            raise UserError(f"--vary {setting}: none of the methods {', '.join(words)} has that setting")
        if not all(values.split(",")):
            raise UserError(f"--vary {setting} needs values, such as {setting}=1,2; found `{values}`")
    for variant in found:
        own = [(setting, value) for setting, values in pairs for value in values.split(",")]
        own = [(setting, value) for setting, value in own if _has(setting, methods[variant.method])]
        varied += [Variant(variant.method, (*variant.settings, pair)) for pair in own] or [variant]
    by_label: dict[str, Variant] = {}
    for variant in varied:
        other = by_label.setdefault(variant.label, variant)
        if other != variant:
            raise UserError(
                f"{other.words} and {variant.words} would both be called {variant.label}, and have one folder; change one of the "
                "values, or give them in two calls with an --out each"
            )
    return list(by_label.values())


def _assignment(text: str, flag: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise UserError(f"{flag}: expected SETTING=VALUE, found `{text}`")
    _check_not_set_per_run(name, f"{flag} {text}")
    return name, value


def _check_not_set_per_run(setting: str, found: str) -> None:
    if setting in SET_PER_RUN:
        raise UserError(f"{found}: a benchmark sets `{setting}` for each run itself; use {SET_PER_RUN[setting]}")


def _has(setting: str, of_method: type) -> bool:
    section, _, name = setting.partition(".")
    owner = of_method if section == "method" else SECTIONS.get(section)
    return owner is not None and name in {field.name for field in dataclasses.fields(owner)}


def settings_of(
    variant: Variant,
    methods: Methods,
    preset: str,
    of_suite: Mapping[str, Any],
    file: Mapping[str, Any],
    given: Mapping[str, Any],
) -> Config:
    """The variant's beat the command line's, these the file's, these the suite's, these the preset's.

    Settings of a method that other methods do not have are for those that do.
    """
    joined = {**of_suite, **for_method(file, variant.method), **given, "method.name": variant.method}
    config = resolve(methods, preset, joined, dict(variant.settings))
    weights, cache = (absolute_path(path) for path in (config.model.weights, config.data.cache_dir))
    anchored = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, weights=weights),
        data=dataclasses.replace(config.data, cache_dir=cache, source=None, target=None),
    )
    return settled(anchored)  # as the run will do, and write


def check_given(given: Mapping[str, Any], variants: Sequence[Variant], methods: Methods) -> None:
    """What `settings_of` would pass over is a mistake: a setting of no method that is to run, and one that is each run's own."""
    for setting in given:
        _check_not_set_per_run(setting, f"--{setting}")
        known = any(_has(setting, cls) for cls in methods.values())
        if setting.startswith("method.") and known and not any(_has(setting, methods[v.method]) for v in variants):
            raise UserError(f"`{setting}` is a setting of none of the methods {', '.join(v.method for v in variants)}")


def check_same_settings(folder: Path, planned: Config, methods: Methods) -> None:
    """A run that is there already must be made with the settings that its method has now: tables compare like with like."""
    made = folder / "config.yaml"
    try:
        given = read_settings_file(made)
    except UserError:
        return  # there is none, or a damaged one: its run is told to have failed
    try:
        before = flatten(resolve(methods, file=given).as_dict(), str(made))
    except UserError as error:
        raise UserError(f"{folder} was made with settings that are none now ({error}); give another --out") from None
    now = flatten(planned.as_dict(), "settings")
    for name in sorted({*before, *now} - NO_MATTER):
        if before.get(name) != now.get(name):
            raise UserError(
                f"{folder} was made with `{name}` {before.get(name)}, now it is {now.get(name)}; give another --out, or the "
                "settings it was made with"
            )


def check_same_data(folder: Path, task: str, now: Mapping[str, Path], origin: Callable[[Path], Path]) -> None:
    """A run that is there must be of the images that are asked for: tables compare like with like. A place that is gone was
    moved.

    `now`: letter of a domain -> where its images lie, or a folder above; `origin`: the same of a path in a run's settings.
    """
    try:
        before = read_settings_file(folder / "config.yaml")
    except UserError:
        return  # there is none, or a damaged one: its run is told to have failed
    for letter, name in zip(task.split("-"), ("data.source", "data.target"), strict=False):
        path = before.get(name)
        if path is None or letter not in now:
            continue
        place = origin(Path(str(path)))
        if place.exists() and not _lies_in(place, now[letter]):
            raise UserError(
                f"{folder} was made from {printable(str(place))}, now {printable(str(now[letter]))} is asked for; give as --data "
                "the root it was made from, or another --out"
            )


def _lies_in(place: Path, folder: Path) -> bool:
    """By whatever names both go."""
    return folder.exists() and any(part.samefile(folder) for part in (place, *place.parents))
