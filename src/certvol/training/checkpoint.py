"""The full state of training in one safetensors file: weights, optimiser, the cycle's plan; and, as JSON, where it stands.

A checkpoint is written beside the last one, synced, and only then named in `latest.json` with its checksum. One that is torn
or tampered with is noticed by that checksum, and the one before it is used.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from certvol.errors import RunFailed, UserError
from certvol.file_systems import sync_folder

POINTER = "latest.json"
FORMAT = "certvol/1"
"""Of files that others may read: in the header of each."""


@dataclass(frozen=True)
class State:
    tensors: dict[str, Tensor]
    facts: dict[str, Any]


def write_atomically(path: Path, data: bytes, synced: bool = True) -> None:
    """The file is whole or as before, whatever happens meanwhile. `synced`: a loss of power included, which takes a moment."""
    temporary = path.with_name(path.name + ".part")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            if synced:
                os.fsync(file.fileno())
        temporary.replace(path)
        if synced:
            sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = str(path)  # a failed write does not say where
        raise


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """A line of JSON. Lines behind the last checkpoint are cut off on resuming, so a torn one does no harm."""
    append(path, (json.dumps(line) + "\n").encode())


def append(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(data)
    except OSError as error:
        error.filename = str(path)  # a failed write does not say where
        raise


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any] | None = None, synced: bool = True
) -> None:
    """Atomically. Safetensors refuses tensors that share memory or have gaps, so each is made contiguous on the CPU.

    `about` goes into the file's header under one key: with several, their order there would differ from run to run.
    """
    header = {"certvol": json.dumps(dict(about), sort_keys=True)} if about is not None else None
    write_atomically(path, save({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, header), synced)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """By their bytes: safetensors itself opens no path that is not Unicode. OSError or SafetensorError where there are none."""
    return load(path.read_bytes())


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Weights of this run that it has written before."""
    try:
        return load_tensors(path)
    except (OSError, ValueError, SafetensorError) as error:
        raise RunFailed(f"{path} is missing, damaged or no weights of certvol ({error}); start the run anew") from None


def read_about(path: Path) -> dict[str, Any]:
    """What `write_tensors` was told about the file. OSError, KeyError, TypeError, ValueError or RecursionError where it is
    another's file or not whole."""
    with path.open("rb") as file:
        length, size = int.from_bytes(file.read(8), "little"), os.fstat(file.fileno()).st_size
        if length > size:  # asked before so much memory is
            raise ValueError("its header is incomplete")
        header = dict(json.loads(file.read(length)))
    about = json.loads(header.pop("__metadata__")["certvol"])
    if 8 + length + max((tensor["data_offsets"][1] for tensor in header.values()), default=0) != size:
        raise ValueError("the file is not whole")
    if not isinstance(about, dict):
        raise ValueError("its header is not certvol's")
    return about


def digest_of(path: Path, facts: Any) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "blake2b")
    digest.update(json.dumps(facts, sort_keys=True).encode())
    return digest.hexdigest()


class Checkpoints:
    """The newest checkpoint of a run and the one before it."""

    def __init__(self, folder: Path, writes: bool = True) -> None:
        """`writes`: False for a process that leaves writing to another."""
        self.folder, self.writes = folder, writes
        self.keeps_previous = True
        self.sound: dict[str, Any] | None = None  # the entry last loaded or saved

    def _entries(self) -> list[dict[str, Any]]:
        """The newest first. A pointer that cannot be read now is no missing one: beginning anew would overwrite what it names."""
        pointer = self.folder / POINTER
        try:
            entries = json.loads(pointer.read_text())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(
                f"cannot read the checkpoint {pointer}: {error.strerror or error}; resume when the cause is mended"
            ) from None
        except (ValueError, RecursionError):
            return []
        if not isinstance(entries, list):
            return []
        right = {"number": int, "file": str}
        return [e for e in entries if isinstance(e, dict) and all(isinstance(e.get(k), t) for k, t in right.items())]

    @property
    def exist(self) -> bool:
        return bool(self._entries())

    def remove(self) -> None:
        if self.writes:
            shutil.rmtree(self.folder, ignore_errors=True)

    def save(self, state: State) -> None:
        if not self.writes:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        entries = self._entries()
        before = [self.sound] if self.sound in entries else entries[:1]  # rather a sound one than a torn newer one
        number = 1 + max((int(entry["number"]) for entry in entries), default=0)
        path = self.folder / f"state-{number:06d}.safetensors"
        write_tensors(path, state.tensors)
        entry = {"number": number, "file": path.name, "blake2b": digest_of(path, state.facts), "facts": state.facts}
        before = before if self.keeps_previous else []
        write_atomically(self.folder / POINTER, json.dumps([entry, *before], indent=1).encode())
        self.sound = json.loads(json.dumps(entry))
        kept = {entry["file"], *(old["file"] for old in before)}
        for stale in self.folder.glob("state-*.safetensors*"):
            if stale.name not in kept:
                stale.unlink(missing_ok=True)

    def load(self) -> tuple[State | None, list[str]]:
        """The newest whole checkpoint, None where there is none; and a warning for each that was passed over."""
        warnings: list[str] = []
        entries = self._entries()
        if not entries and (self.folder / POINTER).exists():
            warnings.append(f"the list of checkpoints {self.folder / POINTER} is damaged: beginning anew")
        for entry in entries:
            name = Path(str(entry.get("file", ""))).name or "?"  # never a path that leads elsewhere
            path = self.folder / name
            try:
                if digest_of(path, entry["facts"]) != entry["blake2b"]:
                    raise ValueError("its checksum is wrong")
                if not isinstance(entry["facts"], dict):
                    raise ValueError("its facts are missing")
                state = State(load_tensors(path), entry["facts"])
                self.sound = entry
                return state, warnings
            except (OSError, ValueError, KeyError, SafetensorError) as error:
                warnings.append(f"checkpoint {name} cannot be used ({error}); trying the one before it")
        return None, warnings


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Momentum and the like, by the parameter's number."""
    state = optimizer.state_dict()["state"]
    return {
        f"optimizer.{number}.{name}": value
        for number, entries in state.items()
        for name, value in entries.items()
        if isinstance(value, Tensor)
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Buffers of a parameter's shape get its memory layout too: fused optimisers ask for that."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in without_prefix("optimizer", tensors).items():
        number, _, name = key.partition(".")
        parameter = parameters[int(number)]
        alike = value.shape == parameter.shape
        state.setdefault(int(number), {})[name] = torch.empty_like(parameter).copy_(value) if alike else value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def without_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) + 1 :]: tensor for name, tensor in tensors.items() if name.startswith(f"{prefix}.")}


def load_into(module: torch.nn.Module, tensors: Mapping[str, Tensor], what: str) -> None:
    try:
        module.load_state_dict(dict(tensors))
    except RuntimeError:
        raise RunFailed(f"{what} does not fit this run's network: it was written with other settings") from None
