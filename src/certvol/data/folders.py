"""Which images a folder holds and which classes its sub-folders name. No image is opened here."""

import heapq
import os
import stat
import unicodedata
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from certvol.errors import UserError

IMAGE_SUFFIXES = frozenset({"jpg", "jpeg", "jpe", "jfif", "png", "apng", "bmp", "dib", "webp", "gif", "tif", "tiff"})
_PASSED_OVER = frozenset({"__MACOSX", "Thumbs.db", "desktop.ini"})
_SPECIAL = (
    (stat.S_ISFIFO, "a named pipe, not a file"),
    (stat.S_ISSOCK, "a socket, not a file"),
    (stat.S_ISCHR, "a device, not a file"),
    (stat.S_ISBLK, "a device, not a file"),
)


@dataclass(frozen=True, eq=False)
class Listing:
    """The image files below a folder. Paths are relative, `/`-separated and sorted; the arrays go with them."""

    root: Path
    paths: list[str]
    sizes: npt.NDArray[np.int64]
    mtimes_ns: npt.NDArray[np.int64]
    problems: list[tuple[str, str]]
    """(relative path, reason) of entries that had to be passed over."""
    other_files: int
    """Files whose name has no image suffix."""
    folders: list[str]
    """Folders one and two levels down, with or without images: what tells an empty class folder."""


class _Walk:
    """Collects a listing. Every real folder is read once: that ends loops, and links that multiply."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.paths: list[str] = []
        self.sizes = array("q")
        self.mtimes_ns = array("q")
        self.problems: list[tuple[str, str]] = []
        self.other_files = 0
        self.folders: list[str] = []
        self._real: list[str] = []
        self._links: list[str] = []  # read after all real folders, so that a real one is never hidden by a link to it
        self._seen: set[tuple[int, int]] = set()
        self._above = {_identity(parent.stat()) for parent in root.resolve().parents}

    def run(self) -> None:
        self._read("")
        while self._real or self._links:
            folder = self._real.pop() if self._real else heapq.heappop(self._links)
            try:
                self._read(folder)
            except OSError as error:
                self.problems.append((folder, f"cannot read this folder: {reason_of(error)}"))

    def _read(self, folder: str) -> None:
        place = self.root / folder
        identity = _identity(place.stat())
        if identity in self._seen:
            self.problems.append((folder, "a link to a folder that is read already (a loop, or a second way to it)"))
            return
        if identity in self._above:
            self.problems.append((folder, "a link to a folder that this folder lies in"))
            return
        self._seen.add(identity)
        prefix = f"{folder}/" if folder else ""
        with os.scandir(place) as entries:
            for entry in entries:
                name = entry.name
                if name[0] != "." and name not in _PASSED_OVER:
                    self._take(entry, prefix + name)

    def _take(self, entry: os.DirEntry[str], path: str) -> None:
        try:
            if entry.is_dir():
                if path.count("/") < 2:
                    self.folders.append(path)
                if entry.is_symlink():
                    heapq.heappush(self._links, path)
                else:
                    self._real.append(path)
            elif not entry.is_file():
                self.problems.append((path, _why_no_file(entry)))
            elif not has_image_suffix(entry.name):
                self.other_files += 1
            else:
                status = entry.stat()
                self.paths.append(path)
                self.sizes.append(status.st_size)
                self.mtimes_ns.append(status.st_mtime_ns)
        except OSError as error:  # vanished since, a link to itself, a network place that does not answer
            self.problems.append((path, f"cannot be read: {reason_of(error)}"))


def scan(root: str | Path) -> Listing:
    """Lists the images below `root`. Raises UserError only where `root` itself is at fault."""
    place = Path(root).absolute()
    shown = printable(str(root))
    try:
        if not stat.S_ISDIR(place.stat().st_mode):
            raise UserError(f"{shown} is a file; expected a folder of images")
        walk = _Walk(place)
        walk.run()
    except FileNotFoundError:
        raise UserError(f"there is no folder {shown}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL inside the path
        raise UserError(f"cannot read the folder {shown}: {reason_of(error)}") from None
    order = sorted(range(len(walk.paths)), key=walk.paths.__getitem__)
    index = np.array(order, dtype=np.int64)
    return Listing(
        root=place,
        paths=[walk.paths[i] for i in order],
        sizes=np.array(walk.sizes, dtype=np.int64)[index],
        mtimes_ns=np.array(walk.mtimes_ns, dtype=np.int64)[index],
        problems=sorted(walk.problems),
        other_files=walk.other_files,
        folders=sorted(walk.folders),
    )


def has_image_suffix(name: str) -> bool:
    stem, _, suffix = name.rpartition(".")
    return bool(stem) and suffix.lower() in IMAGE_SUFFIXES


def printable(name: str) -> str:
    """A path or name fit for one line of a message: control characters and bytes that are no UTF-8 are escaped."""
    text = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def reason_of(error: Exception) -> str:
    """The system's own words for what went wrong, without the path and the number."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror[:1].lower() + error.strerror[1:]
    return str(error) or type(error).__name__


def class_level(paths: Sequence[str]) -> int:
    """How many folders lie above the class folders: 1 below a single folder `images`, else 0."""
    folders = {path.partition("/")[0] for path in paths if "/" in path}
    below_images = len(folders) == 1 and folders.pop().casefold() == "images"
    return int(below_images and any(path.count("/") >= 2 for path in paths))


def class_of(path: str, level: int = 0) -> str | None:
    """The class folder of an image; None where it lies above all class folders."""
    parts = path.split("/", level + 1)
    return parts[level] if len(parts) > level + 1 else None


def labels_of(listing: Listing) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Sorted class names and a label per path; -1 for a stray image that lies beside the class folders."""
    root = printable(str(listing.root))
    if not listing.paths:
        raise UserError(no_images_in(listing))
    level = class_level(listing.paths)
    names = [class_of(path, level) for path in listing.paths]
    classes = sorted({name for name in names if name is not None})
    if not classes:
        raise UserError(
            f"the {len(names)} images of {root} lie in no class folders; the source needs one sub-folder per class, "
            f"so arrange them as {root}/<class>/<image>, or pass the folder that holds the class folders"
        )
    better = _right_level(listing.paths)
    if better:
        shown = name_some(classes)
        raise UserError(
            f"the folders in {root} ({shown}) hold only folders, so they look like domains, not classes; "
            f"did you mean {root}/{printable(better)}?"
        )
    if len(classes) < 2:
        raise UserError(
            f"{root} holds one class only ({printable(classes[0])}); adaptation needs at least two class folders with images"
        )
    number = {name: i for i, name in enumerate(classes)}
    labels = np.fromiter((-1 if name is None else number[name] for name in names), dtype=np.int64, count=len(names))
    return classes, labels


def no_images_in(listing: Listing) -> str:
    found = f"found {listing.other_files} other files" if listing.other_files else "found no files"
    if listing.problems:
        path, reason = listing.problems[0]
        found += f" and {len(listing.problems)} entries that could not be read, such as {printable(path)}: {reason}"
    return (
        f"{printable(str(listing.root))} holds no images ({found}); "
        "expected files named .jpg, .jpeg, .png, .bmp, .webp, .gif, .tif or .tiff"
    )


def name_some(names: Sequence[str], most: int = 5) -> str:
    shown = ", ".join(printable(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown}, ... {len(names)} in all"


def _right_level(paths: Sequence[str]) -> str:
    """The sub-folder that holds class folders where `paths` start too high up; empty where they start right."""
    steps: list[str] = []
    while True:
        level = class_level(paths)
        inside = [path.partition("/")[2] for path in paths if "/" in path] if level else list(paths)
        if not _holds_domains(inside):
            return "/".join(steps)
        first = min(path for path in inside if "/" in path).partition("/")[0]
        steps += (["images"] if level else []) + [first]
        paths = [path[len(first) + 1 :] for path in inside if path.startswith(f"{first}/")]


def _holds_domains(paths: Iterable[str]) -> bool:
    """True for <domain>/<class>/<image>, also with `images` between: no first-level folder holds an image itself.

    <class>/images/<image> and <class>/<one folder>/<image> are class folders: a domain has two classes or more."""
    inside: dict[str, set[str]] = {}
    for path in paths:
        first, *rest = path.split("/")
        if not rest:
            continue
        if len(rest) > 1 and rest[0].casefold() == "images":
            rest = rest[1:]
        if len(rest) == 1:
            return False
        inside.setdefault(first, set()).add(rest[0])
    return any(len(folders) > 1 for folders in inside.values())


def folder_labels(paths: list[str], classes: list[str]) -> npt.NDArray[np.int64] | None:
    """For evaluation only: the label of each path by the class-named folder it lies in; None unless every path does.

    Names are compared as written, then by their composed Unicode form, as file systems differ in it."""
    exact = {name: i for i, name in enumerate(classes)}
    composed = {unicodedata.normalize("NFC", name): i for i, name in enumerate(classes)}
    level = 0 if any(name.casefold() == "images" for name in classes) else class_level(paths)
    labels = np.empty(len(paths), dtype=np.int64)
    for i, path in enumerate(paths):
        name = class_of(path, level)
        if name is None:
            return None
        label = exact.get(name)
        if label is None:
            label = composed.get(unicodedata.normalize("NFC", name))
        if label is None:
            return None
        labels[i] = label
    return labels if paths else None


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _why_no_file(entry: os.DirEntry[str]) -> str:
    try:
        mode = entry.stat().st_mode
    except FileNotFoundError:
        return "a broken link: what it points to does not exist"
    return next((words for is_kind, words in _SPECIAL if is_kind(mode)), "not a file")
