"""What is in the two folders and what is wrong with them, before any training. Every file is read and decoded."""

import contextlib
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from certvol.config import DataConfig
from certvol.data.folders import (
    Listing,
    class_level,
    class_of,
    folder_labels,
    labels_of,
    name_some,
    no_images_in,
    printable,
    scan,
)
from certvol.data.reading import HASH_BYTES, read_images
from certvol.errors import UserError
from certvol.reporting import Progress

IMBALANCE = 10.0
_PROBE_SIZE = 32  # every byte of a file is decoded whatever the size asked for; a small one is the quickest


@dataclass(frozen=True)
class Finding:
    """One thing to know. An error keeps adaptation from starting."""

    level: Literal["error", "warning", "note"]
    text: str


def in_order(findings: list[Finding]) -> list[Finding]:
    """The worst first."""
    return sorted(findings, key=lambda finding: ("error", "warning", "note").index(finding.level))


@dataclass(frozen=True)
class CheckReport:
    """Counts are of readable images. Paths are relative to their folder."""

    source_counts: dict[str, int]
    """Per class; empty where the classes cannot be told."""
    target_count: int
    findings: list[Finding]
    source_unreadable: list[tuple[str, str]] = field(default_factory=list)
    """(path, reason), zero-byte files not among them."""
    target_unreadable: list[tuple[str, str]] = field(default_factory=list)
    source_empty: list[str] = field(default_factory=list)
    """Files of zero bytes."""
    target_empty: list[str] = field(default_factory=list)
    source_duplicates: list[list[str]] = field(default_factory=list)
    """Groups of files with the same bytes."""
    target_duplicates: list[list[str]] = field(default_factory=list)
    in_both: list[tuple[str, str]] = field(default_factory=list)
    """(source path, target path) of the same bytes, one pair for each such content."""

    @property
    def can_adapt(self) -> bool:
        return all(finding.level != "error" for finding in self.findings)


@dataclass(frozen=True)
class _Read:
    """A folder, listed and read. `digests` are of the readable images, whose numbers in the listing are `readable`."""

    listing: Listing
    readable: npt.NDArray[np.int64]
    digests: npt.NDArray[np.void]
    unreadable: list[tuple[str, str]]
    empty: list[str]

    @property
    def paths(self) -> list[str]:
        return [self.listing.paths[i] for i in self.readable]


def check(source: str | Path, target: str | Path, config: DataConfig, progress: Progress | None = None) -> CheckReport:
    """Reads both folders. UserError only where one does not exist; everything else is a finding."""
    findings: list[Finding] = []
    listings = [_scan(folder, which, findings) for folder, which in ((source, "source"), (target, "target"))]
    findings += _overlap_of_folders(Path(source), Path(target))
    read_source, read_target = (_read(listing, config, progress) for listing in listings)
    classes, labels = _classes(listings[0], findings)
    counts = _source_counts(read_source, classes, labels)
    source_groups, target_groups = _duplicates(read_source), _duplicates(read_target)
    in_both = _in_both(read_source, read_target)
    findings += _about_source(read_source, counts)
    findings += _about_target(read_target, classes)
    for which, read, groups in (("source", read_source, source_groups), ("target", read_target, target_groups)):
        findings += _about_files(which, read, groups)
    if classes:
        findings += _about_two_classes(source_groups, class_level(read_source.listing.paths))
    if in_both:
        findings.append(
            Finding(
                "warning",
                f"{len(in_both)} images are in both the source and the target (such as "
                f"{printable(in_both[0][0])} and {printable(in_both[0][1])}): their labels are known, so accuracy on the "
                "target will look too good; remove them from one side",
            )
        )
    return CheckReport(
        source_counts=counts,
        target_count=len(read_target.readable),
        findings=in_order(findings),
        source_unreadable=read_source.unreadable,
        target_unreadable=read_target.unreadable,
        source_empty=read_source.empty,
        target_empty=read_target.empty,
        source_duplicates=source_groups,
        target_duplicates=target_groups,
        in_both=in_both,
    )


def _scan(folder: str | Path, which: str, findings: list[Finding]) -> Listing:
    try:
        return scan(folder)
    except UserError as error:
        try:
            exists = Path(folder).exists()
        except (OSError, ValueError):
            exists = True
        if not exists:
            raise
        findings.append(Finding("error", f"{which}: {error}"))
        none = np.zeros(0, dtype=np.int64)
        return Listing(Path(folder).absolute(), [], none, none, [], 0, [])


def _overlap_of_folders(source: Path, target: Path) -> list[Finding]:
    try:
        source, target = source.resolve(), target.resolve()
    except (OSError, RuntimeError, ValueError):
        return []
    if source == target:
        return [Finding("warning", "source and target are the same folder, so there is nothing to adapt to")]
    inside = (
        ("target", "source")
        if target.is_relative_to(source)
        else ("source", "target")
        if source.is_relative_to(target)
        else None
    )
    if inside is None:
        return []
    return [
        Finding(
            "warning",
            f"the {inside[0]} folder lies inside the {inside[1]} folder, so its images count for both; "
            "give each domain a folder of its own",
        )
    ]


def _read(listing: Listing, config: DataConfig, progress: Progress | None) -> _Read:
    readable: list[int] = []
    digests = bytearray()
    unreadable: list[tuple[str, str]] = list(listing.problems)
    empty: list[str] = []
    number = 0
    if progress and listing.paths:
        progress.start(f"reading {printable(listing.root.name)}", len(listing.paths))
    try:
        with contextlib.closing(read_images(listing, _PROBE_SIZE, config)) as lots:
            for lot in lots:
                for image in lot:
                    if image.pixels is not None and image.digest is not None:
                        readable.append(number)
                        digests += image.digest
                    elif listing.sizes[number] == 0:
                        empty.append(listing.paths[number])
                    else:
                        unreadable.append((listing.paths[number], image.reason))
                    number += 1
                if progress:
                    progress.advance(len(lot))
    finally:
        if progress and listing.paths:
            progress.finish()
    return _Read(
        listing=listing,
        readable=np.array(readable, dtype=np.int64),
        digests=np.frombuffer(bytes(digests), dtype=np.dtype((np.void, HASH_BYTES))),
        unreadable=sorted(unreadable),
        empty=empty,
    )


def _classes(listing: Listing, findings: list[Finding]) -> tuple[list[str], npt.NDArray[np.int64]]:
    nothing = np.full(len(listing.paths), -1, dtype=np.int64)
    if any(finding.text.startswith("source: ") for finding in findings):
        return [], nothing
    try:
        return labels_of(listing)
    except UserError as error:
        findings.append(Finding("error", f"source: {error}"))
        return [], nothing


def _source_counts(read: _Read, classes: list[str], labels: npt.NDArray[np.int64]) -> dict[str, int]:
    of_readable = labels[read.readable]
    counts = np.bincount(of_readable[of_readable >= 0], minlength=len(classes))
    return {name: int(count) for name, count in zip(classes, counts, strict=True)}


def _duplicates(read: _Read) -> list[list[str]]:
    _, first, counts = np.unique(read.digests, return_index=True, return_counts=True)
    if len(first) == len(read.digests):
        return []
    repeated = {read.digests[i].tobytes(): [] for i in first[counts > 1]}  # type: dict[bytes, list[str]]
    for i, digest in zip(read.readable, read.digests, strict=True):
        group = repeated.get(digest.tobytes())
        if group is not None:
            group.append(read.listing.paths[i])
    return sorted(repeated.values())


def _in_both(source: _Read, target: _Read) -> list[tuple[str, str]]:
    _, in_source, in_target = np.intersect1d(source.digests, target.digests, return_indices=True)
    return sorted(
        (source.listing.paths[source.readable[i]], target.listing.paths[target.readable[j]])
        for i, j in zip(in_source, in_target, strict=True)
    )


def _about_source(read: _Read, counts: dict[str, int]) -> list[Finding]:
    if not counts:
        return []
    found: list[Finding] = []
    level = class_level(read.listing.paths)
    stray = [path for path in read.listing.paths if class_of(path, level) is None]
    if stray:
        text = f"source: {len(stray)} images lie in no class folder and are left out (such as {printable(stray[0])})"
        found.append(Finding("warning", f"{text}; move them into one"))
    bearing = {class_of(path, level) for path in read.listing.paths}
    levels_up = [folder.split("/") for folder in read.listing.folders]
    vacant = [parts[level] for parts in levels_up if len(parts) == level + 1 and parts[level] not in bearing]
    vacant = [name for name in vacant if not (level == 0 and name.casefold() == "images")]
    if vacant:
        text = f"source: {len(vacant)} folders hold no images and are no classes ({name_some(vacant)})"
        found.append(Finding("warning", f"{text}; add images or remove them"))
    found += about_counts(counts)
    found += about_names(list(counts))
    return found


def about_counts(counts: dict[str, int]) -> list[Finding]:
    found: list[Finding] = []
    gone = [name for name, count in counts.items() if count == 0]
    single = [name for name, count in counts.items() if count == 1]
    left = {name: count for name, count in counts.items() if count}
    if len(left) < 2:
        text = f"source: {len(left)} of {len(counts)} classes have a readable image; adaptation needs two or more"
        return [Finding("error", text)]
    if gone:
        text = f"source: {len(gone)} classes have no readable image and are left out ({name_some(gone)})"
        found.append(Finding("warning", text))
    if single:
        text = f"source: {len(single)} classes have one image only ({name_some(single)}); add images if you can"
        found.append(Finding("warning", text))
    most, least = max(left, key=left.__getitem__), min(left, key=left.__getitem__)
    if left[most] / left[least] > IMBALANCE:
        found.append(
            Finding(
                "warning",
                f"source: the classes are out of balance: {printable(most)} has {left[most]} images, "
                f"{printable(least)} has {left[least]}; batches are drawn balanced, so the few are seen over and over",
            )
        )
    return found


def about_names(classes: list[str]) -> list[Finding]:
    alike: dict[str, list[str]] = {}
    for name in classes:
        alike.setdefault(unicodedata.normalize("NFC", name).casefold(), []).append(name)
    return [
        Finding(
            "warning",
            f"source: {', '.join(map(repr, map(printable, names)))} are different classes whose names differ only in "
            "upper and lower case or in how an accent is written; merge the folders if they mean the same",
        )
        for names in alike.values()
        if len(names) > 1
    ]


def _about_target(read: _Read, classes: list[str]) -> list[Finding]:
    listing = read.listing
    if not listing.paths:
        return [Finding("error", f"target: {no_images_in(listing)}")] if listing.root.is_dir() else []
    if not len(read.readable):
        return [Finding("error", f"target: none of its {len(listing.paths)} image files can be read")]
    if not classes:
        return []
    if folder_labels(read.paths, classes) is not None:
        text = "target: every image lies in a folder named like a source class; accuracy is measured by them after training"
        return [Finding("note", f"{text}, which never sees them")]
    domains = _domains_above(read.paths, set(classes))
    if domains:
        return [
            Finding(
                "warning",
                f"target: the class folders lie one level further down, in {name_some(domains)}; "
                f"did you mean {printable(str(listing.root / domains[0]))}?",
            )
        ]
    return []


def _domains_above(paths: list[str], classes: set[str]) -> list[str]:
    """First-level folders that hold folders named like the source's classes; empty unless all do that hold images."""
    named: Counter[str] = Counter()
    for path in paths:
        first, *rest = path.split("/")
        if rest and rest[0].casefold() == "images":
            rest = rest[1:]
        if len(rest) < 2 or first in classes:
            return []
        named[first] += rest[0] in classes
    return sorted(named) if all(named.values()) else []


def _about_files(which: str, read: _Read, groups: list[list[str]]) -> list[Finding]:
    found: list[Finding] = []
    if read.unreadable:
        path, reason = read.unreadable[0]
        text = f"{which}: {len(read.unreadable)} files or folders cannot be read and are left out"
        found.append(Finding("warning", f"{text} (such as {printable(path)}: {reason})"))
    if read.empty:
        text = f"{which}: {len(read.empty)} files are empty (0 bytes) and are left out (such as {printable(read.empty[0])})"
        found.append(Finding("warning", text))
    if groups:
        extra = sum(len(group) - 1 for group in groups)
        shown = f"{printable(groups[0][0])} and {printable(groups[0][1])}"
        text = (
            f"{which}: {extra} files repeat the bytes of another (such as {shown}); they count as often as they occur"
        )
        found.append(Finding("warning", text))
    if read.listing.other_files:
        text = f"{which}: {read.listing.other_files} files have no image suffix and are passed over"
        found.append(Finding("note", text))
    return found


def _about_two_classes(groups: list[list[str]], level: int) -> list[Finding]:
    torn: list[tuple[str, str]] = []
    for group in groups:
        first = class_of(group[0], level)
        torn += [(group[0], path) for path in group if class_of(path, level) != first][:1]
    if not torn:
        return []
    shown = " and ".join(map(printable, torn[0]))
    text = f"source: {len(torn)} images lie in more than one class (such as {shown}), so one of their labels is wrong"
    return [Finding("warning", f"{text}; keep the right one")]
