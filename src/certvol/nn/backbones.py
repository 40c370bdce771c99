"""Create backbones by name. A backbone maps normalised images [N, 3, H, W] to features [N, dim].

Names are timm's, or `small_cnn`, or `features-D` for features from a file. timm is imported
only for its own backbones.
"""

import contextlib
import difflib
import inspect
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from certvol.errors import UserError, first_line
from certvol.nn import small_cnn
from certvol.nn.torchvision_repair import import_timm
from certvol.nn.weights import hub_weights, read_weights

NO_WEIGHTS = "none"
RESNET50_V1 = "resnet50_v1"
"""ResNet-50 as first published: it halves the resolution in the first 1x1 convolution of a stage,
as the weights of Caffe and Keras need. timm's and torchvision's do so in the 3x3 convolution."""
Triple = tuple[float, float, float]


@dataclass(frozen=True)
class BackboneInfo:
    """The input that a backbone expects, and the features that it returns."""

    name: str
    dim: int
    image_size: int
    mean: Triple
    std: Triple


def list_backbones() -> list[str]:
    """Return our own names, then timm's architectures and pretrained tags in alphabetical order."""
    return ["small_cnn", RESNET50_V1, *sorted(_timm_names())]


def describe(name: str, image_size: int | None) -> BackboneInfo:
    """Describe a backbone without its weights; by default for the image size it was made for."""
    if (dim := features_dim(name)) is not None:
        return BackboneInfo(name, dim, 1, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    if name == "small_cnn":
        size = image_size or small_cnn.IMAGE_SIZE
        return BackboneInfo(name, small_cnn.DIM, size, small_cnn.MEAN, small_cnn.STD)
    return _describe_timm(name, image_size)


def features_dim(name: str) -> int | None:
    """Return D of the name `features-D`; None for a backbone of images."""
    found = re.fullmatch("features-([1-9][0-9]{0,6})", name)
    return int(found[1]) if found else None


def has_pretrained_weights(name: str, weights: str | None) -> bool:
    """Return whether a backbone starts from weights of a file or of the hub."""
    return weights != NO_WEIGHTS and (weights is not None or name != "small_cnn")


def create_backbone(
    name: str, weights: str | None, image_size: int | None, download: bool = True
) -> tuple[nn.Module, BackboneInfo]:
    """Create a backbone and load its weights.

    `weights` is a file, None for the hub's weights (random for `small_cnn`, which has none there),
    or "none" for random ones. Without `download`, the hub's come from the local cache. Convolutions
    are laid out channels-last, which is faster on CPUs and GPUs for images of the same layout.
    """
    file = None if weights == NO_WEIGHTS else weights
    # First, so that a wrong file fails at once.
    tensors = None if file is None else read_weights(file)
    info = describe(name, image_size)
    if features_dim(name) is not None:
        module: nn.Module = nn.Identity()
    elif name == "small_cnn":
        module = small_cnn.SmallCNN()
    elif weights is None:
        module = _create_timm(name, image_size, _hub_weights(name, download))
    else:
        module = _create_timm(name, image_size)
    if tensors is not None and features_dim(name) is None:
        _load(module, tensors, name, str(file))
    return module.to(memory_format=torch.channels_last), info  # type: ignore[call-overload]


# timm


@cache
def _timm_names() -> frozenset[str]:
    timm = import_timm()
    return frozenset([*timm.list_models(), *timm.list_models(pretrained=True)])


def _timm_cfg(name: str) -> Any:
    """Return the pretrained_cfg of a name; a name without a tag gets timm's default."""
    timm = import_timm()
    from timm.models import get_pretrained_cfg

    if name == RESNET50_V1:
        return get_pretrained_cfg("resnet50")

    if timm.is_model(name):
        # RuntimeError: the architecture exists, but not the tag.
        with contextlib.suppress(RuntimeError), _quiet():
            cfg = get_pretrained_cfg(name)
            if cfg is not None:
                return cfg
    near = ", ".join(difflib.get_close_matches(name, list_backbones(), n=3, cutoff=0.5))
    hint = f"did you mean {near}?" if near else "see certvol list backbones"
    raise UserError(f"unknown backbone `{name}`; {hint}")


@cache
def _describe_timm(name: str, image_size: int | None) -> BackboneInfo:
    cfg = _timm_cfg(name)
    size = image_size or int(cfg.input_size[-1])
    if (channels := int(cfg.input_size[0])) != 3:
        raise UserError(
            f"the backbone `{name}` takes images of {channels} channels, not 3; choose another"
        )
    # The meta device computes only shapes: it takes no memory or time, and draws nothing.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            with torch.device("meta"):
                shape = _feature_shape(_create_timm(name, image_size), size)
        except UserError:
            raise
        except Exception:  # some models need real numbers while they are built
            try:
                shape = _feature_shape(_create_timm(name, image_size), size)
            except (RuntimeError, AssertionError, ValueError) as error:
                raise _unfit_size(name, size, error) from None
    if len(shape) != 2:
        raise UserError(
            f"the backbone `{name}` gives features of shape {list(shape[1:])}, not one vector per "
            "image; choose another"
        )
    mean, std = (tuple(float(v) for v in values) for values in (cfg.mean, cfg.std))
    return BackboneInfo(name, shape[1], size, mean, std)  # type: ignore[arg-type]


def _feature_shape(module: nn.Module, size: int) -> torch.Size:
    """Run the module once: num_features is wrong if a backbone widens features after pooling."""
    features: Tensor = module.eval()(torch.zeros(2, 3, size, size))
    return features.shape


def _unfit_size(name: str, size: int | None, error: Exception) -> UserError:
    return UserError(
        f"the backbone `{name}` does not take images of {size} pixels ({first_line(error)}); "
        "change --data.image_size"
    )


def _create_timm(
    name: str, image_size: int | None, hub_tensors: Mapping[str, Tensor] | None = None
) -> nn.Module:
    timm = import_timm()
    options: dict[str, Any] = {}
    if image_size is not None and getattr(_timm_cfg(name), "fixed_input_size", False):
        options["img_size"] = image_size  # timm resamples pretrained position embeddings
    if hub_tensors is not None:
        options |= {"pretrained": True, "pretrained_cfg_overlay": {"state_dict": dict(hub_tensors)}}
    with _quiet():
        try:
            if name == RESNET50_V1:
                return _resnet50_v1()
            module: nn.Module = timm.create_model(name, num_classes=0, **options)
        except (RuntimeError, AssertionError, ValueError, TypeError) as error:
            if "img_size" not in options:
                raise
            raise _unfit_size(name, image_size, error) from None
    return module


def _resnet50_v1() -> nn.Module:
    module: nn.Module = import_timm().create_model("resnet50", num_classes=0)
    for stage in ("layer2", "layer3", "layer4"):
        first = module.get_submodule(f"{stage}.0")
        first.conv1.stride, first.conv2.stride = (2, 2), (1, 1)  # type: ignore[assignment]
    return module


def _hub_weights(name: str, download: bool) -> dict[str, Tensor]:
    if name == RESNET50_V1:
        raise UserError(
            f"the hub has no weights for `{name}`; give --weights FILE (converted from Caffe or "
            "Keras), or --weights none to train from scratch"
        )
    cfg = _timm_cfg(name)
    if not cfg.hf_hub_id and not cfg.url:
        architecture = name.partition(".")[0]
        tagged = sorted(n for n in _timm_names() if n.startswith(f"{architecture}."))
        hint = f"name one of {_few(tagged)}, or " if tagged else ""
        raise UserError(
            f"the hub has no weights for `{name}`; {hint}give --weights FILE, or --weights none to "
            "train from scratch"
        )
    return hub_weights(name, cfg, download)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence timm's log messages about moved modules, mapped names and omitted heads."""
    logger = logging.getLogger("timm")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


# Weights from a file


def _load(module: nn.Module, tensors: dict[str, Tensor], name: str, file: str) -> None:
    """Load all of a module's weights, or report what does not fit. Ignore the file's heads."""
    found = _without_heads(module, tensors)
    if problems := _misfits(module, found):
        # timm converts other layouts (as first published, or for another image size) if it can.
        converted = _without_heads(module, _converted(module, tensors))
        if _misfits(module, converted):
            own = module.state_dict()
            fitting = sum(k in found and found[k].shape == v.shape for k, v in own.items())
            few = fitting < len(own) / 2
            cause = "they belong to another architecture" if few else "a variant of it?"
            listed = "; ".join(problems)
            raise UserError(
                f"the weights in {file} do not fit the backbone `{name}` ({cause}): {listed}"
            )
        found = converted
    module.load_state_dict(found, strict=False)


def _without_heads(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Leave out the classifier, and Inception's auxiliary one, which a backbone does not have."""
    cfg = getattr(module, "pretrained_cfg", None) or {}
    heads = cfg.get("classifier") or ()
    heads = tuple(f"{h}." for h in ((heads,) if isinstance(heads, str) else heads))
    own, heads = module.state_dict().keys(), (*heads, "AuxLogits.")
    return {k: t for k, t in tensors.items() if k in own or not k.startswith(heads)}


def _misfits(module: nn.Module, tensors: Mapping[str, Tensor]) -> list[str]:
    own = module.state_dict()
    # Old files lack the counters of batches, which are not weights.
    missing = [k for k in own if k not in tensors and not k.endswith("num_batches_tracked")]
    unexpected = [k for k in tensors if k not in own]
    misshaped = [
        f"{k} (found {list(tensors[k].shape)}, expected {list(own[k].shape)})"
        for k in own
        if k in tensors and tensors[k].shape != own[k].shape
    ]
    kinds = (("missing", missing), ("unexpected", unexpected), ("of another shape", misshaped))
    return [f"{len(names)} {kind}: {_few(names)}" for kind, names in kinds if names]


def _few(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _converted(module: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert the tensors as timm does for this architecture; return them if it cannot."""
    source = sys.modules[type(module).__module__]
    convert: Callable[..., Any] | None = getattr(source, "checkpoint_filter_fn", None)
    if convert is None:
        return tensors
    arguments = (dict(tensors), module)[: len(inspect.signature(convert).parameters)]
    try:
        with _quiet():
            found = convert(*arguments)
        return {k: v for k, v in found.items() if isinstance(v, Tensor)}
    except Exception:  # it was written for other files
        return tensors


# Parts


def last_block(module: nn.Module) -> nn.Module:
    """Return the last stage with weights and everything behind it; it shares their parameters."""
    path = _stage_by_feature_info(module) or _stage_by_structure(module)
    parts = [module.get_submodule(path)]
    steps = path.split(".")
    for depth in reversed(range(len(steps))):
        siblings = list(module.get_submodule(".".join(steps[:depth])).named_children())
        position = [name for name, _ in siblings].index(steps[depth])
        parts += [child for _, child in siblings[position + 1 :] if _has_weights(child)]
    return parts[0] if len(parts) == 1 else nn.ModuleList(parts)


def _has_weights(module: nn.Module, least_dims: int = 1) -> bool:
    return any(weight.ndim >= least_dims for weight in module.parameters())


def _stage_by_feature_info(module: nn.Module) -> str | None:
    """Return timm's name of the last stage, unless it is a bare layer (activation, convolution)."""
    listed = getattr(module, "feature_info", None)
    if not isinstance(listed, list) or not listed:
        return None
    path = str(listed[-1].get("module", ""))
    try:
        stage = module.get_submodule(path)
    except AttributeError:
        return None
    return path if path and any(_has_weights(child) for child in stage.children()) else None


def _stage_by_structure(module: nn.Module) -> str:
    """Return the last child with weight matrices, or the last part of the only list of blocks."""
    children = {name: child for name, child in module.named_children() if _has_weights(child, 2)}
    if not children:
        raise ValueError(f"{type(module).__name__} has no stages with weights")
    kinds = nn.Sequential | nn.ModuleList
    lists = {name: child for name, child in children.items() if isinstance(child, kinds)}
    if len(lists) != 1:
        return list(children)[-1]
    ((name, blocks),) = lists.items()
    inner = [n for n, child in blocks.named_children() if _has_weights(child, 2)]
    return f"{name}.{inner[-1]}"
