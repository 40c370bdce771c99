"""Reading weight files without executing what is in them."""

import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from certvol.errors import UserError

WRAPPERS = ("state_dict", "model_state_dict", "model", "state_dict_ema", "model_ema")
PREFIXES = ("module.", "_orig_mod.")  # what DataParallel and torch.compile put before every name


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Name -> tensor on the CPU, half and double precision made float32. Nothing in the file is run, whatever it claims to be."""
    path = Path(path).expanduser()
    if not path.exists():
        raise UserError(f"there is no weights file {path}")
    if path.is_dir():
        raise UserError(f"expected a weights file (.safetensors, .pth or .pt), found the folder {path}")
    if not path.is_file():  # a named pipe would hold us up for ever
        raise UserError(f"expected a weights file (.safetensors, .pth or .pt), found something else in {path}")
    try:
        with path.open("rb") as file:
            start = file.read(16)
        if not start:
            raise UserError(f"the weights file {path} is empty")
        # By content, not by name: files are renamed. A safetensors file starts with its header's length, then `{`.
        found = _read_safetensors(path) if start[8:9] == b"{" else _read_pickle(path)
    except OSError as error:
        raise UserError(f"cannot read the weights file {path}: {error.strerror or error}") from None
    tensors = _tensors(found, path)
    return {name: tensor.float() if tensor.dtype in _OTHER_FLOATS else tensor for name, tensor in tensors.items()}


_OTHER_FLOATS = (torch.float16, torch.bfloat16, torch.float64)


def _read_safetensors(path: Path) -> Mapping[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors: Mapping[str, Any] = load(path.read_bytes())  # by itself it opens no path that is not Unicode
        return tensors
    except (SafetensorError, ValueError, KeyError) as error:
        raise UserError(f"{path} is not a whole safetensors file ({_first_line(error)}); fetch it again") from None


def _read_pickle(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # An open file rather than a path: by a path's suffix torch would choose another reader.
            with path.open("rb") as file:
                return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if "lobal" in str(error):  # an unsupported global: a function or class that unpickling would call
            raise UserError(
                f"{path} holds more than tensors: reading it would execute code from the file, so it was not read; "
                "save the tensors alone (model.state_dict(), best as .safetensors) and give that file"
            ) from None
        raise _no_weights_file(path, error) from None
    except OSError:
        raise
    except Exception as error:  # a damaged file fails in whatever layer meets the damage first
        raise _no_weights_file(path, error) from None


def _no_weights_file(path: Path, error: Exception) -> UserError:
    return UserError(
        f"{path} is damaged or no weights file ({_first_line(error)}); expected .safetensors, or .pth/.pt from torch.save"
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


def _tensors(found: Any, path: Path) -> dict[str, Tensor]:
    """The tensors by name, out of the dictionaries and name prefixes in which training scripts wrap them."""
    for _ in range(3):
        inner = [found[key] for key in WRAPPERS if isinstance(found, Mapping) and isinstance(found.get(key), Mapping)]
        if not inner:
            break
        found = inner[0]
    if not isinstance(found, Mapping):
        raise UserError(f"{path} holds no weights by name, but one {type(found).__name__}; save model.state_dict()")
    tensors = {str(name): value for name, value in found.items() if isinstance(value, Tensor)}
    if not tensors:
        some = ", ".join(str(name) for name in list(found)[:5]) or "nothing"
        raise UserError(f"{path} holds no tensors by name (found: {some}); save model.state_dict()")
    prefix_left = True
    while prefix_left:
        prefix_left = False
        for prefix in PREFIXES:
            if all(name.startswith(prefix) for name in tensors):
                tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
                prefix_left = True
    return tensors
