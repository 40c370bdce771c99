"""Recognise runs that this user made: a run from a stranger may name any folder as its target.

A run notes a code of its target's path, made with a key that never leaves the user's home folder.
"""

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from certvol.files import write_atomically

KEY_BYTES = 32


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
