"""Files of features (.npz): `features` N x D or N x views x D; optional `paths`, `labels`, `about`.

Nothing in a file is executed (`allow_pickle=False`). Rows are ordered by content, as images are, so
the same features in any order give the same model. A target's labels stay in the file: only the
source and evaluation read them.
"""

import hashlib
import os
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from certvol.data import Features, Indices, Place
from certvol.data.decoding import HASH_BYTES
from certvol.data.domains import sort_keys
from certvol.data.folders import class_numbers, name_some, printable, reason_of
from certvol.data.sources import check_apart, with_origins
from certvol.errors import UserError, first_line
from certvol.files import check_regular, fingerprint_of, output_file

SUFFIX = ".npz"
MOST_COMPRESSED, LEAST_SUSPECT = 100, 256 << 20  # a bomb grows a thousandfold
Stamp = tuple[int, int, int]  # size and times (ns) of a file


@dataclass(frozen=True, eq=False)
class TargetFeatures:
    """Unlabelled rows, ordered by content; row i is `features[rows[i]]`, named `paths[i]`."""

    features: Features
    """Rows x views x D."""
    rows: Indices
    paths: list[str]
    fingerprint: str
    about: str
    """Backbone, size and weights that made the features; may be empty."""
    stamp: Stamp | None = field(default=None, kw_only=True)
    """The state of the file before it was read."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def hashes(self) -> npt.NDArray[np.uint8]:
        """[n, 16], one per row."""
        return row_hashes(self.features[self.rows])

    @property
    def dim(self) -> int:
        return int(self.features.shape[2])


@dataclass(frozen=True, eq=False)
class SourceFeatures(TargetFeatures):
    """Labelled rows, ordered by class, then by content."""

    labels: Indices
    classes: list[str]
    origins: Indices
    """The number of each row's file, if there are several sources; else 0."""


def is_feature_file(path: Place) -> bool:
    return Path(path).suffix.lower() == SUFFIX and not Path(path).is_dir()


def only_one_is_a_file(places: Sequence[Place]) -> str | None:
    """Return the message for one domain that is a file of features and one that is not."""
    files = [place for place in places if is_feature_file(place)]
    if len(files) in (0, len(places)):
        return None
    other = "another domain" if len(places) > 2 else "the other domain"
    return (
        f"{printable(str(files[0]))} holds features, but {other} is not a .npz file; use features "
        f"for {'all' if len(places) > 2 else 'both'}"
    )


def open_target_features(path: Place) -> TargetFeatures:
    stamp = stamp_of(path)
    features, paths, about = _read_features(path)
    hashes = row_hashes(features)
    order = np.lexsort(sort_keys(hashes))
    names = [paths[i] for i in order]
    fingerprint = fingerprint_of(hashes[order].tobytes())
    return TargetFeatures(features, order, names, fingerprint, about, stamp=stamp)


def stamp_of(path: Place) -> Stamp | None:
    """Return the state of a file, which every change of it changes; None if it is gone."""
    try:
        status = Path(path).stat()
    except (OSError, ValueError):
        return None
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def open_source_features(places: Place | Sequence[Place]) -> SourceFeatures:
    """Open the features of one source or several; of several, a row's name begins with its file."""
    if isinstance(places, str | os.PathLike):
        return _open_one_source(places)
    check_apart(places)
    parts = [_open_one_source(place) for place in places]
    if len(parts) == 1:
        return parts[0]
    named = list(zip(places, parts, strict=True))
    described = [(place, part) for place, part in named if part.about]
    for (one_place, one), *others in (named, described or named):
        for place, part in others:
            check_comparable(one, part, (f"of {printable(one_place)}", f"of {printable(place)}"))
    classes = sorted({name for part in parts for name in part.classes})
    number = {name: i for i, name in enumerate(classes)}
    features = np.concatenate([part.features[part.rows] for part in parts])
    labels = np.concatenate(
        [np.array([number[name] for name in part.classes])[part.labels] for part in parts]
    )
    origins = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    names = [
        f"{Path(place).stem}/{name}"
        for place, part in zip(places, parts, strict=True)
        for name in part.paths
    ]
    about = next((part.about for part in parts if part.about), "")
    found = _ordered(features, names, about, labels, classes)
    origins = origins[found.rows]
    return replace(found, origins=origins, fingerprint=with_origins(found.fingerprint, origins))


def _ordered(
    features: Features, paths: list[str], about: str, labels: Indices, classes: list[str]
) -> SourceFeatures:
    """Order labelled rows by class, then by content; their origins are all 0."""
    hashes = row_hashes(features)
    rows = np.lexsort((*sort_keys(hashes), labels))
    fingerprint = fingerprint_of(hashes[rows].tobytes(), labels[rows].tobytes())
    names, origins = [paths[i] for i in rows], np.zeros(len(rows), np.int64)
    return SourceFeatures(features, rows, names, fingerprint, about, labels[rows], classes, origins)


def _open_one_source(path: Place) -> SourceFeatures:
    shown = printable(path)
    features, paths, about = _read_features(path)
    names = _read_labels(path, len(features))
    if names is None:
        raise UserError(f"{shown} has no labels; add an array `labels`, one per row")
    classes, numbers = np.unique(np.array(names, dtype=object), return_inverse=True)
    if "-1" in classes:
        raise UserError(f"{shown} has the label -1, which means unlabelled; use it as the target")
    if len(classes) < 2:
        raise UserError(f"{shown} has only one class ({classes[0]}); adaptation needs at least two")
    return _ordered(features, paths, about, numbers.astype(np.int64), list(classes))


def known_labels(path: Place, rows: Indices, classes: list[str]) -> Indices | None:
    """Return the labels of `rows` for evaluation, or None unless all are classes of the model."""
    labels, _ = labels_and_names(path, rows, classes)
    return labels if len(labels) and labels.min() >= 0 else None


def labels_and_names(path: Place, rows: Indices, classes: list[str]) -> tuple[Indices, list[str]]:
    """Return for each of `rows` its label, -1 for another class, and the class's name.

    `rows` are all rows of the file, in any order. Both results are empty if the file has no labels.
    """
    found = _read_labels(path, len(rows))
    if found is None:
        return np.empty(0, np.int64), []
    names = [found[row] for row in rows]
    return class_numbers(names, classes), names


def check_comparable(
    one: TargetFeatures,
    other: TargetFeatures,
    whose: tuple[str, str] = ("of the source", "of the target"),
) -> None:
    """Raise UserError if different backbones made the features."""
    if one.dim != other.dim:
        raise UserError(
            f"the features {whose[0]} have {one.dim} dimensions, those {whose[1]} {other.dim}; "
            "extract both with the same backbone"
        )
    if one.about and other.about and one.about != other.about:
        raise UserError(
            f"the features {whose[0]} were made by {printable(one.about)}, those {whose[1]} by "
            f"{printable(other.about)}; extract both with the same backbone, weights and image size"
        )
    views = one.features.shape[1], other.features.shape[1]
    if whose[0] != "of the source" and views[0] != views[1]:
        raise UserError(
            f"the features {whose[0]} have {views[0]} views of each row, those {whose[1]} "
            f"{views[1]}; extract both with the same number"
        )


def check_name(path: Path) -> None:
    """Refuse a name without .npz: files of features are recognised by it."""
    if path.suffix.lower() != SUFFIX:
        shown = printable(path)
        raise UserError(f"features are written as .npz; {shown} should end in .npz")


def write_features(
    path: Path, features: Features, paths: Sequence[str], labels: Sequence[str] | None, about: str
) -> None:
    names = np.array(paths, dtype=np.str_)
    arrays: dict[str, Any] = {"features": features, "paths": names, "about": np.array(about)}
    if labels is not None:
        arrays["labels"] = np.array(labels, dtype=np.str_)
    try:
        with output_file(path) as file:
            np.savez(file, **arrays)
    except OSError as error:
        raise UserError(f"cannot write {printable(path)}: {reason_of(error)}") from None


def row_hashes(features: Features) -> npt.NDArray[np.uint8]:
    digests = b"".join(
        hashlib.blake2b(row.tobytes(), digest_size=HASH_BYTES).digest() for row in features
    )
    return np.frombuffer(digests, dtype=np.uint8).reshape(-1, HASH_BYTES)


def _opened(path: Place) -> Any:
    shown = printable(path)
    try:
        check_regular(Path(path))
        found = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        raise UserError(f"there is no file {shown}") from None
    except OSError as error:
        raise UserError(f"cannot read {shown}: {reason_of(error)}") from None
    except (ValueError, EOFError, IndexError, RuntimeError, zipfile.BadZipFile) as error:
        raise UserError(f"{shown} is damaged or not a .npz file ({reason_of(error)})") from None
    if not hasattr(found, "files"):
        raise UserError(f"{shown} holds a single array; expected a .npz file with `features`")
    for member in found.zip.infolist():
        limit = max(LEAST_SUSPECT, MOST_COMPRESSED * member.compress_size)
        if member.file_size > limit:
            found.close()
            raise UserError(
                f"{shown} would grow {member.file_size // max(1, member.compress_size)}-fold to "
                f"{member.file_size / 1e9:.1f} GB when it is read; save it without compression"
            )
    return found


def _array(file: Any, name: str, path: Place) -> npt.NDArray[Any]:
    shown = printable(path)
    if name not in file.files:
        held = name_some(list(file.files)) or "nothing"
        raise UserError(
            f"{shown} has no array `{name}` (it holds {held}); `certvol extract` adds it"
        )
    try:
        return np.asarray(file[name])
    except MemoryError:
        raise UserError(f"`{name}` in {shown} does not fit into memory") from None
    except Exception as error:  # a damaged archive raises errors of zlib, lzma, numpy and others
        raise UserError(f"`{name}` in {shown} cannot be read: {first_line(error)}") from None


def _read_features(path: Place) -> tuple[Features, list[str], str]:
    """Return (features as rows x views x D, a name per row, what made them)."""
    where = f"in {printable(path)}"
    with _opened(path) as file:
        features = np.atleast_1d(_array(file, "features", path))
        paths = _array(file, "paths", path) if "paths" in file.files else np.arange(len(features))
        about = ""
        if "about" in file.files:
            about = " ".join(_names(np.atleast_1d(_array(file, "about", path)).ravel()[:1], path))
    shape = list(features.shape)
    if features.ndim not in (2, 3) or features.dtype.kind not in "fiu" or 0 in shape:
        raise UserError(
            f"`features` {where} should be numbers of shape rows x D or rows x views x D, "
            f"found {features.dtype} of shape {shape}"
        )
    if paths.shape != features.shape[:1]:
        found = f"found shape {list(paths.shape)} for {len(features)} rows"
        raise UserError(f"`paths` {where} should be one per row, {found}")
    features = features if features.ndim == 3 else features[:, None]
    features = np.ascontiguousarray(features, dtype=np.float32)
    if not np.isfinite(features).all():
        raise UserError(f"`features` {where} has values that are not finite; leave those rows out")
    return features, _names(paths, path), about


def _read_labels(path: Place, rows: int) -> list[str] | None:
    """Return a class name for each of the file's `rows`, in its order; None without labels."""
    with _opened(path) as file:
        if "labels" not in file.files:
            return None
        labels = _array(file, "labels", path)
    if labels.shape != (rows,) or labels.dtype.kind not in "iubUS":
        raise UserError(
            f"`labels` in {printable(path)} should be one name or whole number per row "
            f"({rows}), found {labels.dtype} of shape {list(labels.shape)}"
        )
    return _names(labels, path)


def _names(values: npt.NDArray[Any], path: Place) -> list[str]:
    if values.dtype.kind == "S":
        return [bytes(value).decode("utf-8", "surrogateescape") for value in values]
    if values.dtype.kind == "U" and values.dtype.itemsize:
        codes = np.ascontiguousarray(values, values.dtype.newbyteorder("=")).view(np.uint32)
        if (codes > sys.maxunicode).any():  # Python cannot make text of them
            raise UserError(
                f"names in {printable(path)} hold invalid character codes; write the file again"
            )
    return [str(value) for value in values]
