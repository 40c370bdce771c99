"""Every setting, its default, its presets, and their strict loading.

A setting is named `section.field`. Values come from the preset, then the file, then the command line, the later beating the
earlier. The `method` section belongs to the chosen method: its fields are those of that method's `Config`.
"""

import ast
import dataclasses
import difflib
import inspect
import itertools
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from certvol.bounds import bounds_of
from certvol.errors import UserError

NormMode = Literal["mixed", "per_domain", "dsbn", "frozen", "auto"]
Selector = Literal["last", "mutual_information", "bnm", "snd", "corr_c", "entropy", "source_accuracy", "sigma", "ensv"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where images come from and how they are kept."""

    source: str | None = None
    """Folder of labelled images, a sub-folder per class."""
    target: str | None = None
    """Folder of images to adapt to; labels are neither needed nor looked at."""
    image_size: int | None = None
    """Side in pixels of what the network sees; null: what the backbone was made for."""
    cache_dir: str | None = None
    """Place of the decoded images; null: $CERTVOL_CACHE, else the user's cache folder."""
    cache_limit_gb: float = 50.0
    """All decoded images together take at most this; the longest unused go first."""
    workers: int = 0
    """Cores that decode images; 0: all."""
    device_share: float = 0.5
    """Decoded images live on the GPU where they fit into this share of its free memory."""
    holdout: float = 0.1
    """Share of the source kept out of training, to notice a model that goes wrong."""
    views: int = 4
    """With model.train head: views of each image whose features are extracted; the first is the test view."""
    max_megapixels: float = 179.0
    """A larger image is taken for a decompression bomb and skipped."""


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """The random view of a training image. All of its geometry is one warp."""

    enabled: bool = True
    crop_area: float = 0.75
    """Smallest share of the image that the random crop keeps."""
    crop_aspect: float = 1.3333333333333333
    """Largest change of aspect ratio by the random crop."""
    flip: bool = True
    rotate: float = 10.0
    """Degrees, either way."""
    shear: float = 10.0
    """Degrees, either way."""
    shift: float = 0.025
    """Share of the side, either way."""
    scale: float = 0.025
    """Zoom, either way."""
    grey: float = 0.2
    """Probability of a grey view."""
    jitter: float = 0.05
    """Brightness, contrast, saturation and hue of the other views, either way."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The network."""

    backbone: str = "resnet50.tv_in1k"
    """Any timm name, or small_cnn."""
    weights: str | None = None
    """A .safetensors or .pth file; null: the hub's, for a timm backbone; none: from scratch."""
    hub: bool = True
    """False: weights are never downloaded; those in the local cache of the hub still serve."""
    norm: NormMode = "auto"
    """Statistics of BatchNorm: mixed, per_domain (own statistics), dsbn (own affine too), frozen, auto (a trial decides)."""
    sync_norm: bool = False
    """Several processes: BatchNorm's statistics over the whole batch, not over each process's share of it."""
    train: Literal["all", "last_block", "head"] = "all"
    """Which part of the backbone learns. head: none, so features are extracted once, with the statistics of the weights."""
    classifier_layers: Literal[0, 1, 2] = 0
    """0: 2, or 1 behind a frozen backbone, where samples are then drawn as logits: exact, and fast on a CPU."""
    adapter: bool | None = None
    """A residual layer, started as the identity, that moves a frozen backbone's features; null: with one classifier layer."""
    dropout: float = 0.5
    """Before each linear layer of the classifier, while training."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The two phases."""

    pretrain_steps: int = 500
    cycles: int = 40
    cycle_steps: int = 50
    """Steps between two labellings; 0: 5 * ceil(classes / 16)."""
    batch_size: int = 128
    seed: int = 0
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto: bf16 on a GPU, and on a CPU that has it in hardware for images of 64 px or more; else fp32. Predictions are fp32."""
    record: bool = True
    """On one GPU: record a step once and replay it (a CUDA graph), so that the GPU never waits for Python."""
    compile: Literal["auto", "always", "never"] = "auto"
    """torch.compile of the backbone: a minute to start, faster after. auto: on a GPU, where a run has 5,000 steps or more."""
    learning_rate: float = 5e-4
    head_rate: float = 1.0
    """Learning rate of all that stands behind the backbone, over the backbone's; times that of a method's part, where it has one.
    Many comparators are published with 10."""
    adapt_learning_rate: float | None = None
    """null: the same as in pretraining."""
    schedule: Literal["can", "constant"] = "can"
    """can: lr / (1 + 10 p)^exponent over the adaptation's progress p."""
    schedule_exponent: float = 0.75
    momentum: float = 0.95
    weight_decay: float = 0.0
    grad_clip: float = 0.0
    """Largest norm of the gradient; 0: no limit."""
    fresh_optimizer: bool = False
    """Forget the momentum of pretraining when adaptation starts."""
    pseudo_labels: Literal["argmax", "mc_dropout"] = "argmax"
    label_view: Literal["test", "augmented"] = "test"
    """The view of an image that gets its pseudo-label."""
    mc_passes: int = 32
    mc_dropout: float = 0.85
    labelling: Literal["on_demand", "full"] = "on_demand"
    """on_demand: label, in random order, only as many images as the cycle will draw. Methods that need all labels, and plain
    batches, which tell beforehand what they draw, take no notice of this."""
    labelling_share: float = 1.0
    """At most this share of the target is labelled per cycle. Below 1 it is an approximation: a rare class may seem absent."""
    batches: Literal["auto", "balanced", "plain"] = "auto"
    """balanced: by class and by pseudo-class; plain: images of either domain as they come; auto: adaptation as in the method's
    paper, after balanced pretraining."""
    teacher: float = 0.0
    """Decay per step of an average of the weights that labels, predicts and is delivered in their place (0.99); 0: none."""
    log_every: int = 10
    checkpoint_seconds: float = 60.0
    checkpoint_previous: bool = True
    """Keep the checkpoint before the newest too: twice the space on disk (each is twice the weights, three times with a
    teacher), and a way back."""
    tensorboard: bool = False
    """Write the figures of history.jsonl for TensorBoard too, into RUN/tensorboard; needs the extra `certvol[tensorboard]`."""


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """Label-free signs of collapse, and what to do about them."""

    action: Literal["back", "stop", "warn"] = "back"
    """back: end adaptation and deliver the best healthy cycle; stop: fail the run; warn: say so and go on."""
    patience: int = 2
    """Cycles in a row that must look collapsed; of the last cycles, fewer will do."""
    spread: float = 0.6
    """Collapsed: the number of classes in use falls below this share of what the pretrained model uses."""
    source_accuracy: float = 0.75
    """Collapsed: accuracy on held-out source falls below this share of the pretrained model's."""
    images: int = 1024
    """How many fixed target images are watched, and at most half as many held-out source images."""
    trial_cycles: int = 5
    """With model.norm auto: cycles of trial for each candidate."""
    select: Selector = "last"
    """Which cycle's model is delivered: the last, or the best healthy one by a label-free score (ensv: of two at a time)."""
    keep: Literal["chosen", "all"] = "chosen"
    """all: the weights of each score's best cycle stay in RUN/cycles, not only those of `select` and of the guard."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """All sections. `method` is an instance of the chosen method's own `Config`, whose `name` is set in `method_name`."""

    method_name: str
    method: Any
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        sections = {name: dataclasses.asdict(getattr(self, name)) for name in SECTIONS}
        return {"method": {"name": self.method_name, **dataclasses.asdict(self.method)}, **sections}

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.as_dict(), sort_keys=False)


SECTIONS: dict[str, type] = {
    "data": DataConfig,
    "augment": AugmentConfig,
    "model": ModelConfig,
    "training": TrainingConfig,
    "guard": GuardConfig,
}

# Settings of a method are given to the methods that have them: `paper` sets M for cvp and nothing for basic.
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": (
        "our recommendation: the paper's method, M and alpha, statistics chosen by a trial, collapse guard on",
        {},
    ),
    "paper": (
        "the paper's settings, mixed statistics; nothing held out, the guard only warns",
        {
            "training.cycles": 250,
            "training.cycle_steps": 50,
            "model.norm": "mixed",
            "data.holdout": 0.0,
            "guard.action": "warn",
        },
    ),
    "authors": (
        "the settings of the authors' release, mixed statistics; nothing held out, the guard only warns",
        {
            "method.num_samples": 32,
            "method.samples_weight": 0.75,
            "training.cycles": 200,
            "training.cycle_steps": 0,
            "training.adapt_learning_rate": 2.5e-4,
            "training.schedule": "constant",
            "training.weight_decay": 1e-5,
            "training.fresh_optimizer": True,
            "training.pseudo_labels": "mc_dropout",
            "training.label_view": "augmented",
            "model.norm": "mixed",
            "data.holdout": 0.0,
            "guard.action": "warn",
        },
    ),
    "quick": (
        "small and short, for the demo and CPUs: small_cnn on 32 px images, from scratch",
        {
            "model.backbone": "small_cnn",
            "method.num_samples": 16,
            "training.pretrain_steps": 600,
            "training.cycles": 60,
            "training.cycle_steps": 15,
            "training.learning_rate": 1e-2,
            "training.momentum": 0.9,
        },
    ),
}


def list_settings(methods: Mapping[str, type]) -> list[tuple[str, str, str]]:
    """(name, default, meaning) of every setting: the texts under the fields above."""
    rows = []
    for section, cls in SECTIONS.items():
        body = ast.parse(inspect.getsource(cls)).body[0]
        texts: dict[str, str] = {}
        statements = body.body if isinstance(body, ast.ClassDef) else []
        for statement, following in itertools.pairwise([*statements, ast.Pass()]):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                texts[statement.target.id] = str(following.value.value) if is_text else ""  # type: ignore[attr-defined]
        rows += [(f"{section}.{f.name}", _default(f), " ".join(texts[f.name].split())) for f in dataclasses.fields(cls)]
    rows.append(("method.name", "cvp", "which method adapts: `certvol list methods`"))
    for name, cls in methods.items():
        remarks = _remarks(cls)
        for f in dataclasses.fields(cls):
            told = f": {remarks[f.name]}" if f.name in remarks else ""
            rows.append((f"method.{f.name}", _default(f), f"of {name}{told}"))
    return rows


def _default(field: "dataclasses.Field[Any]") -> str:
    """As a YAML file has it, but for the quotes."""
    default = field.default
    return "null" if default is None else str(default).lower() if isinstance(default, bool) else str(default)


def _remarks(cls: type) -> dict[str, str]:
    """What stands behind the fields of a method's settings."""
    found = (re.match(r"\s*(\w+): .*\S  # (.+)", line) for line in inspect.getsource(cls).splitlines())
    return {match[1]: match[2] for match in found if match}


def flatten(settings: Mapping[str, Any], where: str) -> dict[str, Any]:
    """{"training": {"cycles": 4}} and {"training.cycles": 4} alike become the latter; "method" alone is its name."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if not isinstance(key, str):
            raise UserError(f"{where}: a setting's name must be text, found {shown(key)}")
        if isinstance(value, Mapping):
            flat.update({f"{key}.{name}": inner for name, inner in value.items()})
        elif "." in key:
            flat[key] = value
        elif value is None and (key in SECTIONS or key == "method"):
            continue  # an empty section of a YAML file
        elif key == "method" and isinstance(value, str):
            flat["method.name"] = value
        else:
            raise UserError(f"{where}: expected `{key}` to be a section with settings, found {shown(value)}")
    return flat


def read_settings_file(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read the settings file {path}: {error.strerror}") from None
    except Exception as error:  # YAML's own, and whatever Python says of a date, number or nesting that cannot be
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{path} is not valid YAML: {first}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, Mapping):
        raise UserError(f"{path} should hold sections of settings (such as `training:`), found {type(loaded).__name__}")
    return flatten(loaded, str(path))


def absolute_path(path: str | None) -> str | None:
    """So that a run can be gone on with from anywhere; `none`, which weights may be, stays."""
    if path is not None and (not path or "\0" in path):
        raise UserError(f"expected a path, found {shown(path)} (the current folder is `.`)")
    return path if path in (None, "none") else str(Path(str(path)).expanduser().absolute())


def shown(value: Any) -> str:
    """A value for a message: a file may hold a long one, or one that aliases make longer than memory."""
    brief = reprlib.Repr()
    brief.maxlevel, brief.maxstring, brief.maxother = 2, 80, 80
    return brief.repr(value)


def nearest(word: str, choices: list[str]) -> str:
    """`; did you mean X?`, or nothing where no choice is near."""
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f"; did you mean `{close[0]}`?" if close else ""


def for_method(file: Mapping[str, Any], name: Any) -> dict[str, Any]:
    """A file's settings for the method `name`: where the file is of another, `method.weight` means another thing there."""
    of_another = file.get("method.name", name) != name
    return {key: value for key, value in file.items() if not (of_another and key.startswith("method."))}


def resolve(
    methods: Mapping[str, type],
    preset: str = "default",
    file: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """Joins preset, file and overrides (flat dictionaries) into one checked Config. `methods`: name -> its Config class."""
    if preset not in PRESETS:
        raise UserError(
            f"there is no preset `{preset}`{nearest(preset, list(PRESETS))} (presets: {', '.join(PRESETS)})"
        )
    file, overrides = file or {}, overrides or {}
    from_preset = PRESETS[preset][1]
    name = {**file, **overrides}.get("method.name", "cvp")
    given = {key: value for key, value in {**for_method(file, name), **overrides}.items() if key != "method.name"}
    others = {f"method.{f.name}": other for other, cls in methods.items() for f in dataclasses.fields(cls)}
    if not isinstance(name, str) or name not in methods:
        known, shown_name = sorted(methods), name[:50] if isinstance(name, str) else shown(name)
        raise UserError(f"there is no method `{shown_name}`{nearest(shown_name, known)} (methods: {', '.join(known)})")
    sections = {"method": methods[name], **SECTIONS}
    known_settings = [f"{s}.{f.name}" for s, cls in sections.items() for f in dataclasses.fields(cls)]
    for key in list(given):
        if key in known_settings:
            continue
        if key in others and key not in overrides:
            del given[key]  # a file for several methods
        elif key in others:
            raise UserError(f"`{key}` is a setting of the method {others[key]}, not of {name}")
        else:
            raise UserError(f"unknown setting `{key}`{nearest(key, [*known_settings, 'method.name'])}")
    merged = {**{key: value for key, value in from_preset.items() if key in known_settings}, **given}
    parsed = {section: _typed(section, cls, merged) for section, cls in sections.items()}
    config = Config(method_name=name, **parsed)
    _check_ranges(config)
    return config


def _typed(section: str, cls: type, flat: Mapping[str, Any]) -> Any:
    """An instance of `cls` from the flat settings of its section, values checked against the field's type."""
    from argparse import ArgumentError

    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False, add_help=False)
    parser.add_class_arguments(cls, section)
    own = {key.partition(".")[2]: value for key, value in flat.items() if key.startswith(f"{section}.")}
    values: dict[str, Any] = {}
    for name, value in own.items():
        kind = {f.name: f.type for f in dataclasses.fields(cls)}[name]
        try:
            if (value is None and "None" not in str(kind)) or isinstance(value, list | tuple | set | Mapping):
                raise ValueError("jsonargparse takes null for every type, and writes out a nest of lists to refuse it")
            values[name] = parser.parse_object({section: {name: value}})[section][name]
        except (ArgumentError, TypeError, ValueError, RecursionError):
            raise UserError(f"`{section}.{name}` should be {_kind_in_words(kind)}, found {shown(value)}") from None
    return cls(**values)


def _kind_in_words(kind: Any) -> str:
    text = getattr(kind, "__name__", None) if isinstance(kind, type) else str(kind).replace("typing.", "")
    words = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
    if text is None:
        return "another type"
    if text.startswith("Literal["):
        return "one of " + text.removeprefix("Literal[").removesuffix("]").replace("'", "")
    if text.endswith(" | None"):
        inner = text.removesuffix(" | None")
        return f"{words.get(inner, inner)} or null"
    return words.get(text, text)


SMALLEST_IMAGE = 8  # pixels
# Of the sections here; a method's own settings have theirs beside them (bounds.py).
_POSITIVE = (
    "data.cache_limit_gb data.max_megapixels data.views training.batch_size training.learning_rate training.head_rate "
    "training.log_every training.mc_passes training.labelling_share guard.patience guard.trial_cycles guard.images "
    "augment.crop_area augment.crop_aspect"
).split()
_NOT_NEGATIVE = (
    "training.pretrain_steps training.cycles training.cycle_steps training.seed training.momentum training.weight_decay "
    "training.grad_clip training.checkpoint_seconds training.mc_dropout training.schedule_exponent training.teacher guard.spread "
    "guard.source_accuracy data.workers data.device_share data.holdout model.dropout augment.rotate augment.shear "
    "augment.shift augment.scale augment.grey augment.jitter"
).split()
_AT_MOST = {
    "training.batch_size": 2**16,
    "training.learning_rate": 1e30,
    "training.head_rate": 1e6,
    "training.labelling_share": 1,
    "training.schedule_exponent": 10,
    "data.holdout": 0.5,  # to leave images to train on
    "data.workers": 1024,
    "data.views": 1024,
    "augment.crop_area": 1,
    "augment.grey": 1,
    "augment.jitter": 1,
    "guard.images": 2048,
}
_BELOW_ONE = "model.dropout training.mc_dropout training.momentum training.teacher".split()


def _check_ranges(config: Config) -> None:
    flat = flatten(config.as_dict(), "settings")
    for key in (k for k in _POSITIVE if k in flat):
        if not flat[key] > 0:
            raise UserError(f"`{key}` should be above 0, found {flat[key]}")
    for key in (k for k in _NOT_NEGATIVE if k in flat):
        if not flat[key] >= 0:
            raise UserError(f"`{key}` should not be negative, found {flat[key]}")
    for key in (k for k in _BELOW_ONE if k in flat):
        if not flat[key] < 1:
            raise UserError(f"`{key}` should be below 1, found {flat[key]}")
    for key, most in _AT_MOST.items():
        if not flat[key] <= most:
            raise UserError(f"`{key}` should be at most {most:g}, found {flat[key]}")
    for name, bounds in bounds_of(config.method):
        if (fault := bounds.fault(flat[f"method.{name}"])) is not None:
            raise UserError(f"`method.{name}` {fault}, found {flat[f'method.{name}']}")
    rate = flat["training.adapt_learning_rate"]
    if rate is not None and not 0 < rate <= _AT_MOST["training.learning_rate"]:
        raise UserError(f"`training.adapt_learning_rate` should be above 0, found {rate}")
    if flat["training.batch_size"] < 4:
        raise UserError(f"`training.batch_size` should be 4 or more, found {flat['training.batch_size']}")
    size = flat["data.image_size"]
    if size is not None and size < SMALLEST_IMAGE:
        raise UserError(f"`data.image_size` should be {SMALLEST_IMAGE} pixels or more, found {size}")
