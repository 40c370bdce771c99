"""Every setting of certvol except those that a method or a pseudo-label rule declares itself."""

from dataclasses import dataclass
from typing import Literal

from certvol.settings.data_sections import AugmentConfig, DataConfig
from certvol.settings.declare import setting, settings_by_name

NormMode = Literal["mixed", "per_domain", "dsbn", "frozen", "auto"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The backbone, its normalisation, and which part of the network is trained."""

    backbone: str = setting(
        "resnet50.tv_in1k", help="A timm model name or small_cnn (see `certvol list backbones`)."
    )
    weights: str | None = setting(
        None,
        help="A .safetensors or .pth file; null: timm's pretrained weights; none: random weights.",
    )
    start: str | None = setting(
        None, help="Run whose delivered model adaptation continues from, without pretraining."
    )
    hub: bool = setting(
        True,
        affects_result=False,
        help="Download missing weights; false: use only weights that are in the local cache.",
    )
    norm: NormMode = setting(
        "auto",
        help="BatchNorm statistics: mixed over both domains, per_domain, dsbn (own scale and shift "
        "too), frozen, or auto (a short trial decides).",
    )
    sync_norm: bool = setting(
        False,
        help="With torchrun: BatchNorm statistics over the whole batch, not one process's share.",
    )
    train: Literal["auto", "all", "last_block", "head"] = setting(
        "all",
        help="Part of the network that is trained. head: the backbone is frozen, and features are "
        "extracted once; auto: head if the backbone has pretrained weights, else all.",
    )
    feature_dims: int | None = setting(
        None,
        at_least=0,
        help="With model.train head: reduce features to this many principal components before "
        "training; 0: keep all; null: 512, or 0 for a method in closed form.",
    )
    classifier_layers: Literal[0, 1, 2] = setting(
        0,
        help="Layers of the classifier; 0: 1 behind a frozen backbone (sampling is then exact and "
        "fast), else 2.",
    )
    adapter: bool | None = setting(
        None,
        help="Add a residual layer, started as the identity, that adapts frozen features; null: "
        "only with one classifier layer.",
    )
    dropout: float = setting(
        0.5, at_least=0, below=1, help="Dropout before each linear layer of the classifier."
    )


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Pretraining on the source, then adaptation in cycles."""

    pretrain_steps: int = setting(500, at_least=0, help="Steps on source images before adaptation.")
    cycles: int = setting(
        40,
        at_least=0,
        help="Most cycles of adaptation. Each one labels the target, then trains on these labels.",
    )
    settled: float = setting(
        0.0,
        at_least=0,
        at_most=1,
        help="End adaptation when, for 2 cycles in a row, at most this share of the labels and "
        "predictions changed; 0: never. Methods with stages or growing losses ignore this.",
    )
    cycle_steps: int = setting(
        50,
        at_least=0,
        at_most=100_000,
        help="Steps per cycle; 0: 5 * ceil(classes / 16), as in the authors' code.",
    )
    batch_size: int = setting(
        128, at_least=4, at_most=2**16, help="Images per step, source and target together."
    )
    seed: int = setting(0, at_least=0, help="Seed of all random numbers.")
    device: str = setting(
        "auto", affects_result=False, help="Device to compute on: auto, cpu, cuda or cuda:N."
    )
    precision: Literal["auto", "fp32", "bf16"] = setting(
        "auto",
        help="Training precision. auto: bf16 on GPUs, and on CPUs with bf16 hardware for images of "
        "64 px or more; else fp32. Predictions are always fp32.",
    )
    record: bool = setting(
        True,
        affects_result=False,
        help="On one GPU: record a step as a CUDA graph and replay it, which is faster.",
    )
    compile: Literal["auto", "always", "never"] = setting(
        "auto",
        affects_result=False,
        help="Compile the backbone by torch.compile, which takes a minute and makes steps faster. "
        "auto: on a GPU, for runs of 5,000 steps or more.",
    )
    optimizer: str = setting(
        "sgd", help="sgd with Nesterov momentum, or adamw, whose first beta is training.momentum."
    )
    learning_rate: float = setting(
        5e-4, above=0, help="Learning rate of pretraining, and of the backbone."
    )
    head_rate: float | None = setting(
        None,
        above=0,
        at_most=1e6,
        help="Learning rate of all layers behind the backbone, relative to the backbone's; null: "
        "10 behind a frozen backbone, for layers without a rate of their own, else 1.",
    )
    adapt_learning_rate: float | None = setting(
        None, above=0, help="Learning rate of adaptation; null: as in pretraining."
    )
    schedule: Literal["can", "constant"] = setting(
        "can", help="can: lr / (1 + 10 p)^exponent, where p is the progress of adaptation."
    )
    schedule_exponent: float = setting(
        0.75, at_least=0, at_most=10, help="Exponent of the schedule `can`."
    )
    momentum: float = setting(0.95, at_least=0, below=1, help="Momentum of the optimiser.")
    weight_decay: float = setting(0.0, at_least=0, help="Weight decay of all weights.")
    grad_clip: float = setting(0.0, at_least=0, help="Largest norm of the gradient; 0: no limit.")
    fresh_optimizer: bool = setting(
        False,
        help="Discard the optimiser's momentum when adaptation starts. Methods with stages always "
        "do so at the start of each stage.",
    )
    pseudo_labels: str = setting(
        "argmax", help="Rule that labels the target (see `certvol list rules`)."
    )
    label_view: Literal["test", "augmented"] = setting(
        "test", help="View of an image that is used to compute its pseudo-label."
    )
    mc_passes: int = setting(
        32,
        above=0,
        at_most=1000,
        help="Passes of MC-dropout, for certainty and the rule mc_dropout.",
    )
    mc_dropout: float = setting(0.85, at_least=0, below=1, help="Dropout rate of MC-dropout.")
    labelling: Literal["on_demand", "full"] = setting(
        "on_demand",
        help="on_demand: label images in random order until each class has enough for the cycle; "
        "full: label all. Methods that need all labels, and plain batches, ignore this.",
    )
    labelling_share: float = setting(
        1.0,
        above=0,
        at_most=1,
        help="Largest share of the target labelled per cycle. Below 1, a rare class may be missed.",
    )
    batches: Literal["auto", "balanced", "plain"] = setting(
        "auto",
        help="balanced: the same number of images per class or pseudo-label; plain: random images; "
        "auto: as in the method's paper.",
    )
    class_power: float = setting(
        0.0,
        at_least=0,
        at_most=1,
        help="With balanced batches: draw each target class in proportion to its share of the "
        "pseudo-labels, raised to this power; 0: all classes equally often.",
    )
    source_shares: str = setting(
        "equal",
        help="With several sources, their shares of each step's source images: equal, size (as "
        "many as each has), or numbers in the order of the sources, such as 2,1.",
    )
    reviewed_share: float = setting(
        0.25,
        above=0,
        at_most=0.9,
        help="With reviewed labels: their share of each step of adaptation, in addition to the "
        "images of training.batch_size.",
    )
    teacher: float = setting(
        0.0,
        at_least=0,
        below=1,
        help="Decay per step (such as 0.99) of a moving average of the weights, which then labels "
        "the target and is delivered; 0: no average.",
    )
    log_every: int = setting(
        10, above=0, affects_result=False, help="Steps between lines of history.jsonl."
    )
    checkpoint_seconds: float = setting(
        60.0, at_least=0, affects_result=False, help="Seconds between checkpoints."
    )
    checkpoint_previous: bool = setting(
        True,
        affects_result=False,
        help="Also keep the previous checkpoint, as a fallback; this takes twice the disk space.",
    )
    tensorboard: bool = setting(
        False,
        affects_result=False,
        help="Also write history.jsonl for TensorBoard; needs `pip install certvol[tensorboard]`.",
    )


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """The guard against collapse, and the choice of the delivered model; both without labels."""

    action: Literal["pretrained", "back", "stop", "warn"] = setting(
        "pretrained",
        help="On collapse. pretrained: deliver the model before adaptation; back: deliver the best "
        "healthy cycle; stop: fail the run; warn: only warn.",
    )
    patience: int = setting(
        2,
        above=0,
        help="Cycles in a row that must look collapsed; fewer are enough at the end of a run.",
    )
    spread: float = setting(
        0.6,
        at_least=0,
        help="Collapsed if predictions use less than this share of the pretrained model's classes.",
    )
    source_accuracy: float = setting(
        0.75,
        at_least=0,
        help="Collapsed if accuracy on held-out source images falls below this share of the "
        "pretrained model's.",
    )
    images: int = setting(
        1024,
        above=0,
        at_most=2048,
        help="Target images that are watched, and at most half as many held-out source images.",
    )
    trial_cycles: int = setting(
        5, above=0, help="With model.norm auto: cycles in the trial of each norm mode."
    )
    select: str = setting(
        "last",
        help="Cycle whose model is delivered: last, or the best by the named validator (a "
        "label-free score).",
    )
    keep: Literal["chosen", "all"] = setting(
        "chosen",
        affects_result=False,
        help="all: keep the best weights of every validator, not only of the chosen one.",
    )


SECTIONS: dict[str, type] = {
    "data": DataConfig,
    "augment": AugmentConfig,
    "model": ModelConfig,
    "training": TrainingConfig,
    "guard": GuardConfig,
}

WITHOUT_EFFECT = frozenset(
    name for name, each in settings_by_name(SECTIONS).items() if not each.affects_result
)
"""The settings that do not affect a run's result."""
