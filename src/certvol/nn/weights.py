"""Read weight files without executing their content, and download files from the hub."""

import pickle
import threading
import urllib.request
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from certvol.errors import UserError, first_line
from certvol.files import expanded

WRAPPERS = ("state_dict", "model_state_dict", "model", "state_dict_ema", "model_ema")
PREFIXES = ("module.", "_orig_mod.")  # DataParallel and torch.compile put these before every name
OTHER_FLOATS = (torch.float16, torch.bfloat16, torch.float64)
HUB_DEADLINE_SECONDS = 7.0  # so that an error comes within 15 seconds, including imports
HUB_FILES = ["model.safetensors", "pytorch_model.bin"]
NO_DOWNLOAD = "`model.hub` is false, and they are not in the local cache"


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Return tensors by name on the CPU, other floating-point types as float32.

    No code in the file is run, whatever type it claims to be.
    """
    path = expanded(path)
    if not path.exists():
        raise UserError(
            f"weights file {path} not found; check the path, or use --weights none to train from "
            "scratch"
        )
    if not path.is_file():  # opening a named pipe would block forever
        kind = "folder" if path.is_dir() else "special file"
        raise UserError(
            f"expected a weights file (.safetensors, .pth or .pt), found the {kind} {path}"
        )
    try:
        with path.open("rb") as file:
            start = file.read(16)
        if not start:
            raise UserError(f"the weights file {path} is empty")
        # Users rename files, so look inside: safetensors starts with a length, then `{`.
        found = _read_safetensors(path) if start[8:9] == b"{" else _read_pickle(path)
    except OSError as error:
        raise UserError(f"cannot read the weights file {path}: {error.strerror or error}") from None
    tensors = _unwrapped(found, path)
    return {name: t.float() if t.dtype in OTHER_FLOATS else t for name, t in tensors.items()}


def _read_safetensors(path: Path) -> Mapping[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors: Mapping[str, Any] = load(path.read_bytes())  # `load_file` needs a Unicode path
        return tensors
    except (SafetensorError, ValueError, KeyError) as error:
        reason = first_line(error)
        raise UserError(
            f"{path} is a damaged safetensors file ({reason}); fetch it again"
        ) from None


def _read_pickle(path: Path) -> Any:
    try:
        # A path instead of an open file would let torch choose a reader by the suffix.
        with warnings.catch_warnings(), path.open("rb") as file:
            warnings.simplefilter("ignore")
            return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a damaged file fails in any layer
        if isinstance(error, pickle.UnpicklingError) and "lobal" in str(error):
            raise UserError(
                f"{path} holds more than tensors; reading it would execute code from the file. "
                "Save the tensors alone (model.state_dict(), best as .safetensors) and give "
                "that file"
            ) from None
        raise UserError(
            f"{path} is damaged or not a weights file ({first_line(error)}); expected "
            ".safetensors, or .pth/.pt from torch.save"
        ) from None


def _unwrapped(found: Any, path: Path) -> dict[str, Tensor]:
    """Take the tensors out of the dictionaries and name prefixes that training scripts add."""
    for _ in range(3):
        inner = [found.get(key) for key in WRAPPERS] if isinstance(found, Mapping) else []
        found = next((each for each in inner if isinstance(each, Mapping)), found)
    tensors = {}
    if isinstance(found, Mapping):
        tensors = {str(name): value for name, value in found.items() if isinstance(value, Tensor)}
    if not tensors:
        keys = list(found)[:5] if isinstance(found, Mapping) else [type(found).__name__]
        some = ", ".join(map(str, keys)) or "nothing"
        raise UserError(f"{path} holds no tensors by name (found: {some}); save model.state_dict()")
    while prefix := next((p for p in PREFIXES if all(n.startswith(p) for n in tensors)), ""):
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


def hub_weights(name: str, cfg: Any, download: bool) -> dict[str, Tensor]:
    """Read a timm backbone's pretrained weights from the local cache, or download them first.

    `cfg` is its `pretrained_cfg`.
    """
    try:
        if cfg.hf_hub_id:
            return read_weights(_hub_file(cfg, download))
        return read_weights(_url_file(str(cfg.url), download))
    except UserError:
        raise
    except Exception as error:  # errors of the connection, of its library or of the disk
        raise UserError(
            f"cannot get the pretrained weights of `{name}` from the hub ({first_line(error)}); "
            "give a local file with --weights FILE, or train from scratch with --weights none"
        ) from None


def _hub_file(cfg: Any, download: bool) -> Path:
    import huggingface_hub as hub
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    repo, _, revision = str(cfg.hf_hub_id).partition("@")
    given, version = getattr(cfg, "hf_hub_filename", None), revision or None
    files = [given.replace(HUB_FILES[1], HUB_FILES[0]), given] if given else HUB_FILES
    for file in files:
        cached = hub.try_to_load_from_cache(repo, file, revision=version)
        if isinstance(cached, str):
            return Path(cached)
    if not download:
        raise RuntimeError(NO_DOWNLOAD)
    if HF_HUB_OFFLINE:
        raise RuntimeError("HF_HUB_OFFLINE is set, and they are not in the local cache")
    for file in files:
        # On its own, the hub's library retries for half a minute without a connection.
        url = hub.hf_hub_url(repo, file, revision=version)
        try:
            within_deadline(partial(hub.get_hf_file_metadata, url, timeout=HUB_DEADLINE_SECONDS))
            return Path(hub.hf_hub_download(repo, file, revision=version))
        except LocalEntryNotFoundError:
            raise
        except EntryNotFoundError:
            continue
    raise RuntimeError(f"no such file in {repo}")


def _url_file(url: str, download: bool) -> Path:
    """Download the weights of the few models outside the hub into torch.hub's own folder."""
    target = Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
    if not target.exists():
        if not download:
            raise RuntimeError(NO_DOWNLOAD)
        request = urllib.request.Request(url, method="HEAD")
        within_deadline(
            lambda: urllib.request.urlopen(request, timeout=HUB_DEADLINE_SECONDS).close()
        )
        target.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(target))
    return target


def within_deadline(call: Callable[[], Any]) -> None:
    """Run `call` in a thread, abandoned after the deadline, because name lookups never time out."""
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
