"""List the images of a folder and the classes that its sub-folders name; open no image."""

import heapq
import os
import stat
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from certvol.data import Indices
from certvol.errors import UserError

IMAGE_SUFFIXES = frozenset(
    {"jpg", "jpeg", "jpe", "jfif", "png", "apng", "bmp", "dib", "webp", "gif", "tif", "tiff"}
    | {"heic", "heif", "hif", "avif"}
)
_IGNORED = frozenset({"__MACOSX", "Thumbs.db", "desktop.ini"})
LATEST_NS = 2**63 - 1  # in the year 2262; some file systems have later times


class ListedFile(NamedTuple):
    """An image file, with size and times (ns) from when it was listed.

    Programs can set `mtime_ns` to any time, but not `ctime_ns`, which every change updates.
    """

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: str, status: os.stat_result) -> "ListedFile":
        mtime_ns, ctime_ns = (
            max(-LATEST_NS, min(time_ns, LATEST_NS))
            for time_ns in (status.st_mtime_ns, status.st_ctime_ns)
        )
        return cls(path, status.st_size, mtime_ns, ctime_ns)


@dataclass(frozen=True, eq=False)
class Listing:
    """The image files below a folder: relative paths with `/`, sorted, and a row for each."""

    root: Path
    paths: list[str]
    status_N3: NDArray[np.int64]
    """Size, mtime_ns and ctime_ns of each file: an array, because there may be a million."""
    problems: list[tuple[str, str]]
    """(relative path, reason) of entries that could not be listed."""
    other_files: int
    """The number of files whose name has no image suffix."""
    folders: list[str]
    """Folders one and two levels down, with or without images, to find empty class folders."""

    def file(self, number: int) -> ListedFile:
        return ListedFile(str(self.root / self.paths[number]), *self.status_N3[number].tolist())


class _Walk:
    """Walks below a folder. It reads every real folder once, so links cannot make it loop."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files: list[ListedFile] = []
        self.problems: list[tuple[str, str]] = []
        self.other_files = 0
        self.folders: list[str] = []
        # (is a link, folder) in a heap: links come last, so that none hides the real folder.
        self._waiting: list[tuple[bool, str]] = []
        self._closed = {_identity(parent.stat()) for parent in root.resolve().parents}
        """Folders that have been read, and those above the root."""

    def run(self) -> None:
        self._read("")
        while self._waiting:
            _, folder = heapq.heappop(self._waiting)
            try:
                self._read(folder)
            except OSError as error:
                self.problems.append((folder, f"cannot read this folder: {reason_of(error)}"))

    def _read(self, folder: str) -> None:
        place = self.root / folder
        identity = _identity(place.stat())
        if identity in self._closed:
            reason = "a link to a folder that was already read, or to a parent folder"
            self.problems.append((folder, reason))
            return
        self._closed.add(identity)
        prefix = f"{folder}/" if folder else ""
        with os.scandir(place) as entries:
            for entry in entries:
                if entry.name[0] != "." and entry.name not in _IGNORED:
                    self._add(entry, prefix + entry.name)

    def _add(self, entry: os.DirEntry[str], path: str) -> None:
        try:
            if entry.is_dir():
                if path.count("/") < 2:
                    self.folders.append(path)
                heapq.heappush(self._waiting, (entry.is_symlink(), path))
            elif not entry.is_file():
                reason = "a pipe, socket or device, not a file"
                if entry.is_symlink() and not (self.root / path).exists():
                    reason = "a broken link: its target does not exist"
                self.problems.append((path, reason))
            elif has_image_suffix(entry.name):
                self.files.append(ListedFile.of(path, entry.stat()))
            else:
                self.other_files += 1
        except OSError as error:  # vanished, a link to itself, a network drive that does not answer
            self.problems.append((path, f"cannot be read: {reason_of(error)}"))


def scan(root: str | Path) -> Listing:
    """List the images below `root`. Raise UserError only if `root` itself cannot be read."""
    place = Path(root).absolute()
    shown = printable(root)
    try:
        if not stat.S_ISDIR(place.stat().st_mode):
            raise UserError(f"{shown} is a file; expected a folder of images")
        walk = _Walk(place)
        walk.run()
    except FileNotFoundError:
        raise UserError(f"there is no folder {shown}; check the path") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL inside the path
        raise UserError(f"cannot read the folder {shown}: {reason_of(error)}") from None
    files = sorted(walk.files)
    return Listing(
        root=place,
        paths=[file.path for file in files],
        status_N3=np.array([file[1:] for file in files], dtype=np.int64).reshape(-1, 3),
        problems=sorted(walk.problems),
        other_files=walk.other_files,
        folders=sorted(walk.folders),
    )


def has_image_suffix(name: str) -> bool:
    stem, _, suffix = name.rpartition(".")
    return bool(stem) and suffix.lower() in IMAGE_SUFFIXES


def printable(name: str | os.PathLike[str]) -> str:
    """Escape control characters and invalid UTF-8, so that a name fits in one line of a message."""
    text = os.fspath(name).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def reason_of(error: Exception) -> str:
    """Return the system's message for an error, without the path and the number."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[:1].lower() + error.strerror[1:]
    return str(error) or type(error).__name__


def class_level(paths: Sequence[str]) -> int:
    """Return the depth of the class folders: 1 below a single folder `images`, else 0."""
    folders = {path.partition("/")[0] for path in paths if "/" in path}
    below_images = len(folders) == 1 and folders.pop().casefold() == "images"
    return int(below_images and any(path.count("/") >= 2 for path in paths))


def class_of(path: str, level: int = 0) -> str | None:
    """Return the class folder of an image; None if the image lies above all class folders."""
    parts = path.split("/", level + 1)
    return parts[level] if len(parts) > level + 1 else None


def labels_of(listing: Listing) -> tuple[list[str], Indices]:
    """Return sorted class names, and a label per path: -1 for an image beside the class folders."""
    root = printable(listing.root)
    if not listing.paths:
        raise UserError(no_images_in(listing))
    level = class_level(listing.paths)
    names = [class_of(path, level) for path in listing.paths]
    classes = sorted({name for name in names if name is not None})
    if not classes:
        raise UserError(
            f"the {len(names)} images of {root} lie in no class folders; arrange the source as "
            f"{root}/<class>/<image>, or pass the folder that holds the class folders"
        )
    inside = [path.split("/", level)[-1] for path in listing.paths if path.count("/") >= level]
    if domain := _first_domain(inside):
        above = next(path for path in listing.paths if path.count("/") > level).split("/")[:level]
        better = "/".join([root, *above, printable(domain)])
        raise UserError(
            f"the folders in {root} ({name_some(classes)}) hold only folders, so they look like "
            f"domains, not classes; did you mean {better}?"
        )
    if len(classes) < 2:
        raise UserError(
            f"{root} holds one class only ({printable(classes[0])}); adaptation needs at least two "
            "class folders with images"
        )
    number = {name: i for i, name in enumerate(classes)}
    return classes, np.array([number.get(name or "", -1) for name in names], dtype=np.int64)


def no_images_in(listing: Listing) -> str:
    """Return the message for a folder without images."""
    found = f"found {listing.other_files} other files" if listing.other_files else "found no files"
    if listing.problems:
        path, reason = listing.problems[0]
        found += (
            f" and {len(listing.problems)} unreadable entries, such as {printable(path)}: {reason}"
        )
    return (
        f"{printable(str(listing.root))} holds no images ({found}); "
        "expected files named .jpg, .jpeg, .png, .bmp, .webp, .gif, .tif, .tiff, .avif or .heic"
    )


def about_small_classes(counts: Mapping[str, int], where: str = "") -> list[str]:
    """Describe the classes that have no readable image or only one; `where` names the folder."""
    texts = []
    if unreadable := [name for name, count in counts.items() if count == 0]:
        texts.append(
            f"classes without a readable image{where} are left out: {name_some(unreadable)}"
        )
    if single := [name for name, count in counts.items() if count == 1]:
        texts.append(
            f"classes with only one image{where}: {name_some(single)}; add images if you can"
        )
    return texts


def name_some(names: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(printable(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown}, ... {len(names)} in all"


def _first_domain(paths: Iterable[str]) -> str:
    """Return the first domain of <domain>/<class>/<image>; empty if the folders are classes.

    A domain has two classes or more, and no image outside them: <class>/images/<image> and
    <class>/<one folder>/<image> are class folders.
    """
    inside: dict[str, set[str]] = {}
    for path in paths:
        first, *rest = path.split("/")
        if len(rest) > 1 and rest[0].casefold() == "images":
            rest = rest[1:]
        if len(rest) == 1:
            return ""
        if rest:
            inside.setdefault(first, set()).add(rest[0])
    return min(inside) if any(len(folders) > 1 for folders in inside.values()) else ""


def folder_labels(paths: list[str], classes: list[str]) -> Indices | None:
    """Label each path by its class-named folder, for evaluation; None unless every path has one."""
    labels = known_folder_labels(paths, classes)
    return labels if len(labels) and labels.min() >= 0 else None


def known_folder_labels(paths: Sequence[str], classes: Sequence[str]) -> Indices:
    """Label each path by its class-named folder; -1 for a path in no such folder."""
    level = 0 if any(name.casefold() == "images" for name in classes) else class_level(paths)
    return class_numbers([class_of(path, level) or "" for path in paths], classes)


def class_numbers(names: Iterable[str], classes: Sequence[str]) -> Indices:
    """Return the number of each name among the classes; -1 for a name that is not a class.

    Names that differ only in their Unicode form are the same: file systems differ in it.
    """
    number = {unicodedata.normalize("NFC", name): i for i, name in enumerate(classes)}
    number |= {name: i for i, name in enumerate(classes)}
    found = [number.get(name, number.get(unicodedata.normalize("NFC", name), -1)) for name in names]
    return np.array(found, dtype=np.int64)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
