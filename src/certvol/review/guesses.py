"""Predict the images to label with both models, once, and keep the result in the run.

RUN/review.safetensors holds `rows` of predictions.csv, the delivered model's `probabilities` of
each, and the class that the model `before` adaptation predicts.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import get_args

import numpy as np
import torch
from numpy.typing import NDArray

from certvol.data import Indices
from certvol.data.decoding import UnreadableImage
from certvol.data.feature_files import is_feature_file, open_target_features
from certvol.errors import UserError
from certvol.predict.model import Model, Which, load
from certvol.progress import Progress
from certvol.review.target import ReviewTarget
from certvol.runs.checkpoint import DAMAGE, load_tensors, write_tensors
from certvol.runs.review_labels import clean_path

CHUNK = 32
LIKELIEST = 5


@dataclass(frozen=True, eq=False)
class Guesses:
    """Guesses for R images."""

    rows_R: Indices
    probabilities_RC: NDArray[np.float32]
    before_R: Indices

    def likeliest(self, target: ReviewTarget) -> dict[int, list[int]]:
        """Return the five likeliest classes of each row, the predicted one first."""
        order_RC = np.argsort(-self.probabilities_RC, axis=1, kind="stable")
        found = {}
        for row, order_C in zip(self.rows_R.tolist(), order_RC.tolist(), strict=True):
            first = int(target.predicted_N[row])
            found[row] = [first, *(label for label in order_C if label != first)][:LIKELIEST]
        return found

    def before_N(self, target: ReviewTarget) -> Indices:
        """Return the class predicted before adaptation per target image, -1 where not known."""
        before_N = np.full(len(target.paths), -1, np.int64)
        before_N[self.rows_R] = self.before_R
        return before_N


def no_guesses(target: ReviewTarget) -> Guesses:
    rows = np.empty(0, np.int64)
    return Guesses(rows, np.empty((0, len(target.classes)), np.float32), rows)


def stored_guesses(target: ReviewTarget) -> Guesses:
    """Read the run's guesses; none if the file is missing, damaged or from another run."""
    try:
        found = load_tensors(target.run.guesses)
        rows_R, before_R = (found[name].numpy().astype(np.int64) for name in ("rows", "before"))
        probabilities_RC = found["probabilities"].numpy().astype(np.float32)
        sizes = (len(rows_R), len(target.classes))
        if probabilities_RC.shape != sizes or before_R.shape != rows_R.shape:
            raise ValueError("its shapes do not fit")
        if not np.isin(rows_R, np.arange(len(target.paths))).all():
            raise ValueError("its rows are not those of the run")
        return Guesses(rows_R, probabilities_RC, before_R.clip(-1, len(target.classes) - 1))
    except DAMAGE:
        return no_guesses(target)


def make_guesses(
    target: ReviewTarget,
    rows: Sequence[int],
    files: Sequence[str | None],
    device: str,
    progress: Progress,
) -> Guesses:
    """Predict these rows with both models; only those that the run does not hold are computed."""
    stored = stored_guesses(target)
    new = sorted(set(rows) - set(stored.rows_R.tolist()))
    if not new:
        return stored
    progress.start("looking at the images", 2 * len(new))
    by_model: dict[Which, NDArray[np.float32]] = {}
    for which in get_args(Which):
        model = load(target.run.path, device, which)
        if model.classes != target.classes:
            raise UserError(f"the weights of {target.run.path} have other classes than its tables")
        by_model[which] = _probabilities(model, target, new, files, progress)
    progress.finish()
    is_read_R = by_model["pretrained"].any(axis=1)  # the others may be found again later
    found = Guesses(
        np.concatenate([stored.rows_R, np.array(new, dtype=np.int64)[is_read_R]]),
        np.concatenate([stored.probabilities_RC, by_model["delivered"][is_read_R]]),
        np.concatenate([stored.before_R, by_model["pretrained"][is_read_R].argmax(axis=1)]),
    )
    tensors = {
        "rows": torch.from_numpy(found.rows_R),
        "probabilities": torch.from_numpy(found.probabilities_RC),
        "before": torch.from_numpy(found.before_R),
    }
    write_tensors(target.run.guesses, tensors)
    return found


def _probabilities(
    model: Model,
    target: ReviewTarget,
    rows: Sequence[int],
    files: Sequence[str | None],
    progress: Progress,
) -> NDArray[np.float32]:
    """Return R x C probabilities; zeros for an image that cannot be read."""
    found_RC = np.zeros((len(rows), len(model.classes)), np.float32)
    place = target.record.target
    if place is not None and is_feature_file(place) and place.exists():
        features = open_target_features(place)
        row_of = {clean_path(path): i for i, path in enumerate(features.paths)}
        known = [i for i, row in enumerate(rows) if target.paths[row] in row_of]
        picked = features.rows[[row_of[target.paths[rows[i]]] for i in known]]
        if known:
            found_RC[known] = model.predict(features.features[picked, 0]).probabilities
        progress.advance(len(rows))
        return found_RC
    for start in range(0, len(rows), CHUNK):
        chunk, pixels = range(start, min(start + CHUNK, len(rows))), {}
        for i in chunk:
            with suppress(UnreadableImage):
                if (file := files[rows[i]]) is not None:
                    pixels[i] = model.read_pixels(file)
        if pixels:
            given = np.stack(list(pixels.values()))
            found_RC[list(pixels)] = model.predict(given).probabilities
        progress.advance(len(chunk))
    return found_RC
