"""What RUN/environment.json says: versions, device, commit, command, and whether it was made here.

A run from a stranger may name any folder as its target. So a run notes a code of its target's path,
made with a key that never leaves the user's home folder.
"""

import hashlib
import hmac
import json
import os
import platform
import secrets
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from certvol.device import cpu_has_bf16
from certvol.files import write_atomically
from certvol.runs.folder import RunFolder

PACKAGES = "certvol torch torchvision timm numpy Pillow safetensors scikit-learn".split()
KEY_BYTES = 32


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


def origin_of(place: str | os.PathLike[str]) -> str | None:
    """Return the code of a path; None if the key can neither be read nor made."""
    try:
        key = _key()
    except (OSError, RuntimeError):  # RuntimeError: this user has no home folder
        return None
    return hmac.new(key, os.fsencode(place), hashlib.sha256).hexdigest()


def made_here(place: str | os.PathLike[str], code: object) -> bool:
    """Return whether this user made a run that noted `code` for the path of its target."""
    expected = origin_of(place)
    return expected is not None and isinstance(code, str) and code == expected


def _key() -> bytes:
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if Path(state).is_absolute() else Path.home() / ".local" / "state"
    file = folder / "certvol" / "origin.key"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, secrets.token_bytes(KEY_BYTES))
        file.chmod(0o600)
    key = file.read_bytes()
    if len(key) != KEY_BYTES:
        raise OSError(f"{file} is damaged")
    return key
