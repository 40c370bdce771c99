"""The benchmark suites: one entry of `SUITES` each, with its domains, tasks and protocol."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any, Literal, NamedTuple

from certvol.data.digits import digit_domains_exist, write_digit_domains
from certvol.errors import UserError
from certvol.settings import nearest

Metric = Literal["accuracy", "mean_class_accuracy"]


@dataclass(frozen=True)
class Domain:
    letter: str
    """The letter of the domain in tasks such as A-W."""
    folders: tuple[str, ...]
    """Accepted folder names, the usual one first."""
    images: int | None
    """None if only the suite's `total_images` is known."""


class OwnImages(NamedTuple):
    """Images that certvol makes; both functions take a root and names of domains' folders."""

    write: Callable[[Path, Sequence[str]], object]
    """Writes root/<folder>/<class>/*, and skips a folder that is complete."""
    exist: Callable[[Path, Sequence[str]], bool]


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
    splits: Mapping[str, str] = field(default_factory=dict)
    """Name for `--split` -> its task."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of its runs that differ from the preset's."""
    preset: str = "default"
    own_images: OwnImages | None = None
    """The functions that make the images; None if the user brings them."""

    @property
    def letters(self) -> dict[str, Domain]:
        return {domain.letter: domain for domain in self.domains}

    @property
    def folders(self) -> str:
        return ", ".join(f"{domain.folders[0]}/" for domain in self.domains)


def _all_pairs(letters: str) -> tuple[str, ...]:
    return tuple(f"{a}-{b}" for a, b in permutations(letters, 2))


OFFICE_CLASSES = tuple(
    "back_pack bike bike_helmet bookcase bottle calculator desk_chair desk_lamp "
    "desktop_computer file_cabinet headphones keyboard laptop_computer letter_tray mobile_phone "
    "monitor mouse mug paper_notebook pen phone printer projector punchers ring_binder ruler "
    "scissors speaker stapler tape_dispenser trash_can".split()
)
CALTECH_CLASSES = tuple(
    "back_pack bike calculator headphones keyboard laptop_computer monitor mouse mug "
    "projector".split()
)
CALTECH_ALIASES = {  # `-` also stands for `_`
    "backpack": "back_pack",
    "touring-bike": "bike",
    "headphone": "headphones",
    "computer-keyboard": "keyboard",
    "laptop": "laptop_computer",
    "laptop-101": "laptop_computer",
    "computer-monitor": "monitor",
    "computer-mouse": "mouse",
    "coffee-mug": "mug",
    "video-projector": "projector",
}
VISDA_CLASSES = tuple(
    "aeroplane bicycle bus car horse knife motorcycle person plant skateboard train truck".split()
)

_SUITES = (
    Suite(
        name="digits",
        summary="font-drawn and handwritten digits in eleven domains; needs no data",
        domains=(
            Domain("F", ("fonts",), 1000),
            Domain("T", ("thin",), 1000),
            Domain("B", ("bold",), 1000),
            Domain("I", ("ink",), 1000),
            Domain("R", ("real",), 1797),
            Domain("U", ("turned",), 1797),
            Domain("L", ("blurred",), 1797),
            Domain("S", ("ruled",), 1797),
            Domain("G", ("lit",), 1797),
            Domain("O", ("stained",), 1797),
            Domain("M", ("small",), 1797),
        ),
        tasks=("F-R", "T-B"),
        classes=10,
        class_names=tuple("0123456789"),
        backbone="small_cnn",
        where="certvol makes them itself",
        preset="quick",
        settings={
            "augment.flip": False,  # a mirrored digit is not that digit
            "data.image_size": 16,  # the images have 8 x 8 pixels
            "training.pretrain_steps": 200,
            "training.cycles": 12,
            "training.batch_size": 64,
        },
        own_images=OwnImages(write_digit_domains, digit_domains_exist),
    ),
    Suite(
        name="office-31",
        summary="office objects in shop pictures and from two cameras, 31 classes",
        domains=(
            Domain("A", ("amazon", "Amazon"), 2817),
            Domain("D", ("dslr", "DSLR"), 498),
            Domain("W", ("webcam", "Webcam"), 795),
        ),
        tasks=("A-W", "D-W", "W-D", "A-D", "D-A", "W-A"),
        classes=31,
        class_names=OFFICE_CLASSES,
        where="the authors' page (Saenko et al., ECCV 2010: `domain_adaptation_images`)",
    ),
    Suite(
        name="office-caltech",
        summary="the ten classes that Office-31 and Caltech-256 share",
        domains=(
            Domain("A", ("amazon", "Amazon"), 958),
            Domain("C", ("caltech", "Caltech", "caltech10", "Caltech10"), 1123),
            Domain("D", ("dslr", "DSLR"), 157),
            Domain("W", ("webcam", "Webcam"), 295),
        ),
        tasks=_all_pairs("ACDW"),
        classes=10,
        class_names=CALTECH_CLASSES,
        class_aliases=CALTECH_ALIASES,
        where="Office-31 and Caltech-256, or the page of Gong et al. (CVPR 2012: "
        "`office_caltech_10`)",
    ),
    Suite(
        name="modern-office-31",
        summary="Office-31 with a cleaned amazon and rendered images instead of dslr",
        domains=(
            Domain("A", ("amazon", "Amazon"), None),
            Domain("S", ("synthetic", "Synthetic"), None),
            Domain("W", ("webcam", "Webcam"), None),
        ),
        tasks=("A-S", "A-W", "W-A", "W-S", "S-A", "S-W"),
        classes=31,
        class_names=OFFICE_CLASSES,
        where="the repository of Adaptiope (Ringwald and Stiefelhagen, WACV 2021)",
        total_images=6712,
        archive_sha256="da02da26ec456def6af39d32c794070cb51a3b5696489172f70f69f2da2f1a63",
    ),
    Suite(
        name="adaptiope",
        summary="product pictures, photographs and renders, 123 classes",
        domains=(
            Domain("P", ("product_images", "product", "Product"), 12300),
            Domain("R", ("real_life", "real", "Real"), 12300),
            Domain("S", ("synthetic", "Synthetic"), 12300),
        ),
        tasks=("P-R", "P-S", "R-P", "R-S", "S-P", "S-R"),
        classes=123,
        where="the repository of Adaptiope (Ringwald and Stiefelhagen, WACV 2021)",
        archive_sha256="93378c8d5f89ebd7f2015d38ba8d3e48c00bae959ebeeaf822e79e6fcfc7fd67",
    ),
    Suite(
        name="visda-2017",
        summary="renders to photographs, 12 classes; --split validation or test",
        domains=(
            Domain("synthetic", ("train", "synthetic"), 152397),
            Domain("validation", ("validation", "val"), 55388),
            Domain("test", ("test",), 72372),
        ),
        tasks=("synthetic-test",),
        splits={"test": "synthetic-test", "validation": "synthetic-validation"},
        classes=12,
        class_names=VISDA_CLASSES,
        metric="mean_class_accuracy",
        backbone="resnet101",
        where="the challenge's repository (VisionLearningGroup/taskcv-2017-public); sort the test "
        "images into class folders by their image_list.txt",
        settings={"model.backbone": "resnet101.tv_in1k"},
    ),
    Suite(
        name="office-home",
        summary="household and office objects in four styles, 65 classes",
        domains=(
            Domain("A", ("Art", "art"), 2427),
            Domain("C", ("Clipart", "clipart"), 4365),
            Domain("P", ("Product", "product"), 4439),
            Domain("R", ("Real World", "Real_World", "RealWorld", "real_world", "realworld"), 4357),
        ),
        tasks=_all_pairs("ACPR"),
        classes=65,
        where="the authors' page (Venkateswara et al., CVPR 2017)",
    ),
)
SUITES = {suite.name: suite for suite in _SUITES}


def find_suite(name: str) -> Suite:
    if name not in SUITES:
        known = ", ".join(SUITES)
        raise UserError(f"unknown suite `{name}`{nearest(name, list(SUITES))} (suites: {known})")
    return SUITES[name]


def find_tasks(suite: Suite, asked: Sequence[str] | None, split: str | None) -> list[str]:
    """Return the tasks to run: those asked for, the split's, or all of the suite's."""
    if split is not None:
        known = ", ".join(suite.splits)
        if not suite.splits:
            raise UserError(f"{suite.name} has no splits; use --tasks instead of --split")
        if split not in suite.splits:
            hint = nearest(split, list(suite.splits))
            raise UserError(f"{suite.name} has no split `{split}`{hint} (splits: {known})")
        if asked is not None:
            raise UserError("give --tasks or --split, not both")
        return [suite.splits[split]]
    tasks = list(suite.tasks) if asked is None else list(dict.fromkeys(asked))
    for task in tasks:
        source, _, target = task.partition("-")
        if source == target or not {source, target} <= set(suite.letters):
            known = ", ".join(f"{d.letter} {d.folders[0]}" for d in suite.domains)
            raise UserError(
                f"{suite.name} has no task `{task}`; give SOURCE-TARGET of two domains ({known})"
            )
    return tasks


def describe(suite: Suite) -> str:
    """Describe a suite in lines of at most 80 characters."""
    published = "backbone" if suite.own_images else "published with"
    lines = [
        ("tasks", " ".join(suite.tasks)),
        *(("", f"--split {name}: {task}") for name, task in suite.splits.items()),
        ("metric", f"{suite.metric.replace('_', ' ')}; {published} {suite.backbone}"),
        ("classes", str(suite.classes)),
    ]
    for number, domain in enumerate(suite.domains):
        first, *others = domain.folders
        about = [f"{domain.images:,} images"] if domain.images is not None else []
        about += [f"or folder {' or '.join(others)}"] if others else []
        words = f" ({'; '.join(about)})" if about else ""
        lines.append(("" if number else "domains", f"{domain.letter} {first}{words}"))
    if suite.total_images is not None:
        lines.append(("", f"{suite.total_images:,} images in all"))
    lines.append(("data from", suite.where))
    if suite.archive_sha256 is not None:
        lines.append(("sha256", suite.archive_sha256))
    wrap = partial(textwrap.wrap, width=80, break_long_words=False, break_on_hyphens=False)
    text = wrap(f"{suite.name}: {suite.summary}", subsequent_indent="  ")
    for head, words in lines:
        text += wrap(words, initial_indent=f"  {head:<11}", subsequent_indent=13 * " ")
    return "\n".join(text)
