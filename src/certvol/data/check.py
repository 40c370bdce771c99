"""Find out, before training, what the source and the target hold and what is wrong with them.

Every image is read and decoded; of two `.npz` files, every row is read.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Literal

from certvol.data import Place, check_target
from certvol.data.cells import classes_alike, nearly_alike
from certvol.data.decode_pool import read_images
from certvol.data.decoding import Pixels
from certvol.data.feature_files import (
    SourceFeatures,
    TargetFeatures,
    check_comparable,
    is_feature_file,
    known_labels,
    only_one_is_a_file,
    open_source_features,
    open_target_features,
)
from certvol.data.folders import (
    Listing,
    about_small_classes,
    class_level,
    class_of,
    folder_labels,
    name_some,
    no_images_in,
    printable,
    scan,
)
from certvol.data.sources import mix_ups, scan_sources
from certvol.errors import UserError
from certvol.progress import Progress, Silent
from certvol.settings import DataConfig

IMBALANCE = 10.0  # images of the largest class per image of the smallest
_PROBE_SIZE = 32  # a file is decoded completely at any size; a small one is fastest
_MEASURED = "accuracy is measured by these labels after training, which never sees them"


@dataclass(frozen=True)
class Finding:
    """A finding about the data; an error keeps adaptation from starting."""

    level: Literal["error", "warning", "note"]
    text: str


class _Findings(list[Finding]):
    def error(self, text: str) -> None:
        self.append(Finding("error", text))

    def warn(self, text: str) -> None:
        self.append(Finding("warning", text))

    def note(self, text: str) -> None:
        self.append(Finding("note", text))


@dataclass(frozen=True)
class CheckReport:
    """The content of `certvol check --json`. Counts are of readable images or rows."""

    source_counts: dict[str, int]
    """Images per class; empty if the classes are unknown."""
    target_count: int
    findings: list[Finding]
    """Errors first."""
    source_unreadable: list[tuple[str, str]]
    """(path, reason), without the empty files."""
    target_unreadable: list[tuple[str, str]]
    source_empty: list[str]
    """Files of zero bytes."""
    target_empty: list[str]
    source_duplicates: list[list[str]]
    """Groups of paths with the same content."""
    target_duplicates: list[list[str]]
    in_both: list[tuple[str, str]]
    """(source path, target path) with the same content."""

    @property
    def can_adapt(self) -> bool:
        return all(finding.level != "error" for finding in self.findings)


@dataclass
class _Domain:
    """The readable images or rows of a domain: name, hash and, if known, class of each."""

    which: str
    paths: list[str] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    classes: list[str | None] = field(default_factory=list)
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    thumbnails: list[Pixels] = field(default_factory=list)
    """Small versions of a target's images, to find near-duplicates."""


def check(
    source: Place | Sequence[Place],
    target: Place,
    config: DataConfig,
    progress: Progress | None = None,
) -> CheckReport:
    """Read both domains; raise UserError only if one does not exist."""
    sources = [source] if isinstance(source, str | os.PathLike) else source
    for place in (*sources, target):
        if not os.path.lexists(place):
            raise UserError(f"there is no file or folder {printable(str(place))}")
    found = _Findings()
    if any(map(is_feature_file, [*sources, target])):
        classes, *domains = _check_features(sources, target, found)
    else:
        classes, *domains = _check_images(sources, target, config, progress or Silent(), found)
    for sentence in mix_ups(sources, target):
        found.warn(sentence)
    in_source, in_target = domains
    counter = Counter(in_source.classes)
    counts = {name: counter[name] for name in classes}
    if classes:
        _about_counts(counts, found)
        for sentence in nearly_alike(classes):
            found.warn(f"source: {sentence}")
        if (alike := classes_alike(classes)) is not None:
            found.error(f"source: {alike}")
    for text in (
        check_target.about_size(len(in_target.paths), len(classes)),
        check_target.about_copies(in_target.thumbnails),
    ):
        if text is not None:
            found.warn(f"target: {text}")
    duplicates = _duplicates(in_source, found), _duplicates(in_target, found)
    in_both = _in_both(in_source, in_target, found)
    return CheckReport(
        source_counts=counts,
        target_count=len(in_target.paths),
        findings=sorted(found, key=lambda each: ("error", "warning", "note").index(each.level)),
        source_unreadable=in_source.unreadable,
        target_unreadable=in_target.unreadable,
        source_empty=in_source.empty,
        target_empty=in_target.empty,
        source_duplicates=duplicates[0],
        target_duplicates=duplicates[1],
        in_both=in_both,
    )


# --- folders of images ----------------------------------------------------------------------------


def _check_images(
    sources: Sequence[Place],
    target: Place,
    config: DataConfig,
    progress: Progress,
    found: _Findings,
) -> tuple[list[str], _Domain, _Domain]:
    source_listing: Listing | None = None
    target_listing: Listing | None = None
    classes: list[str] = []
    of_source: dict[str, str] = {}
    with _faults(found, "source: "):
        scanned = scan_sources(sources)
        source_listing = scanned.listing
        classes, labels = scanned.labels()
        named = zip(source_listing.paths, labels, strict=True)
        of_source = {path: classes[label] for path, label in named if label >= 0}
        for part in scanned.parts:
            _about_class_folders(part, found)
    with _faults(found, "target: "):
        target_listing = scan(Path(target))
    in_source = _read("source", source_listing, config, progress)
    in_source.classes = [of_source.get(path) for path in in_source.paths]
    in_target = _read("target", target_listing, config, progress)
    if target_listing is not None:
        _about_target(target_listing, in_target.paths, classes, found)
    _about_files(source_listing, in_source, found)
    _about_files(target_listing, in_target, found)
    return classes, in_source, in_target


def _read(which: str, listing: Listing | None, config: DataConfig, progress: Progress) -> _Domain:
    domain = _Domain(which, unreadable=[] if listing is None else list(listing.problems))
    if listing is None or not listing.paths:
        return domain
    progress.start(f"reading {printable(listing.root.name)}", len(listing.paths))
    try:
        with contextlib.closing(read_images(listing, _PROBE_SIZE, config)) as groups:
            sizes, images = listing.status_N3[:, 0], chain.from_iterable(groups)
            for path, size, image in zip(listing.paths, sizes, images, strict=True):
                if image.pixels is not None and image.digest is not None:
                    domain.paths.append(path)
                    domain.digests.append(image.digest)
                    if which == "target":
                        domain.thumbnails.append(check_target.thumbnail(image.pixels))
                elif size == 0:
                    domain.empty.append(path)
                else:
                    domain.unreadable.append((path, image.reason))
                progress.advance()
    finally:
        progress.finish()
    domain.unreadable.sort()
    return domain


def _about_class_folders(listing: Listing, found: _Findings) -> None:
    level = class_level(listing.paths)
    if stray := [path for path in listing.paths if class_of(path, level) is None]:
        text = f"images outside class folders are left out: {_some(stray)}"
        found.warn(f"source: {text}; move each into a class folder")
    used = {class_of(path, level) for path in listing.paths}
    folders = [folder.split("/") for folder in listing.folders]
    names = [parts[level] for parts in folders if len(parts) == level + 1]
    if unused := [name for name in names if name not in used]:
        text = f"folders without images are not classes: {name_some(unused)}"
        found.warn(f"source: {text}; add images or remove them")


def _about_target(listing: Listing, paths: list[str], classes: list[str], found: _Findings) -> None:
    if not listing.paths:
        found.error(f"target: {no_images_in(listing)}")
    elif not paths:
        found.error(f"target: none of its {len(listing.paths)} image files can be read")
    elif classes and folder_labels(paths, classes) is not None:
        found.note(f"target: every image lies in a folder named like a source class; {_MEASURED}")
    elif classes and (domains := check_target.domains_above(paths, set(classes))):
        found.warn(
            f"target: the class folders lie one level further down, in {name_some(domains)}; "
            f"did you mean {printable(str(listing.root / domains[0]))}?"
        )
    elif classes and (text := check_target.about_folders(paths, classes)) is not None:
        found.warn(f"target: {text}")


def _about_files(listing: Listing | None, domain: _Domain, found: _Findings) -> None:
    if domain.unreadable:
        path, reason = domain.unreadable[0]
        text = f"{len(domain.unreadable)} (such as {printable(path)}: {reason})"
        found.warn(f"{domain.which}: unreadable files and folders are left out: {text}")
    if domain.empty:
        found.warn(f"{domain.which}: empty files (0 bytes) are left out: {_some(domain.empty)}")
    if listing is not None and listing.other_files:
        text = f"files without an image suffix are ignored: {listing.other_files}"
        found.note(f"{domain.which}: {text}")


# --- files of features ----------------------------------------------------------------------------


def _check_features(
    sources: Sequence[Place], target: Place, found: _Findings
) -> tuple[list[str], _Domain, _Domain]:
    if (problem := only_one_is_a_file([*sources, target])) is not None:
        found.error(problem)
    source_rows: SourceFeatures | None = None
    target_rows: TargetFeatures | None = None
    with _faults(found, "source: "):
        if all(map(is_feature_file, sources)):
            source_rows = open_source_features(sources)
    with _faults(found, "target: "):
        target_rows = open_target_features(target) if is_feature_file(target) else None
    if source_rows is not None and target_rows is not None:
        with _faults(found):
            check_comparable(source_rows, target_rows)
        with _faults(found, "target: "):
            if known_labels(target, target_rows.rows, source_rows.classes) is not None:
                found.note(f"target: every row has the label of a source class; {_MEASURED}")
    classes = [] if source_rows is None else source_rows.classes
    return classes, _rows("source", source_rows), _rows("target", target_rows)


@contextlib.contextmanager
def _faults(found: _Findings, prefix: str = "") -> Iterator[None]:
    """Turn a UserError raised inside into a finding."""
    try:
        yield
    except UserError as error:
        found.error(f"{prefix}{error}")


def _rows(which: str, features: TargetFeatures | None) -> _Domain:
    if features is None:
        return _Domain(which)
    classes: list[str | None] = []
    if isinstance(features, SourceFeatures):
        classes = [features.classes[label] for label in features.labels]
    return _Domain(which, features.paths, [row.tobytes() for row in features.hashes], classes)


# --- both -----------------------------------------------------------------------------------------


def _some(paths: list[str]) -> str:
    return f"{len(paths)} (such as {printable(paths[0])})"


def _about_counts(counts: dict[str, int], found: _Findings) -> None:
    readable = {name: count for name, count in counts.items() if count}
    if len(readable) < 2:
        text = f"{len(readable)} of {len(counts)}; adaptation needs at least two"
        found.error(f"source: classes with a readable image: {text}")
        return
    for text in about_small_classes(counts):
        found.warn(f"source: {text}")
    most, least = max(readable, key=readable.__getitem__), min(readable, key=readable.__getitem__)
    if readable[most] / readable[least] > IMBALANCE:
        found.warn(
            f"source: the classes are imbalanced: {printable(most)} has {readable[most]} images, "
            f"{printable(least)} has {readable[least]}; batches draw classes equally often, so "
            "images of small classes repeat often"
        )


def _duplicates(domain: _Domain, found: _Findings) -> list[list[str]]:
    numbers: dict[bytes, list[int]] = {}
    for i, digest in enumerate(domain.digests):
        numbers.setdefault(digest, []).append(i)
    members = [group for group in numbers.values() if len(group) > 1]
    if not members:
        return []
    groups = sorted(sorted(domain.paths[i] for i in group) for group in members)
    text = f"{sum(map(len, groups)) - len(groups)} (such as {name_some(groups[0])})"
    found.warn(f"{domain.which}: repeated content: {text}; each copy counts")
    classes = domain.classes or [None] * len(domain.paths)
    if differing := [group for group in members if len({classes[i] for i in group}) > 1]:
        text = f"{len(differing)} (such as {name_some([domain.paths[i] for i in differing[0]])})"
        found.warn(f"{domain.which}: content in more than one class: {text}; keep the right one")
    return groups


def _in_both(source: _Domain, target: _Domain, found: _Findings) -> list[tuple[str, str]]:
    in_source, in_target = _first_paths(source), _first_paths(target)
    pairs = sorted((path, in_target[key]) for key, path in in_source.items() if key in in_target)
    if pairs:
        shown = " and ".join(map(printable, pairs[0]))
        found.warn(
            f"content in both source and target: {len(pairs)} (such as {shown}); remove it from "
            "one side, or accuracy on the target will look too good"
        )
    return pairs


def _first_paths(domain: _Domain) -> dict[bytes, str]:
    """Return the first path with each content."""
    return dict(zip(reversed(domain.digests), reversed(domain.paths), strict=True))
