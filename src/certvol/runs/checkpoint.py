"""Checkpoints of a run, and the safetensors files that hold them and the weights.

Every safetensors file holds a format and a checksum of all its bytes in its header; both are
checked whenever it is read. A checkpoint is one such file with weights, optimiser and plan of the
cycle, plus JSON facts. It is written and synced first, then named in `latest.json` together with a
checksum that covers the facts too. If a checkpoint is damaged, the one before it is used.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from certvol.data.folders import printable
from certvol.errors import RunFailed, UserError
from certvol.files import write_atomically
from certvol.methods._base import AdaptationMethod

POINTER = "latest.json"
# What reading a file raises that was cut off, changed or written by another program.
DAMAGE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
    SafetensorError,
)
FORMAT = "certvol/2"  # of files that other programs may read; a file of another one is refused
_MARK = b'\\"blake2b\\": \\"'  # comes before the checksum, as JSON within the JSON of a header
_UNSEALED = b"0" * 64  # stands in for the checksum while it is computed
_FIXED = ("backbone", "projection")
# Names of tensors that no step changes if `model.train` is head.
FROZEN = (
    *(f"network.{part}." for part in _FIXED),
    *(f"teacher.network/{part}/" for part in _FIXED),
)


@dataclass(frozen=True)
class State:
    tensors: dict[str, Tensor]
    facts: dict[str, Any]


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append a line of JSON. A torn line is harmless: resuming cuts lines after the checkpoint."""
    append(path, (json.dumps(line) + "\n").encode())


def append(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(data)
    except OSError as error:
        error.filename = str(path)  # a failed write does not name its file
        raise


class OtherFormat(ValueError):
    """A file was written in another format.

    The text continues a sentence that starts with the path.
    """


def check_format(found: Any) -> None:
    """Raise OtherFormat unless the format is this version's.

    `None`: the file names no format.
    """
    if found == FORMAT:
        return
    own, name = int(FORMAT.partition("/")[2]), str(found or "none")[:40]
    number = name.removeprefix("certvol/")
    if number.isdecimal() and int(number) > own:
        raise OtherFormat(
            f"was written by a newer certvol (format {name}; this one reads {FORMAT}): update it"
        )
    raise OtherFormat(
        f"was written by an older certvol, or by another program (format {name}; this certvol "
        f"reads {FORMAT}): make it again"
    )


@contextmanager
def damage_explained(file: Path) -> Iterator[None]:
    """Turn what reading a damaged or foreign file raises into a UserError that names the file."""
    shown = printable(file)
    try:
        yield
    except OtherFormat as error:
        raise UserError(f"{shown} {error}") from None
    except DAMAGE as error:
        raise UserError(f"{shown} is damaged or not certvol's: {error}") from None


def write_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    about: Mapping[str, Any] | None = None,
    synced: bool = True,
) -> None:
    """Write a safetensors file atomically, with `about`, format and checksum in its header.

    Tensors are made contiguous, because safetensors refuses shared memory and gaps. The header has
    one key only, because the order of several would differ from run to run.
    """
    sealed = {**(about or {}), "format": FORMAT, "blake2b": _UNSEALED.decode()}
    header = {"certvol": json.dumps(sealed, sort_keys=True)}
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    content = bytearray(save(contiguous, header))
    place = content.index(_MARK + _UNSEALED) + len(_MARK)
    content[place : place + len(_UNSEALED)] = _checksum(content)
    write_atomically(path, content, synced)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Load and check a file of `write_tensors`; raises OSError, ValueError or SafetensorError.

    Safetensors itself cannot open a path that is not Unicode.
    """
    return load_with_about(path)[0]


def load_with_about(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and what `read_about` returns; raises what `load_tensors` does."""
    content = path.read_bytes()
    about = _checked_about(content)
    return load(content), about


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read weights that this run wrote earlier."""
    try:
        return load_tensors(path)
    except OtherFormat as error:
        raise RunFailed(f"weights file {path} {error}") from None
    except (OSError, ValueError, SafetensorError) as error:
        raise RunFailed(
            f"weights file {path} is missing or damaged ({error}); start a new run"
        ) from None


def read_about(path: Path) -> dict[str, Any]:
    """Read what `write_tensors` took as `about`, after checking the whole file.

    Raises OSError, or ValueError for any other or damaged file.
    """
    return _checked_about(path.read_bytes())


def _checked_about(content: bytes) -> dict[str, Any]:
    end = 8 + int.from_bytes(content[:8], "little")
    if len(content) < end:
        raise ValueError("its header is incomplete")
    try:
        about = dict(json.loads(json.loads(content[8:end])["__metadata__"]["certvol"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError("its header was not written by certvol") from None
    check_format(about.pop("format", None))
    checksum = str(about.pop("blake2b", "")).encode()
    header = content[:end].replace(_MARK + checksum, _MARK + _UNSEALED, 1)
    if _checksum(header, memoryview(content)[end:]) != checksum:
        raise ValueError("its checksum is wrong: the file is incomplete or was changed")
    return about


def _checksum(*parts: bytes | bytearray | memoryview) -> bytes:
    digest = hashlib.blake2b(digest_size=len(_UNSEALED) // 2)
    for part in parts:
        digest.update(part)
    return digest.hexdigest().encode()


def digest_of(path: Path, facts: Any) -> str:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "blake2b")
    digest.update(json.dumps(facts, sort_keys=True).encode())
    return digest.hexdigest()


class Checkpoints:
    """The newest checkpoint of a run and the one before it."""

    def __init__(self, folder: Path, writes: bool = True) -> None:
        """Set `writes` to False in a process that leaves writing to the main one."""
        self.folder, self.writes = folder, writes
        self.keeps_previous = True
        self.last_good: dict[str, Any] | None = None  # the entry last loaded or saved

    def _entries(self) -> list[dict[str, Any]]:
        """Read the list of checkpoints, the newest first.

        If the list exists but cannot be read now, starting over would overwrite good checkpoints.
        """
        pointer = self.folder / POINTER
        try:
            entries = json.loads(pointer.read_text())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(
                f"cannot read the checkpoint list {pointer}: {error.strerror or error}; "
                "make it readable, then resume"
            ) from None
        except (ValueError, RecursionError):
            return []
        return [
            entry
            for entry in (entries if isinstance(entries, list) else [])
            if isinstance(entry, dict)
            and isinstance(entry.get("number"), int)
            and isinstance(entry.get("file"), str)
        ]

    @property
    def exist(self) -> bool:
        return bool(self._entries())

    def newest_facts(self) -> dict[str, Any]:
        """Return the facts of the newest checkpoint, unchecked; empty if there is none."""
        facts = next((entry.get("facts") for entry in self._entries()), None)
        return facts if isinstance(facts, dict) else {}

    def remove(self) -> None:
        if self.writes:
            shutil.rmtree(self.folder, ignore_errors=True)

    def save(self, state: State) -> None:
        if not self.writes:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        entries = self._entries()
        number = 1 + max((entry["number"] for entry in entries), default=0)
        path = self.folder / f"state-{number:06d}.safetensors"
        write_tensors(path, state.tensors)
        digest = digest_of(path, state.facts)
        entry = {"number": number, "file": path.name, "blake2b": digest, "facts": state.facts}
        previous = []
        if self.keeps_previous:  # a good checkpoint rather than a newer damaged one
            previous = [self.last_good] if self.last_good in entries else entries[:1]
        listed = json.dumps([entry, *previous], indent=1)
        write_atomically(self.folder / POINTER, listed.encode())
        self.last_good, *_ = json.loads(listed)
        kept = {path.name, *(old["file"] for old in previous)}
        for stale in self.folder.glob("state-*.safetensors*"):
            if stale.name not in kept:
                stale.unlink(missing_ok=True)

    def load(self) -> tuple[State | None, list[str]]:
        """Return the newest undamaged checkpoint, if any, and a warning for each damaged one."""
        warnings = []
        entries = self._entries()
        if not entries and (self.folder / POINTER).exists():
            warnings.append(
                f"the checkpoint list {self.folder / POINTER} is damaged; starting over"
            )
        for entry in entries:
            name = Path(entry["file"]).name or "?"  # never a path that leads out of the folder
            try:
                path = self.folder / name
                if digest_of(path, entry["facts"]) != entry["blake2b"]:
                    raise ValueError("its checksum is wrong")
                if not isinstance(entry["facts"], dict):
                    raise ValueError("its facts are missing")
                state = State(load_tensors(path), entry["facts"])
            except OtherFormat as error:
                raise UserError(f"checkpoint {path} {error}") from None
            except (OSError, ValueError, KeyError, SafetensorError) as error:
                warnings.append(f"checkpoint {name} is damaged ({error}); trying the one before it")
            else:
                self.last_good = entry
                return state, warnings
        return None, warnings


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimiser's state, such as momentum, named after the numbers of parameters."""
    return {
        f"optimizer.{number}.{name}": value
        for number, entries in optimizer.state_dict()["state"].items()
        for name, value in entries.items()
        if isinstance(value, Tensor)
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Load `optimizer_tensors`. Fused optimisers need the memory layout of the parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in without_prefix("optimizer", tensors).items():
        number, _, name = key.partition(".")
        parameter = parameters[int(number)]
        if value.shape == parameter.shape:
            value = torch.empty_like(parameter).copy_(value)
        state.setdefault(int(number), {})[name] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def with_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def without_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with this prefix, without it."""
    start = f"{prefix}."
    return {
        name.removeprefix(start): tensor
        for name, tensor in tensors.items()
        if name.startswith(start)
    }


def trained_tensors(method: AdaptationMethod) -> dict[str, Tensor]:
    """Return a method's tensors without those of a frozen backbone, which no step changes."""
    frozen = FROZEN if method.network.trained_part == "head" else ()
    tensors: dict[str, Tensor] = method.state_dict()
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(frozen)}


def load_into(method: AdaptationMethod, tensors: Mapping[str, Tensor], what: str) -> None:
    """Load tensors into a method. A frozen backbone that they leave out is not changed."""
    own: dict[str, Tensor] = method.state_dict()
    frozen = own.keys() - trained_tensors(method).keys()
    try:
        method.load_state_dict({**{name: own[name] for name in frozen}, **tensors})
    except RuntimeError:
        raise RunFailed(
            f"{what} does not fit this run's network: it was written with other settings"
        ) from None
