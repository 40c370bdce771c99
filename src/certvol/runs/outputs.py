"""Check and write files and folders at places that the user chose."""

import os
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path

from certvol.data import Place
from certvol.data.feature_files import is_feature_file
from certvol.data.folders import has_image_suffix, printable, reason_of
from certvol.errors import UserError
from certvol.files import output_file
from certvol.runs.folder import RunFolder


def check_output(
    path: Place,
    option: str = "--out",
    inputs: Iterable[Place] = (),
    replaces_features: bool = False,
) -> None:
    """Refuse, before any work, a place that cannot be written or a file that is still needed.

    Needed files are existing images, files of runs, the `inputs` of the command itself and, unless
    `replaces_features`, existing files of features. Any other existing file is replaced; pipes and
    character devices are written into.
    """
    shown = f"{option} {printable(path)}"
    place = Path(path)
    try:
        if place.is_dir() or os.fspath(path).endswith(os.sep):
            raise UserError(f"{shown} is a folder; give a file")
        own = place.resolve()
        run = next((folder for folder in own.parents if RunFolder(folder).owns(own)), None)
        if run is not None:  # also a file that the run does not have yet, such as review.csv
            raise UserError(f"{shown} is a file of the run {printable(run)}; give another file")
        if not place.exists():
            _check_folder(own.parent)
            return
        status = place.stat()
        if not stat.S_ISREG(status.st_mode):
            if not (stat.S_ISCHR(status.st_mode) or stat.S_ISFIFO(status.st_mode)):
                raise UserError(f"{shown} is a disk or a socket; give a file")
            return
        _check_folder(own.parent)
        taken = any(same_file(place, given) for given in inputs)
    except (OSError, ValueError, RuntimeError) as error:  # a NUL; a link that leads to itself
        raise UserError(f"cannot write {shown}: {reason_of(error)}") from None
    if has_image_suffix(place.name) or has_image_suffix(own.name):
        raise UserError(f"{shown} is an existing image; give another file")
    if taken:
        raise UserError(f"{shown} is an input of this command; give another file")
    if not replaces_features and (is_feature_file(place) or is_feature_file(own)):
        raise UserError(f"{shown} is an existing file of features; give another file")


def check_outside(folder: Place, images: Iterable[Place | None], option: str = "--out") -> None:
    """Refuse a folder inside a folder of images, where its files would be taken for images."""
    shown = f"{option} {printable(folder)}"
    try:
        place = Path(folder).resolve()
        above = [each for each in images if each is not None and Path(each).is_dir()]
        above = [each for each in above if place.is_relative_to(Path(each).resolve())]
    except (OSError, ValueError, RuntimeError) as error:  # a NUL; a link that leads to itself
        raise UserError(f"cannot use {shown}: {reason_of(error)}") from None
    if above:
        raise UserError(
            f"{shown} lies inside {printable(above[0])}, and its files would be "
            "read as images; give another folder"
        )


def same_file(one: Place, other: Place) -> bool:
    """Return whether both names lead to the same existing file."""
    try:
        return Path(one).samefile(other)
    except (OSError, ValueError):
        return False


def _check_folder(folder: Path) -> None:
    """Raise OSError if the folder, or the first existing one above it, takes no new files."""
    while not os.path.lexists(folder):
        folder = folder.parent
    with tempfile.TemporaryFile(dir=folder):
        pass


def write_output(path: Place, content: str | bytes) -> None:
    """Write a file and create the folders above it; paths that are not Unicode keep their bytes."""
    data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogateescape")
    try:
        with output_file(Path(path)) as file:
            file.write(data)
    except OSError as error:
        place = printable(path)
        raise UserError(f"cannot write {place}: {reason_of(error)}") from None
