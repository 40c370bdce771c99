"""Tasks of the robustness benchmark, and the conditions that make a target difficult.

A condition chooses rows of a source and a target by their labels. Features are written to `.npz`
files, images linked into folders.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from certvol.benchmark.suite_data import locate, prepare
from certvol.benchmark.suites import find_suite
from certvol.data.folders import class_level, class_of, scan

Labels = NDArray[np.str_]
Rows = NDArray[np.int64]

DIGIT_TASKS = ("F-R", "F-T", "F-S", "F-L", "F-O", "B-R", "B-T", "T-B", "T-G")
OFFICE_31 = {"A": "amazon", "D": "dslr", "W": "webcam"}
OFFICE_CALTECH = {"A": "oc_amazon", "C": "caltech", "D": "oc_dslr", "W": "oc_webcam"}

TAIL = 100  # images of the most frequent class for one of the rarest
UNKNOWN_SHARE = 0.3
FEW_SOURCE, FEW_TARGET = 5, 3
MOST_PIXELS = 600  # images of a domain whose grey values are features


@dataclass(frozen=True)
class Part:
    """The rows of a task that a condition keeps."""

    source: Rows
    target: Rows
    scored: Rows
    """The target rows that accuracy is measured on: all but those of unknown classes."""


def full(source: Labels, target: Labels, rng: np.random.Generator) -> Part:
    everything = np.arange(len(target))
    return Part(np.arange(len(source)), everything, everything)


def partial(source: Labels, target: Labels, rng: np.random.Generator) -> Part:
    """Keep the first third of the classes in the target."""
    classes = np.unique(source)
    return _with_target(source, np.flatnonzero(np.isin(target, classes[: len(classes) // 3])))


def one_class(source: Labels, target: Labels, rng: np.random.Generator) -> Part:
    """Keep one class, a different one for each seed."""
    return _with_target(source, np.flatnonzero(target == rng.choice(np.unique(target))))


def long_tailed(source: Labels, target: Labels, rng: np.random.Generator) -> Part:
    """Thin the classes out by a geometric series from 1 to 1/100, at least to one image each."""
    classes = np.unique(target)
    shares = TAIL ** -(np.arange(len(classes)) / max(1, len(classes) - 1))
    kept = [
        _some(np.flatnonzero(target == name), max(1, round(share * (target == name).sum())), rng)
        for name, share in zip(classes, shares, strict=True)
    ]
    return _with_target(source, np.sort(np.concatenate(kept)))


def unknown(source: Labels, target: Labels, rng: np.random.Generator) -> Part:
    """Remove the last 30 % of the classes from the source, and let them be 30 % of the target."""
    classes = np.unique(source)
    known = classes[: len(classes) - round(UNKNOWN_SHARE * len(classes))]
    is_known = np.isin(target, known)
    most = round(UNKNOWN_SHARE / (1 - UNKNOWN_SHARE) * is_known.sum())
    others = _some(np.flatnonzero(~is_known), most, rng)
    scored = np.flatnonzero(is_known)
    rows = np.sort(np.concatenate([scored, others]))
    return Part(np.flatnonzero(np.isin(source, known)), rows, scored)


def few_source(source: Labels, target: Labels, rng: np.random.Generator) -> Part:
    everything = np.arange(len(target))
    return Part(_per_class(source, FEW_SOURCE, rng), everything, everything)


def few_target(source: Labels, target: Labels, rng: np.random.Generator) -> Part:
    return _with_target(source, _per_class(target, FEW_TARGET, rng))


CONDITIONS: dict[str, Callable[[Labels, Labels, np.random.Generator], Part]] = {
    "full": full,
    "partial": partial,
    "one-class": one_class,
    "long-tailed": long_tailed,
    "unknown": unknown,
    "few-source": few_source,
    "few-target": few_target,
}


def _with_target(source: Labels, target: Rows) -> Part:
    return Part(np.arange(len(source)), target, target)


def _some(rows: Rows, count: int, rng: np.random.Generator) -> Rows:
    return rng.permutation(rows)[:count]


def _per_class(labels: Labels, count: int, rng: np.random.Generator) -> Rows:
    kept = [_some(np.flatnonzero(labels == name), count, rng) for name in np.unique(labels)]
    return np.sort(np.concatenate(kept))


@dataclass(frozen=True)
class Domain:
    """A folder of images in class folders, or a file of features with labels."""

    place: Path

    def labels(self) -> Labels:
        if self.place.suffix == ".npz":
            with np.load(self.place, allow_pickle=False) as file:
                return np.asarray(file["labels"]).astype(np.str_)
        paths = scan(self.place).paths
        level = class_level(paths)
        return np.array([class_of(path, level) for path in paths], dtype=np.str_)

    def truth(self, rows: Rows) -> dict[str, str]:
        """Return the class of some images by their path."""
        if self.place.suffix == ".npz":
            with np.load(self.place, allow_pickle=False) as file:
                paths = [str(path) for path in file["paths"]]
        else:
            paths = scan(self.place).paths
        labels = self.labels()
        return {paths[row]: str(labels[row]) for row in rows}

    def write(self, rows: Rows, out: Path) -> Path:
        """Write some rows to `out`, as a file with that name and `.npz` or as a folder of links."""
        if self.place.suffix == ".npz":
            with np.load(self.place, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            chosen = {
                name: array if name == "about" else array[rows] for name, array in arrays.items()
            }
            out = out.with_suffix(".npz")
            np.savez(out, **chosen)
            return out
        paths = scan(self.place).paths
        for row in rows:
            link = out / paths[row]
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to((self.place / paths[row]).resolve())
        return out


@dataclass(frozen=True)
class Task:
    data: str
    """`digits`, or suite and backbone as in `office-31-inc`."""
    name: str
    source: Domain
    target: Domain

    def part(self, condition: str, seed: int) -> Part:
        rng = np.random.default_rng([seed, *condition.encode()])
        return CONDITIONS[condition](self.source.labels(), self.target.labels(), rng)


def digit_tasks(work: Path) -> list[Task]:
    suite = find_suite("digits")
    folders = prepare(suite, locate(suite, None, list(DIGIT_TASKS), work / "digits"), work)
    return [
        Task("digits", name, *(Domain(folders[letter]) for letter in name.split("-")))
        for name in DIGIT_TASKS
    ]


def pixel_tasks(digits: Sequence[Task], work: Path) -> list[Task]:
    """Return the tasks on digits with features of their own: 16 x 16 grey values.

    A head on them is far from perfect, and trains in a second.
    """
    places: dict[Path, Path] = {}
    for domain in dict.fromkeys(d for task in digits for d in (task.source, task.target)):
        listing = scan(domain.place)
        chosen = np.random.default_rng(0).permutation(len(listing.paths))[:MOST_PIXELS]
        grey = [
            np.asarray(Image.open(listing.file(i).path).convert("L").resize((16, 16)), np.float32)
            for i in chosen
        ]
        places[domain.place] = out = work / f"pixels_{domain.place.name}.npz"
        np.savez(
            out,
            features=np.stack(grey).reshape(len(grey), -1) / 255,
            labels=domain.labels()[chosen],
            paths=np.array([listing.paths[i] for i in chosen]),
        )
    return [
        replace(
            task,
            data="pixels",
            source=Domain(places[task.source.place]),
            target=Domain(places[task.target.place]),
        )
        for task in digits
    ]


def feature_tasks(folder: Path) -> list[Task]:
    """Return the tasks whose two files are there, for every backbone."""
    tasks = []
    backbones = sorted({path.name.partition("_")[0] for path in folder.glob("*_*.npz")})
    for backbone in backbones:
        for suite, domains in (("office-31", OFFICE_31), ("office-caltech", OFFICE_CALTECH)):
            places = {
                letter: place
                for letter, name in domains.items()
                if (place := folder / f"{backbone}_{name}.npz").exists()
            }
            tasks += [
                Task(f"{suite}-{backbone}", f"{a}-{b}", Domain(places[a]), Domain(places[b]))
                for a in places
                for b in places
                if a != b
            ]
    return tasks
