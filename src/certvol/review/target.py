"""Read what a reviewer needs of a run's target images: their files and predictions."""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from certvol.data.decoding import HASH_BYTES, UnreadableImage, read_file
from certvol.data.feature_files import is_feature_file
from certvol.data.folders import printable, scan
from certvol.errors import UserError
from certvol.files import fingerprint_of
from certvol.nn.backbones import features_dim
from certvol.predict.forward import certainty
from certvol.predict.random_sample import GIVEN, TRAINED, RandomSample, random_sample
from certvol.predict.target_table import check_same_rows, target_values
from certvol.progress import Progress
from certvol.report.records import Images, Record, read_record
from certvol.review.sampling import Item, useful_order
from certvol.runs.environment import target_fingerprint
from certvol.runs.folder import RunFolder
from certvol.runs.given_labels import trained_on
from certvol.runs.review_labels import clean_path, row_of_path
from certvol.settings import DataConfig


@dataclass(frozen=True, eq=False)
class ReviewTarget:
    """The target images of a complete run. Labels that the target may have are never read."""

    run: RunFolder
    record: Record
    images: Images
    """The record's images, which are known to be there."""
    measure: str
    """The certainty that orders the images."""
    certainty_N: NDArray[np.float32]

    @property
    def classes(self) -> list[str]:
        return self.record.classes

    @cached_property
    def paths(self) -> list[str]:
        return [clean_path(path) for path in self.images.paths]

    @property
    def predicted_N(self) -> NDArray[np.int64]:
        return self.images.predicted_N

    @cached_property
    def row_of(self) -> dict[str, int]:
        return row_of_path(self.paths)

    @property
    def seed(self) -> int:
        seed = self.record.settings.get("training.seed")
        return seed if isinstance(seed, int) else 0

    @cached_property
    def trained(self) -> set[str]:
        """The images that the run was given labels of to train on."""
        return trained_on(self.run)

    @cached_property
    def sample(self) -> RandomSample:
        """The random images, which judge the run."""
        return random_sample(self.run, self.paths, self.certainty_N, self.seed)

    @property
    def stratum_N(self) -> NDArray[np.int64]:
        """The stratum of each image; -1 for those that the run trained on, which judge nothing."""
        return self.sample.stratum_N

    def queue(self, labels: int) -> list[Item]:
        """Return `labels` random images, then as many chosen ones; the same for every call.

        Images that the run was given answers about are not asked again.
        """
        drawn = self.sample.queue[:labels].tolist()
        known = np.flatnonzero(np.isin(self.stratum_N, (TRAINED, GIVEN))).tolist()
        measures = self.images.measures
        uncertainty_N = measures.get("entropy", -measures["probability"])
        chosen = useful_order(
            labels, uncertainty_N, self.predicted_N, self.record.features, drawn + known, self.seed
        )
        items = [Item(row, "random") for row in drawn]
        return items + [Item(row, "chosen") for row in chosen.tolist()]


def open_target(run: str | Path) -> ReviewTarget:
    """Read a complete run."""
    record = read_record(run)
    folder = RunFolder(record.path)
    folder.check_complete()
    if (images := record.images) is None:
        raise UserError(f"{printable(folder.predictions)} is missing or damaged; review needs it")
    row_of_path(images.paths)  # labels need a path of its own for each image
    measure = record.certainty
    paths, values_N = target_values(folder.path, measure, "a review")
    check_same_rows(folder.predictions, paths, images.paths)
    return ReviewTarget(folder, record, images, measure, certainty(measure, values_N))


def find_images(target: ReviewTarget, images: str | Path | None) -> list[str | None]:
    """Return the file of every image, or None if it is gone.

    Only files that listing the folder finds are used: a path in a stranger's run opens nothing.
    """
    place = Path(images) if images is not None else target.record.target
    shown = printable(str(place))
    if place is None or (images is None and is_feature_file(place)):
        raise UserError(
            f"the run was made from the features in {shown}, which hold no pictures; give the "
            "folder of the images with --images FOLDER, or use --export and --import"
        )
    if not place.is_dir():
        raise UserError(
            f"the target images are not in {shown} any more; give their folder with --images FOLDER"
        )
    listing = scan(place)
    file_of = {clean_path(path): listing.file(i).path for i, path in enumerate(listing.paths)}
    files = [file_of.get(path) for path in target.paths]
    if not any(files):
        raise UserError(
            f"{shown} holds none of the run's {len(files)} target images (such as "
            f"{printable(target.paths[0])}); give the folder that they lie in with --images FOLDER"
        )
    return files


def newer_images(target: ReviewTarget, files: Sequence[str | None]) -> list[str]:
    """Return which of these files were written after the run predicted its images."""
    predicted = target.run.predictions.stat().st_mtime
    found = []
    for file in files:
        with suppress(OSError):
            if file is not None and Path(file).stat().st_mtime > predicted:
                found.append(file)
    return found


def changed_since(target: ReviewTarget, files: Sequence[str | None]) -> bool:
    """Return whether any of these files changed after the run, even if its date is older.

    Programs can set the date that `newer_images` reads: unpacking and copying keep the old one.
    """
    predicted = target.run.predictions.stat().st_mtime
    for file in files:
        with suppress(OSError):
            if file is not None and Path(file).stat().st_ctime > predicted:
                return True
    return False


def are_of_the_run(
    target: ReviewTarget, files: Sequence[str | None], progress: Progress
) -> bool | None:
    """Return whether the files hold the images that the run predicted; None if nobody knows."""
    expected = target_fingerprint(target.run)
    settings = target.record.settings
    if expected is None or features_dim(str(settings.get("model.backbone"))) is not None:
        return None
    most = float(settings.get("data.max_megapixels", DataConfig.max_megapixels))
    digests = []
    progress.start("comparing the images with those of the run", len(files))
    try:
        for file in files:
            if file is None:
                return None
            content = read_file(Path(file), most)[0]
            digests.append(hashlib.blake2b(content, digest_size=HASH_BYTES).digest())
            progress.advance(1)
    except UnreadableImage:
        return None
    finally:
        progress.finish()
    return fingerprint_of(*sorted(digests)) == expected
