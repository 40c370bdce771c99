"""A benchmark suite: its domains, tasks and protocol, and how its tasks are written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any, Literal

Metric = Literal["accuracy", "mean_class_accuracy"]


@dataclass(frozen=True)
class Domain:
    letter: str
    """The letter of the domain in tasks such as A-W."""
    folders: tuple[str, ...]
    """Accepted folder names, the usual one first."""
    images: int | None
    """None if only the suite's `total_images` is known."""
    classes: tuple[str, ...] = ()
    """The classes of a partial target, which shares its folder with the whole domain; or empty."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    name: str
    summary: str
    domains: tuple[Domain, ...]
    tasks: tuple[str, ...]
    """The tasks in the order of the published tables."""
    classes: int
    where: str
    """The place to get the data from."""
    metric: Metric = "accuracy"
    backbone: str = "resnet50"
    """The backbone of the published results."""
    class_names: tuple[str, ...] = ()
    """Empty if unknown; all domains must then have the same class folders."""
    class_aliases: Mapping[str, str] = field(default_factory=dict)
    """Alternative folder name of a class -> its name in `class_names`."""
    archive_sha256: str | None = None
    total_images: int | None = None
    file_lists: tuple[str, ...] = ()
    """Names, with `{}` for a domain's folder, of lists of the files that count, in the root."""
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name for `--variant` -> its tasks."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of its runs that differ from the preset's."""
    preset: str = "default"
    own_images: bool = False
    """True if certvol draws the images (`data/digits.py`); else the user brings them."""

    @property
    def letters(self) -> dict[str, Domain]:
        return {domain.letter: domain for domain in self.domains}

    @property
    def folders(self) -> str:
        whole = [domain for domain in self.domains if not domain.classes]
        return ", ".join(f"{domain.folders[0]}/" for domain in whole)

    @property
    def all_tasks(self) -> list[str]:
        """The tasks of the suite and of all its variants."""
        return list(dict.fromkeys([*self.tasks, *(t for v in self.variants.values() for t in v)]))

    def domains_of(self, task: str) -> tuple[str, ...] | None:
        """Return the letters of a task's sources, then its target's; None if there is no such task.

        `A-W` has one source, `A+D-W` has two.
        """
        sources, _, target = task.partition("-")
        letters, known = (*sources.split("+"), target), self.letters
        if any(letter not in known for letter in letters):
            return None
        if any(known[letter].classes for letter in letters[:-1]):
            return None
        folders = {known[letter].folders for letter in letters}
        return letters if len(folders) == len(letters) else None

    def classes_of(self, task: str) -> tuple[str, ...]:
        """Return the names of the classes that a task's target has; empty if unknown."""
        known = self.domains_of(task)
        return (self.letters[known[-1]].classes if known else ()) or self.class_names


def all_pairs(letters: str) -> tuple[str, ...]:
    return tuple(f"{a}-{b}" for a, b in permutations(letters, 2))


def multi_source_tasks(letters: str) -> tuple[str, ...]:
    """Return a task for each domain as the target, with all others as sources."""
    return tuple(f"{'+'.join(a for a in letters if a != b)}-{b}" for b in letters)


def partial_targets(domains: Sequence[Domain], classes: Sequence[str]) -> tuple[Domain, ...]:
    """Return the domains with only some of their classes: `W10` is `W` with ten."""
    kept = tuple(classes)
    return tuple(
        replace(domain, letter=f"{domain.letter}{len(kept)}", images=None, classes=kept)
        for domain in domains
    )


def partial_tasks(tasks: Sequence[str], classes: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{task}{len(classes)}" for task in tasks)
