"""The benchmark suites, each with its domains, tasks and protocol, and tasks that a user names."""

import textwrap
from collections.abc import Sequence
from functools import partial

from certvol.benchmark.suite import (
    Domain,
    Suite,
    all_pairs,
    multi_source_tasks,
    partial_targets,
    partial_tasks,
)
from certvol.errors import UserError
from certvol.settings import nearest

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
VISDA_FIRST = VISDA_CLASSES[:6]
HOME_FIRST = tuple(  # of 65, by alphabet
    "Alarm_Clock Backpack Batteries Bed Bike Bottle Bucket Calculator Calendar Candles Chair "
    "Clipboards Computer Couch Curtains Desk_Lamp Drill Eraser Exit_Sign Fan File_Cabinet "
    "Flipflops Flowers Folder Fork".split()
)
PACS_CLASSES = tuple("dog elephant giraffe guitar horse house person".split())
VLCS_CLASSES = tuple("bird car chair dog person".split())

OFFICE_DOMAINS = (
    Domain("A", ("amazon", "Amazon"), 2817),
    Domain("D", ("dslr", "DSLR"), 498),
    Domain("W", ("webcam", "Webcam"), 795),
)
OFFICE_TASKS = ("A-W", "D-W", "W-D", "A-D", "D-A", "W-A")
HOME_DOMAINS = (
    Domain("A", ("Art", "art"), 2427),
    Domain("C", ("Clipart", "clipart"), 4365),
    Domain("P", ("Product", "product"), 4439),
    Domain("R", ("Real World", "Real_World", "RealWorld", "real_world", "realworld"), 4357),
)
VISDA_VALIDATION = Domain("validation", ("validation", "val"), 55388)

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
        own_images=True,
    ),
    Suite(
        name="office-31",
        summary="office objects in shop pictures and from two cameras, 31 classes",
        domains=OFFICE_DOMAINS + partial_targets(OFFICE_DOMAINS, CALTECH_CLASSES),
        tasks=OFFICE_TASKS,
        variants={
            "partial": partial_tasks(OFFICE_TASKS, CALTECH_CLASSES),
            "multi-source": multi_source_tasks("ADW"),
        },
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
        tasks=all_pairs("ACDW"),
        variants={"multi-source": multi_source_tasks("ACDW")},
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
        summary="renders to photographs, 12 classes",
        domains=(
            Domain("synthetic", ("train", "synthetic"), 152397),
            VISDA_VALIDATION,
            Domain("test", ("test",), 72372),
            *partial_targets([VISDA_VALIDATION], VISDA_FIRST),
        ),
        tasks=("synthetic-test",),
        variants={
            "test": ("synthetic-test",),
            "validation": ("synthetic-validation",),
            "partial": partial_tasks(["synthetic-validation"], VISDA_FIRST),
        },
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
        domains=HOME_DOMAINS + partial_targets(HOME_DOMAINS, HOME_FIRST),
        tasks=all_pairs("ACPR"),
        variants={
            "partial": partial_tasks(all_pairs("ACPR"), HOME_FIRST),
            "multi-source": multi_source_tasks("ACPR"),
        },
        classes=65,
        where="the authors' page (Venkateswara et al., CVPR 2017)",
    ),
    Suite(
        name="domainnet",
        summary="drawings, paintings and photographs in six domains, 345 classes",
        domains=(
            Domain("C", ("clipart",), None),
            Domain("I", ("infograph",), None),
            Domain("P", ("painting",), None),
            Domain("Q", ("quickdraw",), None),
            Domain("R", ("real",), None),
            Domain("S", ("sketch",), None),
        ),
        tasks=all_pairs("CPRS"),
        variants={"all": all_pairs("CIPQRS"), "multi-source": multi_source_tasks("CIPQRS")},
        classes=345,
        backbone="resnet101",
        where="the authors' page (Peng et al., ICCV 2019: DomainNet, cleaned version, with the "
        "lists of its files)",
        total_images=586_575,
        file_lists=("{}_train.txt", "{}_test.txt"),
        settings={"model.backbone": "resnet101.tv_in1k"},
    ),
    Suite(
        name="pacs",
        summary="photographs, paintings, cartoons and sketches, 7 classes",
        domains=(
            Domain("A", ("art_painting", "art"), 2048),
            Domain("C", ("cartoon",), 2344),
            Domain("P", ("photo",), 1670),
            Domain("S", ("sketch",), 3929),
        ),
        tasks=all_pairs("ACPS"),
        variants={"multi-source": multi_source_tasks("ACPS")},
        classes=7,
        class_names=PACS_CLASSES,
        where="the authors' page (Li et al., ICCV 2017)",
    ),
    Suite(
        name="vlcs",
        summary="photographs of four older data sets, 5 classes",
        domains=(
            Domain("C", ("Caltech101", "CALTECH"), None),
            Domain("L", ("LabelMe", "LABELME"), None),
            Domain("S", ("SUN09", "SUN"), None),
            Domain("V", ("VOC2007", "PASCAL"), None),
        ),
        tasks=all_pairs("CLSV"),
        variants={"multi-source": multi_source_tasks("CLSV")},
        classes=5,
        class_names=VLCS_CLASSES,
        where="the images of Fang et al. (ICCV 2013), sorted into class folders as DomainBed does",
    ),
)
SUITES = {suite.name: suite for suite in _SUITES}


def find_suite(name: str) -> Suite:
    if name not in SUITES:
        known = ", ".join(SUITES)
        raise UserError(f"unknown suite `{name}`{nearest(name, list(SUITES))} (suites: {known})")
    return SUITES[name]


def find_tasks(suite: Suite, asked: Sequence[str] | None, variant: str | None) -> list[str]:
    """Return the tasks to run: those asked for, the variant's, or the suite's usual ones."""
    if variant is not None:
        known = ", ".join(suite.variants)
        if not suite.variants:
            raise UserError(f"{suite.name} has no variants; use --tasks instead of --variant")
        if variant not in suite.variants:
            hint = nearest(variant, list(suite.variants))
            raise UserError(f"{suite.name} has no variant `{variant}`{hint} (variants: {known})")
        if asked is not None:
            raise UserError("give --tasks or --variant, not both")
        return list(suite.variants[variant])
    tasks = list(suite.tasks) if asked is None else list(dict.fromkeys(asked))
    for task in tasks:
        if suite.domains_of(task) is None:
            known = ", ".join(f"{d.letter} {d.folders[0]}" for d in suite.domains)
            raise UserError(
                f"{suite.name} has no task `{task}`; give SOURCE-TARGET of two domains, or "
                f"SOURCE+SOURCE-TARGET ({known})"
            )
    return tasks


def describe(suite: Suite) -> str:
    """Describe a suite in lines of at most 80 characters."""
    published = "backbone" if suite.own_images else "published with"
    lines = [
        ("tasks", " ".join(suite.tasks)),
        *(("", f"--variant {name}: {' '.join(own)}") for name, own in suite.variants.items()),
        ("metric", f"{suite.metric.replace('_', ' ')}; {published} {suite.backbone}"),
        ("classes", str(suite.classes)),
    ]
    for number, domain in enumerate(suite.domains):
        first, *others = domain.folders
        about = [f"{domain.images:,} images"] if domain.images is not None else []
        about += [f"{len(domain.classes)} classes"] if domain.classes else []
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
