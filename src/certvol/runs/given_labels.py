"""The answers that a run is given: which train, which judge, and the files that keep them.

RUN/labels.csv holds the answers. Those of the kind `chosen` train, and RUN/trained.csv lists their
images. Those of the kind `random` stay out of training, so that they can judge the run's model as
they judged the one before.

RUN/drawn.csv holds how the random images were drawn. A row per image, in the order of the draw:
`path`, and the `stratum` that it was drawn from in the earlier run, with the number of `images` in
it. The last two are empty for an image that does not represent the whole target: it was drawn after
other images had trained a model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from certvol.data.folders import printable
from certvol.data.reviewed import ReviewedLabels, reviewed_labels
from certvol.data.target_prior import TargetPrior
from certvol.errors import UserError
from certvol.files import fingerprint_of
from certvol.progress import Reporter
from certvol.runs.environment import target_fingerprint
from certvol.runs.folder import RunFolder
from certvol.runs.review_labels import (
    COLUMNS,
    Review,
    clean_path,
    read_review,
    review_cells,
    row_of_path,
)
from certvol.runs.tables import csv_text, damaged, read_column, write_text
from certvol.settings import Config

Hashes = NDArray[np.uint8]
TRAINED_COLUMNS, DRAWN_COLUMNS = ("path", "image"), ("path", "stratum", "images")


class Stratum(NamedTuple):
    """A part of an earlier run's target from which random images were drawn."""

    number: int
    images: int


Drawn = dict[str, Stratum | None]


@dataclass(frozen=True, eq=False)
class GivenLabels:
    """The answers about images of the target, and those of them that train, by image number."""

    reviews: Sequence[Review]
    training: ReviewedLabels | None
    """None if no answer trains, and the run has no cycles of adaptation either."""

    @property
    def fingerprint(self) -> str:
        known = self.training
        parts = [known.images_R, known.labels_R, known.none_U] if known else []
        return fingerprint_of(*(part.tobytes() for part in parts))

    def check(self, unfit: str | None, prior: TargetPrior, classes: Sequence[str]) -> None:
        """Refuse labels that contradict the prior, or a method that is `unfit` to train on them."""
        if self.training is None:
            return
        if unfit is not None:
            raise UserError(
                f"{unfit} does not train on the target, so it has no use for reviewed labels; "
                "choose another method"
            )
        labels_R = self.training.labels_R
        if len(outside := labels_R[~prior.allowed_C[labels_R]]):
            raise UserError(
                f"a reviewed image shows `{printable(classes[outside[0]])}`, which the target "
                "prior rules out; change `data.target_classes` or `data.target_prior`"
            )

    def keep(self, run: RunFolder) -> None:
        """Write RUN/labels.csv, and RUN/review.csv, which further answers are added to."""
        for place in (run.labels, run.review):
            if run.writes and not place.exists():
                write_text(place, csv_text(COLUMNS, map(review_cells, self.reviews)))


def trains(review: Review) -> bool:
    """Return whether a run that is given this answer uses it in training."""
    return review.kind == "chosen" and review.answer != "unsure"


def keep_trained(run: RunFolder, start: str | None, paths: Sequence[str], images: Hashes) -> None:
    """Write RUN/trained.csv: the images that trained the run's model, or the one it starts from.

    A run keeps it once it has begun, so it does not need the other run to resume. `images` are the
    hashes of the target images with these paths. By them the images of the other run are found: its
    target may be another one with the same names, or the same one with new names.
    """
    if not run.writes or run.trained.exists():
        return
    trained = trained_on(run)
    if start is None and not trained:
        return
    row_of = row_of_path(paths)
    rows = {row_of[path] for path in trained if path in row_of}
    if start is not None:
        hashes = [image.tobytes().hex() for image in images]
        row_of_hash = {image: row for row, image in enumerate(hashes)}
        for path, image in _read_trained(RunFolder(start)).items():
            row = row_of.get(path)
            if image and (row is None or hashes[row] != image):
                row = row_of_hash.get(image)
            if row is not None:
                rows.add(row)
    if rows:
        cells = sorted((clean_path(paths[row]), images[row].tobytes().hex()) for row in rows)
        write_text(run.trained, csv_text(TRAINED_COLUMNS, cells))


def trained_on(run: RunFolder) -> set[str]:
    """Return the paths of the target images whose answers trained the run's model."""
    return set(_read_trained(run))


def _read_trained(run: RunFolder) -> dict[str, str]:
    """Return the hash of each image by its path; an empty one if it is not known."""
    found: dict[str, str] = {}
    if run.labels.exists():
        found = {each.path: "" for each in read_review(run.labels) if trains(each)}
    if run.trained.exists():
        paths, images = (read_column(run.trained, name) for name in TRAINED_COLUMNS)
        found |= zip(map(clean_path, paths), images, strict=True)
    return found


def check_same_target(labels: str, fingerprint: str) -> None:
    """Refuse a run's labels if it was made from other images, which may have the same names."""
    run = RunFolder(Path(labels).resolve().parent)
    if run.holds_a_run and target_fingerprint(run) not in (None, fingerprint):
        raise UserError(
            f"the labels in {printable(labels)} are about other images: the target of "
            f"{printable(run.path)} is another one, or some of its images changed. Give the "
            "labels of this target, or add --accept-changes to match them by path"
        )


def read_given(
    run: RunFolder,
    config: Config,
    classes: Sequence[str],
    paths: Sequence[str],
    reporter: Reporter,
) -> GivenLabels | None:
    """Read the labels of `data.target_labels`, or those that a resumed run has kept.

    `paths` are those of the target images. None without the setting.
    """
    data = config.data
    if data.target_labels is None:
        return None
    place = run.labels if run.labels.exists() else Path(data.target_labels)
    shown = printable(place)
    owner = RunFolder(place.resolve().parent)
    reviews = read_review(place, classes, owner.holds_a_run and place.resolve() == owner.review)
    image_of = row_of_path(paths)
    found = [each for each in reviews if each.path in image_of]
    if len(found) < len(reviews):
        lost = next(each.path for each in reviews if each.path not in image_of)
        text = (
            f"{len(reviews) - len(found)} of the {len(reviews)} images in {shown} are not among "
            f"the target images, such as {printable(lost)}"
        )
        if not found:
            raise UserError(f"{text}; give the labels of this target")
        reporter.warn(text)
    if data.label_kinds == "all":
        found = [
            each if each.answer == "unsure" else replace(each, kind="chosen") for each in found
        ]
    training = _training(found, image_of, classes)
    if training is None and config.training.cycles > 0:
        raise UserError(_nothing_trains(found, shown))
    return GivenLabels(found, training)


def _training(
    reviews: Sequence[Review], image_of: dict[str, int], classes: Sequence[str]
) -> ReviewedLabels | None:
    known_N: NDArray[np.int64] = np.full(len(image_of), -1, np.int64)
    number = {name: label for label, name in enumerate(classes)}
    for each in filter(trains, reviews):
        if each.label is not None:
            known_N[image_of[each.path]] = number[each.label]
    none = [image_of[each.path] for each in filter(trains, reviews) if each.label is None]
    return reviewed_labels(known_N, np.array(none, dtype=np.int64))


def _nothing_trains(reviews: Sequence[Review], shown: str) -> str:
    random = sum(each.kind == "random" and each.answer == "class" for each in reviews)
    if random == 0:
        return f"{shown} holds no label to train on; label images with `certvol review RUN`"
    return (
        f"all labels in {shown} ({random}) are of random images, which only measure accuracy. "
        "Label chosen images too, or train on all with `--data.label_kinds all`, or only calibrate "
        "with `--training.cycles 0`"
    )


def reviewed_run(config: Config) -> RunFolder | None:
    """Return the run whose images a person labelled: the one of the labels, or of the start."""
    labels, start = config.data.target_labels, config.model.start
    owner = Path(labels).resolve().parent if labels else None
    for place in (owner, Path(start) if start else None):
        if place is not None and RunFolder(place).holds_a_run and RunFolder(place).finished:
            return RunFolder(place)
    return None


def keep_drawn(run: RunFolder, drawn: Mapping[str, Stratum | None]) -> None:
    if not run.writes or run.drawn.exists() or not drawn:
        return
    rows = [
        (path, *(("", "") if stratum is None else map(str, stratum)))
        for path, stratum in drawn.items()
    ]
    write_text(run.drawn, csv_text(DRAWN_COLUMNS, rows))


def read_drawn(run: RunFolder, images: int) -> Drawn:
    """Return the draw of each given random image, in order; of a run without the file, one stratum.

    `images` is the size of the target.
    """
    reviews = read_review(run.labels) if run.labels.exists() else []
    trained = trained_on(run)
    given = [each for each in reviews if each.kind == "random" and each.path not in trained]
    if all(each.answer == "unsure" for each in given):
        return {}
    if not run.drawn.exists():
        return {each.path: Stratum(0, images) for each in given}
    columns = [read_column(run.drawn, name) for name in DRAWN_COLUMNS]
    try:
        found: Drawn = {
            clean_path(path): Stratum(int(number), int(size)) if number else None
            for path, number, size in zip(*columns, strict=True)
        }
    except ValueError as error:
        raise damaged(run.drawn, error) from None
    paths = {each.path for each in given}
    return {path: stratum for path, stratum in found.items() if path in paths}
