"""A backbone by its name: a module from normalised images [N, 3, H, W] to pooled features [N, dim].

Names are timm's, or `small_cnn`, or `features-D` for features that are there already. timm is imported only where one of its
backbones is asked for.
"""

import contextlib
import difflib
import inspect
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from certvol.errors import UserError
from certvol.nn import small_cnn
from certvol.nn.torchvision_repair import import_timm
from certvol.nn.weights import read_weights

HUB_DEADLINE_SECONDS = 7.0  # with the imports before it, well below the 15 in which a user is to be told
NO_WEIGHTS = "none"


@dataclass(frozen=True)
class BackboneInfo:
    name: str
    dim: int
    image_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def list_backbones() -> list[str]:
    """`small_cnn`, then timm's architectures and their pretrained tags, in alphabetical order."""
    return ["small_cnn", *sorted(_timm_names())]


def describe(name: str, image_size: int | None) -> BackboneInfo:
    """What a backbone needs and gives, without its weights. Without an image size: the one it was made for."""
    if (dim := features_dim(name)) is not None:
        return BackboneInfo(name, dim, 1, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    if name == "small_cnn":
        return BackboneInfo(name, small_cnn.DIM, image_size or small_cnn.IMAGE_SIZE, small_cnn.MEAN, small_cnn.STD)
    return _describe_timm(name, image_size)


def features_dim(name: str) -> int | None:
    """D of the name `features-D`, which stands for features that were made elsewhere; None for a backbone of images."""
    digits = name.removeprefix("features-")
    return int(digits) if name != digits and digits.isascii() and digits.isdecimal() and int(digits[:7]) > 0 else None


def has_pretrained_weights(name: str, weights: str | None) -> bool:
    """Whether it starts from weights that somebody trained: of a file or of the hub, which has none of `small_cnn`."""
    return weights != NO_WEIGHTS and (weights is not None or name != "small_cnn")


def create_backbone(
    name: str, weights: str | None, image_size: int | None, download: bool = True
) -> tuple[nn.Module, BackboneInfo]:
    """`weights`: a file; None for the hub's (`small_cnn`, which has none there: random); "none" for random ones.

    `download`: False takes the hub's from the local cache or not at all. Convolutions are laid out channels-last, in which they
    are faster on CPUs and GPUs alike, given images of the same layout."""
    module, info = _create(name, weights, image_size, download)
    return module.to(memory_format=torch.channels_last), info  # type: ignore[call-overload]


def _create(name: str, weights: str | None, image_size: int | None, download: bool) -> tuple[nn.Module, BackboneInfo]:
    file = weights if weights not in (None, NO_WEIGHTS) else None
    tensors = read_weights(file) if file is not None else None  # first of all: a wrong file is found without delay
    info = describe(name, image_size)
    if features_dim(name) is not None:
        return nn.Identity(), info
    if name == "small_cnn":
        module: nn.Module = small_cnn.SmallCNN()
        if tensors is not None:
            _load(module, tensors, name, str(file))
        return module, info
    if weights is None:
        return _create_timm(name, image_size, hub_tensors=_hub_weights(name, download)), info
    module = _create_timm(name, image_size)
    if tensors is not None:
        _load(module, tensors, name, str(file))
    return module, info


# timm


@cache
def _timm_names() -> frozenset[str]:
    timm = import_timm()
    return frozenset([*timm.list_models(), *timm.list_models(pretrained=True)])


def _timm_cfg(name: str) -> Any:
    """The pretrained_cfg of a name, whose tag, if left out, is timm's default. Says so where there is no such name."""
    timm = import_timm()
    from timm.models import get_pretrained_cfg

    if timm.is_model(name):
        # A RuntimeError: the architecture exists, the tag does not.
        with contextlib.suppress(RuntimeError), _quiet():
            cfg = get_pretrained_cfg(name)
            if cfg is not None:
                return cfg
    near = difflib.get_close_matches(name, list_backbones(), n=3, cutoff=0.5)
    hint = f"; near it are {', '.join(near)}" if near else ""
    raise UserError(f"there is no backbone `{name}`{hint} (all of them: certvol list backbones)")


@cache
def _describe_timm(name: str, image_size: int | None) -> BackboneInfo:
    cfg = _timm_cfg(name)
    size = image_size or int(cfg.input_size[-1])
    if int(cfg.input_size[0]) != 3:
        raise UserError(f"the backbone `{name}` takes images of {cfg.input_size[0]} channels; expected 3")
    # On the meta device only shapes are computed: no memory, no time, and no random numbers taken from the caller.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            with torch.device("meta"):
                shape = _feature_shape(_create_timm(name, image_size), size)
        except (UserError, KeyboardInterrupt):
            raise
        except Exception:  # some models need real numbers already while they are built
            shape = _feature_shape(_create_timm(name, image_size), size, name)
    if len(shape) != 2:
        raise UserError(
            f"the backbone `{name}` gives features of shape {list(shape[1:])}, expected one vector per image"
        )
    mean, std = (float(v) for v in cfg.mean), (float(v) for v in cfg.std)
    return BackboneInfo(name, shape[1], size, (next(mean), next(mean), next(mean)), (next(std), next(std), next(std)))


def _feature_shape(module: nn.Module, size: int, name: str | None = None) -> torch.Size:
    """Of a trial run: num_features alone would be wrong for backbones that widen their features after pooling."""
    try:
        features: Tensor = module.eval()(torch.zeros(2, 3, size, size))
    except (RuntimeError, AssertionError, ValueError) as error:
        if name is None:
            raise
        raise _unfit_size(name, size, error) from None
    return features.shape


def _unfit_size(name: str, size: int | None, error: Exception) -> UserError:
    text = str(error).strip().splitlines()
    reason = f" ({text[0][:200]})" if text else ""
    return UserError(f"the backbone `{name}` does not take images of {size} pixels{reason}; change data.image_size")


def _create_timm(name: str, image_size: int | None, hub_tensors: Mapping[str, Tensor] | None = None) -> nn.Module:
    timm = import_timm()
    options: dict[str, Any] = {}
    if image_size is not None and getattr(_timm_cfg(name), "fixed_input_size", False):
        options["img_size"] = image_size  # position embeddings are made for it, pretrained ones resampled
    if hub_tensors is not None:
        options |= {"pretrained": True, "pretrained_cfg_overlay": {"state_dict": dict(hub_tensors)}}
    with _quiet():
        try:
            module: nn.Module = timm.create_model(name, num_classes=0, **options)
        except (RuntimeError, AssertionError, ValueError, TypeError) as error:
            if "img_size" not in options:
                raise
            raise _unfit_size(name, image_size, error) from None
    return module


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without timm's notes about moved modules, mapped names and left out heads: nothing that a user could act on."""
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
    """Loads all of a module's weights, or says what does not fit. The file's classifier is left out."""
    problems = _misfits(module, _without_head(module, tensors))
    if problems:
        # Files in another layout (as first published, or for another image size) are converted by timm where it can.
        converted = _converted(module, tensors)
        if converted is not None and not _misfits(module, _without_head(module, converted)):
            tensors, problems = converted, []
    if problems:
        fitting = sum(k in tensors and tensors[k].shape == v.shape for k, v in module.state_dict().items())
        cause = "they belong to another architecture" if fitting < len(module.state_dict()) / 2 else "a variant of it?"
        raise UserError(f"the weights in {file} do not fit the backbone `{name}` ({cause}): {'; '.join(problems)}")
    module.load_state_dict(_without_head(module, tensors), strict=False)


def _without_head(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the layers that a backbone has not got: its classifier and, of Inception, the auxiliary one."""
    cfg = getattr(module, "pretrained_cfg", None) or {}
    heads = cfg.get("classifier") or ()
    heads = ((heads,) if isinstance(heads, str) else tuple(heads)) + ("AuxLogits",)
    own = module.state_dict().keys()
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name in own or not any(name.startswith(f"{head}.") for head in heads)
    }


def _misfits(module: nn.Module, tensors: Mapping[str, Tensor]) -> list[str]:
    own = module.state_dict()
    # Counters of batches, which old files have not got, are no weights.
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


def _converted(module: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor] | None:
    """The tensors as timm's own conversion for this architecture leaves them, None where it has none or it fails."""
    convert: Callable[..., Any] | None = getattr(sys.modules[type(module).__module__], "checkpoint_filter_fn", None)
    if convert is None:
        return None
    arguments = (dict(tensors), module)[: max(1, min(2, len(inspect.signature(convert).parameters)))]
    try:
        with _quiet():
            found = convert(*arguments)
    except Exception:  # it was written for other files than this one
        return None
    return {k: v for k, v in found.items() if isinstance(v, Tensor)} if isinstance(found, Mapping) else None


# Weights from the hub


def _hub_weights(name: str, download: bool) -> dict[str, Tensor]:
    """The pretrained weights of a name: out of the local cache without asking anybody, else fetched into it."""
    cfg = _timm_cfg(name)
    if not cfg.hf_hub_id and not cfg.url:
        arch = name.partition(".")[0]
        tagged = sorted(n for n in _timm_names() if n.startswith(f"{arch}."))
        hint = f"name one of {_few(tagged)}, or " if tagged else ""
        raise UserError(
            f"the hub has no weights for `{name}`; {hint}give --weights FILE, or --weights none to train from scratch"
        )
    return read_weights(_hub_file(name, cfg, download) if cfg.hf_hub_id else _url_file(name, str(cfg.url), download))


def _hub_file(name: str, cfg: Any, download: bool) -> Path:
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    repo, _, revision = str(cfg.hf_hub_id).partition("@")
    given = getattr(cfg, "hf_hub_filename", None)
    files = [given.replace("pytorch_model.bin", "model.safetensors"), given] if given else _HUB_FILES
    for file in files:
        cached = huggingface_hub.try_to_load_from_cache(repo, file, revision=revision or None)
        if isinstance(cached, str):
            return Path(cached)
    if not download:
        raise _out_of_reach(name, NO_DOWNLOAD)
    if constants.HF_HUB_OFFLINE:
        raise _out_of_reach(name, "HF_HUB_OFFLINE is set, and they are not in the local cache")
    for file in files:
        # The hub's own library would try again for half a minute before it says that there is no connection.
        url = huggingface_hub.hf_hub_url(repo, file, revision=revision or None)
        try:
            _within_deadline(partial(huggingface_hub.get_hf_file_metadata, url, timeout=HUB_DEADLINE_SECONDS))
            return Path(huggingface_hub.hf_hub_download(repo, file, revision=revision or None))
        except LocalEntryNotFoundError as error:
            raise _out_of_reach(name, str(error)) from None
        except EntryNotFoundError:
            continue
        except Exception as error:  # of the connection, of its library, or of the disk: all end here
            raise _out_of_reach(name, str(error) or type(error).__name__) from None
    raise _out_of_reach(name, f"no such file in {repo}")


NO_DOWNLOAD = "`model.hub` is false, and they are not in the local cache"
_HUB_FILES = ["model.safetensors", "pytorch_model.bin"]


def _url_file(name: str, url: str, download: bool) -> Path:
    """A few models are kept elsewhere than on the hub; their files go where torch.hub keeps its own."""
    import urllib.request

    target = Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
    if target.exists():
        return target
    if not download:
        raise _out_of_reach(name, NO_DOWNLOAD)
    try:
        request = urllib.request.Request(url, method="HEAD")
        _within_deadline(lambda: urllib.request.urlopen(request, timeout=HUB_DEADLINE_SECONDS).close())
        target.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(target))
    except Exception as error:
        raise _out_of_reach(name, str(error) or type(error).__name__) from None
    return target


def _within_deadline(call: Callable[[], Any]) -> None:
    """Runs `call` in a thread that is left behind after the deadline: looking up a host's name knows no time-out."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name="hub-probe")
    thread.start()
    thread.join(HUB_DEADLINE_SECONDS)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {HUB_DEADLINE_SECONDS:.0f} seconds")
    if errors:
        raise errors[0]


def _out_of_reach(name: str, reason: str) -> UserError:
    first = reason.strip().splitlines()[0][:200]
    return UserError(
        f"cannot get the pretrained weights of `{name}` from the hub ({first}); give a local file with --weights FILE, "
        "or train from scratch with --weights none"
    )


# Parts


def last_block(module: nn.Module) -> nn.Module:
    """The last stage that has weights, with everything behind it (a final norm, say). Shares its parameters with `module`."""
    path = _stage_by_feature_info(module) or _stage_by_structure(module)
    parts = [module.get_submodule(path)]
    steps = path.split(".")
    for depth in reversed(range(len(steps))):
        siblings = list(module.get_submodule(".".join(steps[:depth])).named_children())
        position = [name for name, _ in siblings].index(steps[depth])
        parts += [child for _, child in siblings[position + 1 :] if _has_weights(child)]
    return parts[0] if len(parts) == 1 else nn.ModuleList(parts)


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _stage_by_feature_info(module: nn.Module) -> str | None:
    """timm names the modules that end its stages. A bare layer among them (an activation, a last convolution) is no stage."""
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
    """The last child with weights of more than one dimension; its last part where it is the only list of blocks."""
    children = {name: child for name, child in module.named_children() if any(p.ndim > 1 for p in child.parameters())}
    if not children:
        raise ValueError(f"{type(module).__name__} has no stages with weights")
    name, stage = list(children.items())[-1]
    lists = [child for child in children.values() if isinstance(child, nn.Sequential | nn.ModuleList)]
    if len(lists) == 1:
        name, stage = next((n, c) for n, c in children.items() if c is lists[0])
        inner = [n for n, child in stage.named_children() if any(p.ndim > 1 for p in child.parameters())]
        return f"{name}.{inner[-1]}"
    return name
