"""The benchmarks there are: their domains, tasks and protocol, and whether a folder holds them."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any, Literal

from certvol.config import nearest
from certvol.data.digit_domains import are_whole, write_digit_domains
from certvol.data.folders import class_level, class_of, name_some, printable, scan
from certvol.errors import UserError

Metric = Literal["accuracy", "mean_class_accuracy"]


@dataclass(frozen=True)
class Domain:
    letter: str
    """Its name in tasks, such as A-W."""
    folders: tuple[str, ...]
    """Its folder's names in use, the usual one first."""
    images: int | None
    """None where only the sum over domains is known, `total_images` of the suite."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    name: str
    summary: str
    domains: tuple[Domain, ...]
    tasks: tuple[str, ...]
    """In the order of the published tables."""
    classes: int
    metric: Metric
    backbone: str
    """Of the published rows."""
    where: str
    """Whence a user gets the data."""
    class_names: tuple[str, ...] = ()
    """Empty where they are not known here: all domains must then have the same ones."""
    class_aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of classes in use -> the name in `class_names`."""
    archive_sha256: str | None = None
    total_images: int | None = None
    """Of all domains together, where those of each are not known."""
    splits: Mapping[str, str] = field(default_factory=dict)
    """Name of a split -> its task, where the suite has several targets and one is meant."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of its runs, where they are not the preset's."""
    preset: str = "default"
    embedded: bool = False
    """Its images are made by certvol itself."""

    @property
    def letters(self) -> dict[str, Domain]:
        return {domain.letter: domain for domain in self.domains}


@dataclass(frozen=True)
class Located:
    """A domain's folder, as it is found."""

    folder: Path
    classes: Mapping[str, str] = field(default_factory=dict)
    """The suite's name of each class -> its folder, relative to the domain's."""

    def given_as(self, work: Path) -> Path:
        """What runs get: the folder, or one of links in `work` to its classes under the suite's names, which accuracy is measured
        by."""
        renamed = any(Path(place).name != name for name, place in self.classes.items())
        return work / self.folder.name if renamed else self.folder

    def origin(self, work: Path) -> Path:
        """Where the images lie, whatever links lead there."""
        if self.given_as(work) == self.folder:
            return self.folder.resolve()
        return (self.folder / next(iter(self.classes.values()))).parent.resolve()


def _all_pairs(letters: str) -> tuple[str, ...]:
    return tuple(f"{a}-{b}" for a, b in permutations(letters, 2))


OFFICE_CLASSES = tuple(
    "back_pack bike bike_helmet bookcase bottle calculator desk_chair desk_lamp desktop_computer file_cabinet headphones "
    "keyboard laptop_computer letter_tray mobile_phone monitor mouse mug paper_notebook pen phone printer projector punchers "
    "ring_binder ruler scissors speaker stapler tape_dispenser trash_can".split()
)
CALTECH_CLASSES = tuple(
    "back_pack bike calculator headphones keyboard laptop_computer monitor mouse mug projector".split()
)
CALTECH_ALIASES = {
    "backpack": "back_pack",
    "touring-bike": "bike",
    "headphone": "headphones",
    "computer-keyboard": "keyboard",
    "computer_keyboard": "keyboard",
    "laptop": "laptop_computer",
    "laptop-101": "laptop_computer",
    "computer-monitor": "monitor",
    "computer_monitor": "monitor",
    "computer-mouse": "mouse",
    "computer_mouse": "mouse",
    "coffee-mug": "mug",
    "coffee_mug": "mug",
    "video-projector": "projector",
    "video_projector": "projector",
}
VISDA_CLASSES = tuple("aeroplane bicycle bus car horse knife motorcycle person plant skateboard train truck".split())

SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            name="digits",
            summary="digits from fonts and handwritten ones, eleven domains made of them; embedded",
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
            metric="accuracy",
            backbone="small_cnn",
            where="certvol makes them itself",
            preset="quick",
            settings={
                "augment.flip": False,  # a mirrored digit is another digit, or none
                "data.image_size": 16,  # the images have 8 x 8 pixels
                "training.pretrain_steps": 200,
                "training.cycles": 12,
                "training.batch_size": 64,
            },
            embedded=True,
        ),
        Suite(
            name="office-31",
            summary="office things in shop pictures and two cameras, 31 classes",
            domains=(
                Domain("A", ("amazon", "Amazon"), 2817),
                Domain("D", ("dslr", "DSLR"), 498),
                Domain("W", ("webcam", "Webcam"), 795),
            ),
            tasks=("A-W", "D-W", "W-D", "A-D", "D-A", "W-A"),
            classes=31,
            class_names=OFFICE_CLASSES,
            metric="accuracy",
            backbone="resnet50",
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
            metric="accuracy",
            backbone="resnet50",
            where="Office-31 and Caltech-256, or the page of Gong et al. (CVPR 2012: `office_caltech_10`)",
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
            metric="accuracy",
            backbone="resnet50",
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
            metric="accuracy",
            backbone="resnet50",
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
            where="the repository of the challenge (VisionLearningGroup/taskcv-2017-public); sort the test images into "
            "class folders by their image_list.txt",
            settings={"model.backbone": "resnet101.tv_in1k"},
        ),
        Suite(
            name="office-home",
            summary="things of the household and office in four styles, 65 classes",
            domains=(
                Domain("A", ("Art", "art"), 2427),
                Domain("C", ("Clipart", "clipart"), 4365),
                Domain("P", ("Product", "product"), 4439),
                Domain("R", ("Real World", "Real_World", "RealWorld", "real_world", "realworld"), 4357),
            ),
            tasks=_all_pairs("ACPR"),
            classes=65,
            metric="accuracy",
            backbone="resnet50",
            where="the authors' page (Venkateswara et al., CVPR 2017)",
        ),
    )
}


def find_suite(name: str) -> Suite:
    if name not in SUITES:
        raise UserError(f"there is no suite `{name}`{nearest(name, list(SUITES))} (suites: {', '.join(SUITES)})")
    return SUITES[name]


def find_tasks(suite: Suite, asked: Sequence[str] | None, split: str | None) -> list[str]:
    """The tasks to run: those asked for, that of the split, or all of the suite's."""
    if split is not None:
        if not suite.splits:
            raise UserError(f"--split is for suites with several targets, which {suite.name} is not; use --tasks")
        if split not in suite.splits:
            raise UserError(
                f"{suite.name} has no split `{split}`{nearest(split, list(suite.splits))} (splits: {', '.join(suite.splits)})"
            )
        if asked is not None:
            raise UserError("give --tasks or --split, not both")
        return [suite.splits[split]]
    tasks = list(dict.fromkeys(asked)) if asked is not None else list(suite.tasks)
    if not tasks:
        raise UserError("--tasks names no task; leave it out for all of the suite's")
    for task in tasks:
        source, dash, target = task.partition("-")
        if not dash or source == target or not {source, target} <= set(suite.letters):
            known = ", ".join(f"{d.letter} {d.folders[0]}" for d in suite.domains)
            raise UserError(
                f"{suite.name} has no task `{task}`: a task is SOURCE-TARGET of two of its domains ({known})"
            )
    return tasks


def locate(suite: Suite, root: Path | None, tasks: Sequence[str], work: Path) -> dict[str, Located]:
    """Each domain that the tasks need, by its letter; UserError with all that is missing or too much. Nothing is written.

    `work`: where embedded images will be written, and links where class folders go by other names than the suite's.
    """
    letters = [letter for letter in suite.letters if any(letter in task.split("-") for task in tasks)]
    if suite.embedded:
        own = {letter: suite.letters[letter].folders[0] for letter in letters}
        # Nothing is written into a root of the user's: it is for digits that were made before.
        place = root if root is not None and are_whole(root, list(own.values())) else work
        return {letter: Located(place / name) for letter, name in own.items()}
    if root is None:
        raise UserError(
            f"{suite.name} needs --data ROOT, the folder that holds {_folders(suite)}; get it from {suite.where}"
        )
    if not root.is_dir():
        raise UserError(f"there is no folder {printable(str(root))}; {suite.name} is to be had from {suite.where}")
    present = {entry.name: entry for entry in sorted(root.iterdir()) if entry.is_dir()}
    faults: list[str] = []
    found: dict[str, Located] = {}
    for letter in letters:
        domain = suite.letters[letter]
        names = [name for name in domain.folders if name in present]
        if not names:
            faults.append(f"the domain {domain.folders[0]} is missing (folder {' or '.join(domain.folders)})")
            continue
        if len(names) > 1:
            faults.append(f"the domain {domain.folders[0]} is there {len(names)} times ({', '.join(names)})")
        folders = _class_folders(suite, present[names[0]])
        found[letter] = Located(present[names[0]], {name: places[0] for name, places in folders.items()})
        faults += _class_faults(suite, names[0], folders)
    if not faults and not suite.class_names:
        faults = _unlike_classes({domain.folder.name: set(domain.classes) for domain in found.values()})
    if faults:
        known = {name for domain in suite.domains for name in domain.folders}
        extra = [name for name in present if name not in known and not name.startswith(".")]
        if extra:
            faults.append(f"other folders there: {name_some(extra)}")
        raise UserError(
            f"{printable(str(root))} does not hold {suite.name}: {'; '.join(faults)}. Expected is {_folders(suite)}, each with "
            f"{suite.classes} class folders; get it from {suite.where}"
        )
    return found


def usual_folders(suite: Suite, root: Path | None) -> dict[str, Path]:
    """Of every domain, by its letter, the folder below `root` that goes by its name, whether or not it is there."""
    if root is None:
        return {}
    found = {}
    for letter, domain in suite.letters.items():
        places = [root / name for name in domain.folders]
        found[letter] = next((place for place in places if place.is_dir()), places[0])
    return found


def prepare(suite: Suite, located: Mapping[str, Located], work: Path) -> None:
    """Writes embedded images, and links to classes that go by other names."""
    if suite.embedded:
        folders = [domain.folder for domain in located.values()]
        write_digit_domains(folders[0].parent, [folder.name for folder in folders])
    for domain in located.values():
        if (view := domain.given_as(work)) != domain.folder:
            _link(domain, view)


def origin_of(path: Path, work: Path) -> Path:
    """Where the images of a run lie that was given `path`: for a folder of links in `work`, where they lead."""
    if not path.exists() and path.parent.name == work.name and (work / path.name).is_dir():
        path = work / path.name  # the benchmark's folder was moved, and its links with it
    if path.parent.resolve() != work.resolve() or not path.is_dir():
        return path.resolve()
    links = sorted(entry for entry in path.iterdir() if entry.is_symlink())
    return links[0].readlink().parent.resolve() if links else path.resolve()


def count_remarks(suite: Suite, folders: Mapping[str, Path]) -> list[str]:
    """In words, each domain, or all together, that have not the number of images of the published protocol."""
    counts = {letter: len(scan(folder).paths) for letter, folder in folders.items()}
    remarks = []
    for letter, folder in folders.items():
        expected, found = suite.letters[letter].images, counts[letter]
        if expected is not None and found != expected:
            remarks.append(f"{folder.name} holds {found:,} images, the published {suite.name} {expected:,}")
    total = sum(counts.values())
    if suite.total_images is not None and set(counts) == set(suite.letters) and total != suite.total_images:
        names = ", ".join(folder.name for folder in folders.values())
        remarks.append(f"{names} together hold {total:,} images, the published {suite.name} {suite.total_images:,}")
    return remarks


def describe(suite: Suite) -> str:
    """All that is known of it, in lines of at most 80 characters."""
    backbone = f"backbone {suite.backbone}" if suite.embedded else f"published with {suite.backbone}"
    lines = [
        ("tasks", " ".join(suite.tasks)),
        *(("", f"--split {name}: {task}") for name, task in suite.splits.items()),
        ("measured", f"{suite.metric.replace('_', ' ')}, {suite.classes} classes; {backbone}"),
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
    wrapped = partial(textwrap.wrap, width=80, break_long_words=False, break_on_hyphens=False)
    text = wrapped(f"{suite.name}: {suite.summary}", subsequent_indent="  ")
    text += [
        line
        for head, words in lines
        for line in wrapped(words, initial_indent=f"  {head:<11}", subsequent_indent=13 * " ")
    ]
    return "\n".join(text)


def _folders(suite: Suite) -> str:
    return ", ".join(f"{domain.folders[0]}/" for domain in suite.domains)


def _class_folders(suite: Suite, folder: Path) -> dict[str, list[str]]:
    """The suite's name of each class that has images -> its folders, relative to the domain's."""
    paths = scan(folder).paths
    level = class_level(paths)
    above = f"{paths[0].partition('/')[0]}/" if level else ""
    names = {name for path in paths if (name := class_of(path, level)) is not None}
    folders: dict[str, list[str]] = {}
    for name in sorted(names):
        folders.setdefault(suite.class_aliases.get(name, name), []).append(above + name)
    return folders


def _class_faults(suite: Suite, domain: str, found: Mapping[str, Sequence[str]]) -> list[str]:
    if not suite.class_names:
        wrong = len(found) != suite.classes
        return [f"{domain} has {len(found)} classes with images, not {suite.classes}"] if wrong else []
    several = [
        f"{domain} has {len(places)} folders of the class {name}: {name_some(places)}; join them"
        for name, places in found.items()
        if len(places) > 1
    ]
    missing = [name for name in suite.class_names if name not in found]
    extra = [name for name in found if name not in suite.class_names]
    faults = [f"{domain} lacks {name_some(missing)}"] if missing else []
    return several + faults + ([f"{domain} has classes too many: {name_some(extra)}"] if extra else [])


def _unlike_classes(classes: Mapping[str, set[str]]) -> list[str]:
    anywhere = set().union(*classes.values())
    return [
        f"{domain} lacks {name_some(sorted(anywhere - names))}, which other domains have"
        for domain, names in classes.items()
        if names != anywhere
    ]


def _link(domain: Located, view: Path) -> None:
    view.mkdir(parents=True, exist_ok=True)
    for name, place in domain.classes.items():
        link, aim = view / name, (domain.folder / place).absolute()
        if link.is_symlink() and link.readlink() != aim:
            link.unlink()
        if not link.is_symlink():
            link.symlink_to(aim, target_is_directory=True)
