"""Draw the random target images by which a run is judged, and weigh the answers about them.

They are drawn from strata of equal size by certainty, so that any first part of the order
represents the target. The order never depends on the answers.

A run that continues from another one gets answers about the random images of the first (D), and
trains on chosen images (C). Two things can be estimated honestly, N being all images:

- While only D judges, the accuracy on new images like the target's. D was drawn from all N, so it
  is weighted by the strata of that draw. It does not represent N without C, because the chosen
  images were mostly difficult.
- With new answers, the accuracy on N without C. Each image of D stands for itself. The new random
  images stand for the rest, R, which is drawn from in strata by the present certainty.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from certvol.data import Indices
from certvol.errors import UserError
from certvol.predict.forward import certainty
from certvol.predict.target_table import target_values
from certvol.randomness import numpy_generator
from certvol.runs.folder import RunFolder
from certvol.runs.given_labels import Drawn, Stratum, read_drawn, trained_on
from certvol.runs.review_labels import Review, row_of_path
from certvol.runs.tables import read_column
from certvol.scores.uncertainty import usual_measure
from certvol.settings import read_settings_file

Values = NDArray[np.floating]

STRATA = 5
TRAINED, GIVEN = -1, STRATA  # in place of a stratum
FEWEST_NEW = 25  # new random answers with which the rest of the target is estimated


def strata(certainty_N: Values) -> Indices:
    """Return the stratum of each image: equal shares of the images in order of certainty."""
    ranks_N = np.empty(len(certainty_N), np.int64)
    ranks_N[np.argsort(certainty_N, kind="stable")] = np.arange(len(certainty_N))
    return ranks_N * STRATA // max(1, len(certainty_N))


def random_order(stratum_N: Indices, seed: int, earlier: int = 0) -> Indices:
    """Return all images in random order, one of each stratum in every round.

    `earlier` is how many images earlier orders have used up: a new order is independent of them.
    """
    name = f"review.random.{earlier}" if earlier else "review.random"
    generator = numpy_generator(seed, name)
    place_N, within_N = generator.random(len(stratum_N)), np.empty(len(stratum_N), np.int64)
    for stratum in np.unique(stratum_N):
        rows = np.flatnonzero(stratum_N == stratum)
        within_N[rows[np.argsort(place_N[rows])]] = np.arange(len(rows))
    return np.lexsort((place_N, within_N)).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Design:
    """What the answers about some random images stand for."""

    kept_n: NDArray[np.bool_]
    """The answers that count."""
    stratum_n: Indices
    """The stratum of each of these."""
    size_H: Indices
    is_finite: bool
    """Whether the strata are all there is; else they stand for new images like theirs."""


@dataclass(frozen=True, eq=False)
class RandomSample:
    """The random order of a run's target images."""

    stratum_N: Indices
    """TRAINED, GIVEN (D), or the stratum of an image in R."""
    order: Indices
    """The rows of D, then those of R in the order in which they are asked."""
    drawn: dict[int, Stratum | None] = field(default_factory=dict)
    """How the images of D were drawn."""

    @cached_property
    def place_N(self) -> Indices:
        """The place of each image in the order."""
        place_N = np.full(len(self.stratum_N), len(self.stratum_N), np.int64)
        place_N[self.order] = np.arange(len(self.order))
        return place_N

    @property
    def queue(self) -> Indices:
        """The rows to ask about, in order."""
        return self.order[len(self.drawn) :]

    def design(self, rows_n: Indices) -> Design:
        """Return what answers about these rows stand for."""
        is_given_n = self.stratum_N[rows_n] == GIVEN
        new, rest = int((~is_given_n).sum()), len(self.queue)
        known = [self.drawn.get(row) for row in rows_n.tolist()]
        if any(known) and new < min(FEWEST_NEW, rest):
            strata = sorted(set(filter(None, known)))
            return Design(
                np.array([each is not None for each in known], dtype=np.bool_),
                np.array([strata.index(each) for each in known if each], dtype=np.int64),
                np.array([each.images for each in strata], dtype=np.int64),
                is_finite=False,
            )
        size_H = np.bincount(self.stratum_N[self.stratum_N >= 0], minlength=STRATA + 1)
        everything = np.ones(len(rows_n), np.bool_)
        return Design(everything, self.stratum_N[rows_n], size_H.astype(np.int64), is_finite=True)


def random_sample(
    run: RunFolder, paths: Sequence[str], certainty_N: Values, seed: int
) -> RandomSample:
    """Return the random order of a run; `certainty_N` is by the run's usual measure."""
    row_of, stratum_N = row_of_path(paths), np.zeros(len(paths), np.int64)
    drawn = {
        row_of[path]: stratum
        for path, stratum in read_drawn(run, len(paths)).items()
        if path in row_of
    }
    stratum_N[[row_of[path] for path in trained_on(run) if path in row_of]] = TRAINED
    stratum_N[list(drawn)] = GIVEN
    rest_N = stratum_N == 0
    stratum_N[rest_N] = strata(certainty_N[rest_N])
    order = random_order(stratum_N, seed, int((~rest_N).sum()))
    given = np.array(list(drawn), dtype=np.int64)
    return RandomSample(stratum_N, np.concatenate([given, order[rest_N[order]]]), drawn)


def sample_of(run: RunFolder) -> RandomSample:
    """Read the random order of a complete run."""
    settings = read_settings_file(run.config)
    has_sigma = all(read_column(run.predictions, "sigma"))
    measure = usual_measure(has_sigma, settings.get("model.train") == "head")
    paths, values_N = target_values(run.path, measure, "the random order")
    seed = settings.get("training.seed")
    certainty_N = certainty(measure, values_N)
    return random_sample(run, paths, certainty_N, seed if isinstance(seed, int) else 0)


def drawn_in(run: RunFolder | None, given: Sequence[Review], images: int) -> Drawn:
    """Return how random images were drawn in the run that reviewed them, in the order of the draw.

    Without a run, or if its tables are damaged, they count as a simple random sample.
    """
    try:
        sample = None if run is None else sample_of(run)
        paths = [] if run is None else read_column(run.predictions, "path")
    except UserError:
        sample = None
    if sample is None:
        return {each.path: Stratum(0, images) for each in given}
    row_of, sizes = row_of_path(paths), np.bincount(sample.stratum_N + 1, minlength=GIVEN + 2)

    def stratum_of(row: int) -> Stratum | None:
        number = int(sample.stratum_N[row])
        if number == GIVEN or sample.drawn:
            return sample.drawn.get(row)
        return None if number == TRAINED else Stratum(number, int(sizes[number + 1]))

    rows = {each.path: row_of[each.path] for each in given if each.path in row_of}
    in_order = sorted(rows, key=lambda path: int(sample.place_N[rows[path]]))
    return {path: stratum_of(rows[path]) for path in in_order}
