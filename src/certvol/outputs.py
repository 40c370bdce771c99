"""Files that a command is asked to write: refused before any work is done where something else would be lost."""

from pathlib import Path

from certvol.data.folders import has_image_suffix, printable
from certvol.errors import UserError
from certvol.training.run_folder import RunFolder


def check_output(path: str | Path, option: str = "--out") -> None:
    """UserError for a folder, for an image that is there and for a file that makes up a run. Any other file is written anew."""
    place = Path(path)
    shown = f"{option} {printable(str(place))}"
    if place.is_dir():
        raise UserError(f"{shown} is a folder; give a file")
    if not place.is_file():
        return
    if has_image_suffix(place.name) or has_image_suffix(place.resolve().name):
        raise UserError(f"{shown} is an image that is there already, and would be lost; give another file")
    for folder in place.resolve().parents:
        if RunFolder(folder).owns(place.resolve()):
            raise UserError(f"{shown} is a file of the run {printable(str(folder))}, which needs it; give another file")
