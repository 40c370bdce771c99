"""Files of features (.npz): `features` N x D (or N x views x D), and where there are any `paths`, `labels`, `about`.

Read without ever running what is in them (`allow_pickle=False`). Rows are ordered by their content, as images are, so that the
same features in any order give the same model. A target's labels stay in the file: `read_labels` is for the source and for
evaluation.
"""

import contextlib
import hashlib
import os
import stat
import tempfile
import unicodedata
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from certvol.data.domains import fingerprint_of, sort_keys
from certvol.data.folders import name_some, printable, reason_of
from certvol.data.reading import HASH_BYTES
from certvol.errors import UserError

SUFFIX = ".npz"


@dataclass(frozen=True, eq=False)
class TargetFeatures:
    """Row i is `features[rows[i]]`, named `paths[i]`, ordered by content. There is no label to be had from it."""

    features: npt.NDArray[np.float32]
    """Rows x views x D."""
    rows: npt.NDArray[np.int64]
    paths: list[str]
    fingerprint: str
    about: str
    """What made the features; empty where the file does not say."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def dim(self) -> int:
        return int(self.features.shape[2])


@dataclass(frozen=True, eq=False)
class SourceFeatures(TargetFeatures):
    """By class, then by content."""

    labels: npt.NDArray[np.int64]
    classes: list[str]


def is_feature_file(path: str | os.PathLike[str]) -> bool:
    return Path(path).suffix.lower() == SUFFIX and not Path(path).is_dir()


def other_is_no_file(places: Sequence[str | os.PathLike[str]]) -> str | None:
    """What is wrong where one domain is a file of features and the other is not."""
    files = [place for place in places if is_feature_file(place)]
    if len(files) != 1:
        return None
    shown = printable(str(files[0]))
    return f"{shown} holds features, but the other domain is no .npz file; give features for both, or images"


def open_target_features(path: str | os.PathLike[str]) -> TargetFeatures:
    features, paths, about = _read_features(Path(path))
    hashes = row_hashes(features)
    order = np.lexsort(sort_keys(hashes))
    return TargetFeatures(features, order, [paths[i] for i in order], fingerprint_of(hashes[order]), about)


def open_source_features(path: str | os.PathLike[str]) -> SourceFeatures:
    shown = printable(str(path))
    features, paths, about = _read_features(Path(path))
    names = read_labels(path)
    if names is None:
        raise UserError(f"the features in {shown} have no labels; the source needs an array `labels`, one per row")
    classes = sorted(set(names))
    if "-1" in classes:
        raise UserError(
            f"{shown} has rows with the label -1, which marks unlabelled ones: give those as the target instead"
        )
    if len(classes) < 2:
        raise UserError(f"{shown} holds one class only ({name_some(classes)}); adaptation needs at least two")
    number = {name: i for i, name in enumerate(classes)}
    labels = np.fromiter((number[name] for name in names), dtype=np.int64, count=len(names))
    hashes = row_hashes(features)
    order = np.lexsort((*sort_keys(hashes), labels))
    return SourceFeatures(
        features,
        order,
        [paths[i] for i in order],
        fingerprint_of(hashes[order], labels[order]),
        about,
        labels[order],
        classes,
    )


def read_labels(path: str | os.PathLike[str]) -> list[str] | None:
    """A name per row, in the order of the file; None where the file has no labels."""
    with _opened(Path(path)) as file:
        if "labels" not in file.files:
            return None
        labels, rows = _array(file, "labels", path), len(np.atleast_1d(_array(file, "features", path)))
    if labels.ndim != 1 or labels.dtype.kind not in "iubUS" or len(labels) != rows:
        raise UserError(
            f"`labels` in {printable(str(path))} should be one name or whole number per row ({rows}), found "
            f"{labels.dtype} of shape {list(labels.shape)}"
        )
    return _names(labels)


def known_labels(
    path: str | os.PathLike[str], rows: npt.NDArray[np.int64], classes: list[str]
) -> npt.NDArray[np.int64] | None:
    """For evaluation only: the class of each of `rows`; None unless the file names a class of the model for every one."""
    names = read_labels(path)
    composed = {unicodedata.normalize("NFC", name): i for i, name in enumerate(classes)}
    numbers = [composed.get(unicodedata.normalize("NFC", name)) for name in names or []]
    if not numbers or any(number is None for number in numbers):
        return None
    return np.asarray(np.array(numbers, dtype=np.int64)[rows])


def check_place(path: Path) -> None:
    """UserError where `write_features` could not write there. Nothing is made but a nameless file, which is gone at once."""
    shown = printable(str(path))
    if path.suffix.lower() != SUFFIX:
        raise UserError(f"features are written as a .npz file, found {shown}")
    try:
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISDIR(path.stat().st_mode):
                raise UserError(f"cannot write {shown}: it is a folder")
        with contextlib.suppress(FileNotFoundError):
            _part(path).stat()  # whose name may be too long
        folder = path.absolute().parent
        while not os.path.lexists(folder):
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(f"cannot write {shown}: {reason_of(error)}") from None


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def write_features(
    path: Path, features: npt.NDArray[np.float32], paths: Sequence[str], labels: Sequence[str] | None, about: str
) -> None:
    """Whole or not at all."""
    names, made = np.array(paths, dtype=np.str_), np.array(about)
    part = _part(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            if labels is None:
                np.savez(file, features=features, paths=names, about=made)
            else:
                np.savez(file, features=features, paths=names, about=made, labels=np.array(labels, dtype=np.str_))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UserError(f"cannot write {printable(str(path))}: {reason_of(error)}") from None


def check_alike(source: TargetFeatures, target: TargetFeatures) -> None:
    """Features can only be compared where one backbone made both."""
    if source.dim != target.dim:
        raise UserError(
            f"the source's features have {source.dim} dimensions and the target's {target.dim}; "
            "extract both with the same backbone"
        )
    if source.about and target.about and source.about != target.about:
        raise UserError(
            f"the source's features were made by {printable(source.about)} and the target's by {printable(target.about)}; "
            "extract both with the same backbone, weights and image size"
        )


def _opened(path: Path) -> Any:
    shown = printable(str(path))
    try:
        found = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise UserError(f"there is no file {shown}") from None
    except OSError as error:
        raise UserError(f"cannot read {shown}: {reason_of(error)}") from None
    except (ValueError, EOFError, IndexError, RuntimeError, zipfile.BadZipFile) as error:
        raise UserError(f"{shown} is damaged or no .npz file of arrays ({reason_of(error)})") from None
    if not hasattr(found, "files"):
        raise UserError(
            f"{shown} holds a single array; expected an .npz file with `features`, as `certvol extract` writes"
        )
    return found


def _array(file: Any, name: str, path: str | os.PathLike[str]) -> npt.NDArray[Any]:
    shown = printable(str(path))
    if name not in file.files:
        held = name_some(list(file.files)) or "nothing"
        raise UserError(f"{shown} has no array `{name}` (it holds {held}); `certvol extract` writes such files")
    try:
        return np.asarray(file[name])
    except MemoryError:
        raise UserError(f"`{name}` in {shown} does not fit into memory") from None
    except Exception as error:  # an archive can be broken in any way: its own errors, zlib's, lzma's, numpy's
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise UserError(f"`{name}` in {shown} cannot be read: {reason}") from None


def _read_features(path: Path) -> tuple[npt.NDArray[np.float32], list[str], str]:
    shown = printable(str(path))
    with _opened(path) as file:
        features = np.atleast_1d(_array(file, "features", path))
        paths = _array(file, "paths", path) if "paths" in file.files else np.arange(len(features))
        about = str(_array(file, "about", path)) if "about" in file.files else ""
    if features.ndim not in (2, 3) or features.dtype.kind not in "fiu" or 0 in features.shape:
        raise UserError(
            f"`features` in {shown} should be numbers of shape rows x D or rows x views x D, found {features.dtype} of "
            f"shape {list(features.shape)}"
        )
    if paths.shape != features.shape[:1]:
        raise UserError(f"`paths` in {shown} should be one per row ({len(features)}), found shape {list(paths.shape)}")
    features = np.ascontiguousarray(features if features.ndim == 3 else features[:, None], dtype=np.float32)
    if not np.isfinite(features).all():
        raise UserError(f"`features` in {shown} holds values that are no finite float32 numbers; leave those rows out")
    return features, _names(paths), about


def _names(values: npt.NDArray[Any]) -> list[str]:
    if values.dtype.kind == "S":
        return [bytes(value).decode("utf-8", "surrogateescape") for value in values]
    return [str(value) for value in values]


def row_hashes(features: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    digests = b"".join(hashlib.blake2b(row.tobytes(), digest_size=HASH_BYTES).digest() for row in features)
    return np.frombuffer(digests, dtype=np.uint8).reshape(-1, HASH_BYTES)
