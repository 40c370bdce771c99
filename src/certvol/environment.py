"""What a run was made with: versions, device, commit, command. And the device itself."""

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from certvol.errors import UserError

PACKAGES = ("certvol", "torch", "torchvision", "timm", "numpy", "Pillow", "safetensors", "scikit-learn")


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"`{name}` is no device; expected auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"`{name}` is not supported; expected auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise UserError(
                "CUDA was asked for, but this machine has no usable CUDA device; leave out --device, or give cpu"
            )
        if (device.index or 0) >= torch.cuda.device_count():
            raise UserError(
                f"`{name}` was asked for, but there are {torch.cuda.device_count()} CUDA devices, from cuda:0"
            )
    return device


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Of certvol's own source, where it runs from a git checkout; marked where files differ from it."""
    here = Path(__file__).resolve().parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "--no-optional-locks", *words], cwd=here, capture_output=True, text=True, timeout=5, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return None
    return f"{commit}, changed" if git("status", "--porcelain", "--", ".") else commit


def cpu_has_bf16() -> bool:
    """Whether the processor multiplies bf16 itself (twice as fast as fp32 or more) and need not imitate it (slower)."""
    instructions = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, name, lambda: False)()) for name in instructions)


def describe_environment(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "versions": {"python": platform.python_version(), **{package: _version(package) for package in PACKAGES}},
        "device": {"type": str(device), "name": name, "threads": torch.get_num_threads(), "cpu_bf16": cpu_has_bf16()},
        "platform": platform.platform(),
        "commit": _commit(),
        "command": sys.argv,
    }
