"""Several source domains: how settings name them, their images in one list, and their shares.

Each domain has class folders, or is a file of features. The classes of all are joined by name.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from certvol.data import Indices, Place
from certvol.data.folders import Listing, has_image_suffix, labels_of, name_some, printable, scan
from certvol.errors import UserError
from certvol.files import fingerprint_of
from certvol.settings import DataConfig

SEPARATOR = os.pathsep
LEAST_DOMAINS = 2
SPLITS = frozenset({"train", "training", "val", "valid", "validation", "test"})


# --- settings -------------------------------------------------------------------------------------


def places_of(config: DataConfig) -> list[str]:
    """Return the folders or files of all sources."""
    return [str(config.source), *split_places(config.more_sources)]


def split_places(more_sources: str | None) -> list[str]:
    """Return the folders or files that the setting `data.more_sources` names."""
    return more_sources.split(SEPARATOR) if more_sources else []


def with_sources(config: DataConfig, places: Sequence[Place]) -> DataConfig:
    first, *others = [os.fspath(place) for place in places]
    return replace(config, source=first, more_sources=joined(others))


def joined(places: Sequence[Place]) -> str | None:
    """Return the setting `data.more_sources` for these folders."""
    names = [os.fspath(place) for place in places]
    if bad := [name for name in names if SEPARATOR in name or not name]:
        raise UserError(
            f"one of several sources is named `{printable(bad[0])}`; rename it, because "
            f"`{SEPARATOR}` separates folders"
        )
    return SEPARATOR.join(names) or None


def find_domains(folder: Place) -> list[Path]:
    """Return the domains in a folder of domains; none if its folders are classes.

    All domains have the same two class folders or more, and no images beside them. A class folder
    may contain sub-folders too, but their names usually differ between classes. `train`, `test` and
    the like do not count.
    """
    domains = _folders_alone(Path(folder))
    found = None
    for domain in domains:
        names = {class_folder.name for class_folder in _folders_alone(domain)}
        splits = all(name.casefold() in SPLITS for name in names)
        if splits or len(names) < 2 or (found is not None and names != found):
            return []
        found = names
    return domains if len(domains) >= LEAST_DOMAINS else []


def _folders_alone(place: Path) -> list[Path]:
    """Return the folders in a folder; none if there are images too, or if it cannot be read."""
    found = []
    try:
        with os.scandir(place) as entries:
            for entry in entries:
                if entry.name.startswith((".", "__MACOSX")):
                    continue
                if entry.is_dir():
                    found.append(Path(entry.path))
                elif has_image_suffix(entry.name):
                    return []
    except OSError:
        return []
    return sorted(found)


def expand_domains(places: Sequence[Place], target: Place | None) -> tuple[list[str], list[str]]:
    """Replace folders of domains by these; return the sources and a sentence per such folder.

    The target is left out if it is one of the domains.
    """
    found: list[str] = []
    said: list[str] = []
    for place in places:
        domains = find_domains(place)
        if not domains:
            found.append(os.fspath(place))
            continue
        kept = [each for each in domains if target is None or not _same(each, target)]
        if target is not None and any(_is_inside(target, each) for each in kept):
            raise UserError(
                f"the target {printable(os.fspath(target))} lies inside one of the domains of "
                f"{printable(os.fspath(place))}; name the sources one by one"
            )
        found += [str(each) for each in kept]
        left_out = "; the target is left out" if len(kept) < len(domains) else ""
        names = name_some([each.name for each in kept])
        said.append(f"{printable(os.fspath(place))} holds source domains: {names}{left_out}")
    return found, said


# --- listings -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SourceListing:
    """The images of all sources: each source's own list, and all in one."""

    parts: list[Listing]
    listing: Listing
    """All images; paths are relative to the folder that holds all sources."""
    order_N: Indices
    """The place of each image of `listing` in the joined lists of `parts`."""

    @property
    def several(self) -> bool:
        return len(self.parts) > 1

    @property
    def part_N(self) -> Indices:
        """The number of each image's source."""
        counts = [len(part.paths) for part in self.parts]
        return np.repeat(np.arange(len(counts)), counts)[self.order_N]

    def labels(self) -> tuple[list[str], Indices]:
        """Return the names of all classes, and a label per image; -1 beside the class folders."""
        own = [labels_of(part) for part in self.parts]
        classes = sorted({name for names, _ in own for name in names})
        number = {name: i for i, name in enumerate(classes)}
        renumbered = [
            np.append([number[name] for name in names], -1)[labels_P] for names, labels_P in own
        ]
        return classes, np.concatenate(renumbered)[self.order_N]


def scan_sources(places: Sequence[Place]) -> SourceListing:
    """List the images of all sources; raise UserError if two of them share images."""
    parts = [scan(Path(place)) for place in places]
    if len(parts) == 1:
        return SourceListing(parts, parts[0], np.arange(len(parts[0].paths)))
    check_apart([part.root for part in parts])
    root = Path(os.path.commonpath([part.root for part in parts]))
    prefixed = [(part.root.relative_to(root).as_posix() + "/", part) for part in parts]
    paths = [above + path for above, part in prefixed for path in part.paths]
    order_N = np.array(sorted(range(len(paths)), key=paths.__getitem__), dtype=np.int64)
    listing = Listing(
        root=root,
        paths=[paths[i] for i in order_N],
        status_N3=np.concatenate([part.status_N3 for part in parts])[order_N],
        problems=sorted(
            (above + path, why) for above, part in prefixed for path, why in part.problems
        ),
        other_files=sum(part.other_files for part in parts),
        folders=sorted(above + folder for above, part in prefixed for folder in part.folders),
    )
    return SourceListing(parts, listing, order_N)


def check_apart(roots: Sequence[Place]) -> None:
    """Refuse sources that are the same, or lie in one another."""
    for i, one in enumerate(roots):
        for other in roots[i + 1 :]:
            if _is_inside(one, other) or _is_inside(other, one):
                raise UserError(
                    f"the sources {printable(one)} and {printable(other)} share images; "
                    "give each domain once"
                )


def mix_ups(sources: Sequence[Place], target: Place) -> list[str]:
    """Warn of images that count for both domains."""
    return list(dict.fromkeys(filter(None, (_mix_up(source, target) for source in sources))))


def _mix_up(source: Place, target: Place) -> str | None:
    if _same(source, target):
        kind = "folder" if Path(target).is_dir() else "file"
        return f"source and target are the same {kind}, so there is nothing to adapt to"
    if _is_inside(source, target) or _is_inside(target, source):
        return (
            "one of the two folders lies inside the other, so its images count for both; give each "
            "domain a folder of its own"
        )
    return None


def _same(one: Place, other: Place) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _is_inside(one: Place, other: Place) -> bool:
    """Return whether `one` is `other`, or lies in it."""
    return Path(os.path.realpath(one)).is_relative_to(os.path.realpath(other))


# --- shares ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Origins:
    """The source that each image comes from, and each source's share of the images drawn."""

    source_S: Indices
    shares_O: NDArray[np.float64]

    def split(self, images_N: Indices) -> list[Indices]:
        """Return the images of each source."""
        of_image_N = self.source_S[images_N]
        return [images_N[of_image_N == number] for number in range(len(self.shares_O))]


def with_origins(fingerprint: str, source_S: Indices) -> str:
    """Return the fingerprint of images together with the source of each."""
    return fingerprint_of(fingerprint.encode(), source_S.tobytes())


def read_shares(setting: str, source_S: Indices) -> Origins | None:
    """Return each source's share by `training.source_shares`; None if there is one source only.

    `equal`, `size`, or positive numbers separated by commas, one for each source in order.
    """
    counts_O = np.bincount(source_S)
    if setting == "equal":
        weights_O = np.ones(len(counts_O))
    elif setting == "size":
        weights_O = counts_O.astype(np.float64)
    else:
        weights_O = _numbers(setting, len(counts_O))
    return None if len(counts_O) < 2 else Origins(source_S, weights_O / weights_O.sum())


def _numbers(setting: str, sources: int) -> NDArray[np.float64]:
    try:
        found = np.array([float(word) for word in setting.split(",")])
    except ValueError:
        found = np.empty(0)
    if len(found) != sources or not (np.isfinite(found) & (found > 0)).all():
        raise UserError(
            f"`training.source_shares` should be equal, size or {sources} positive numbers, one "
            f"for each source, such as {','.join(['1'] * sources)}; found `{printable(setting)}`"
        )
    return found
