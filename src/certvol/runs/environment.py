"""Describe what a run was made with: versions, device, commit and command."""

import json
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from certvol.device import cpu_has_bf16
from certvol.runs.folder import RunFolder

PACKAGES = "certvol torch torchvision timm numpy Pillow safetensors scikit-learn".split()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*words: str) -> str | None:
    command, here = ["git", "--no-optional-locks", *words], Path(__file__).resolve().parent
    try:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _commit() -> str | None:
    """Return the commit of certvol's source in a git checkout, marked if files were changed."""
    commit = _git("rev-parse", "HEAD")
    changed = commit is not None and _git("status", "--porcelain", "--", "..")
    return f"{commit}, changed" if changed else commit


def describe_environment(device: torch.device) -> dict[str, Any]:
    name = platform.processor() or platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return {
        "versions": {
            "python": platform.python_version(),
            **{package: _version(package) for package in PACKAGES},
        },
        "device": {
            "type": str(device),
            "name": name,
            "threads": torch.get_num_threads(),
            "cpu_bf16": cpu_has_bf16(),
        },
        "platform": platform.platform(),
        "commit": _commit(),
        "command": sys.argv,
    }


def target_fingerprint(run: RunFolder) -> str | None:
    """Return what identifies the images of a run's target; None if an older run did not note it."""
    try:
        found = json.loads(run.environment.read_text(encoding="utf-8"))["target"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(found, str) else None
