"""Files that a command writes to a place the user chose."""

from pathlib import Path

from certvol.data.folders import has_image_suffix, printable
from certvol.errors import UserError
from certvol.runs.folder import RunFolder
from certvol.runs.tables import write_text


def check_output(path: str | Path, option: str = "--out") -> None:
    """Refuse, before any work, a folder, an existing image and a file that a run needs.

    Any other existing file is replaced.
    """
    place = Path(path)
    shown = f"{option} {printable(str(place))}"
    if place.is_dir():
        raise UserError(f"{shown} is a folder; give a file")
    if not place.is_file():
        return
    if has_image_suffix(place.name) or has_image_suffix(place.resolve().name):
        raise UserError(f"{shown} is an existing image; give another file")
    for folder in place.resolve().parents:
        if RunFolder(folder).owns(place.resolve()):
            raise UserError(
                f"{shown} is a file of the run {printable(str(folder))}; give another file"
            )


def write_output(path: Path, text: str) -> None:
    """Write a text file, and create the folders above it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
