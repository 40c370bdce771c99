"""Thresholds that keep the error among accepted images below a limit, from reviewed images.

`certvol review RUN` collects the labels. Only labels of random images count: a threshold from them
holds with 95 % confidence on the run's target. An image that shows none of the classes, or that
the reviewer could not identify, counts as an error, so the limit holds whatever it shows.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from certvol.data.folders import printable
from certvol.errors import UserError
from certvol.predict.forward import certainty
from certvol.predict.random_sample import RandomSample, sample_of
from certvol.predict.target_table import target_values
from certvol.progress import percent
from certvol.runs.checkpoint import damage_explained, read_about
from certvol.runs.folder import RunFolder
from certvol.runs.given_labels import trained_on
from certvol.runs.review_labels import Review, read_review, row_of_path
from certvol.runs.tables import label_cell, read_column
from certvol.scores import intervals
from certvol.scores.intervals import RiskThreshold

Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class Judged:
    """The random images with an answer: their rows in predictions.csv, and the answers."""

    rows_n: NDArray[np.int64]
    wrong_n: Flags
    """Whether the answer differs from the predicted class."""
    unsure_n: Flags
    """Whether the reviewer was unsure."""

    @property
    def labels(self) -> int:
        """How many answers say whether the model is right."""
        return int((~self.unsure_n).sum())

    @property
    def right(self) -> int:
        return self.labels - int(self.wrong_n.sum())

    def in_order(self, sample: RandomSample) -> "Judged":
        """Sort the answers by the random order of their images."""
        order = np.argsort(sample.place_N[self.rows_n], kind="stable")
        return Judged(self.rows_n[order], self.wrong_n[order], self.unsure_n[order])

    @property
    def errors_n(self) -> Flags:
        """The answers that count as errors for a threshold."""
        return self.wrong_n | self.unsure_n


def compare_reviews(
    reviews: Sequence[Review],
    paths: Sequence[str],
    labels: Sequence[str],
    trained: Collection[str] = (),
) -> Judged:
    """Compare the random reviews with the rows of predictions.csv.

    Other paths are left out, and so are the images that the run `trained` on.
    """
    row_of = row_of_path(paths)
    known = [each for each in reviews if each.kind == "random" and each.path in row_of]
    known = [each for each in known if each.path not in trained]
    rows = [row_of[each.path] for each in known]
    wrong = [
        each.label is None or label_cell(each.label) != labels[row]
        for each, row in zip(known, rows, strict=True)
    ]
    unsure_n = np.array([each.answer == "unsure" for each in known], dtype=np.bool_)
    return Judged(
        np.array(rows, dtype=np.int64), np.array(wrong, dtype=np.bool_) & ~unsure_n, unsure_n
    )


@dataclass(frozen=True)
class Rule:
    """A threshold: images whose measure is at least as certain are accepted."""

    measure: str
    threshold: float
    """In the measure's own units."""
    coverage: float
    """The share of the run's target that the threshold accepts."""
    max_error: float | None = None
    """Limit of the error among accepted images, with 95 % confidence; None if not asked for."""
    unknown: int = 0
    """Labelled target images of no class, random or chosen."""
    unknown_rejected: int = 0
    """How many of them the threshold rejects."""


def rule_by_labels(run: str | Path, measure: str, max_error: float) -> Rule:
    """Return the rule that a run's labels allow.

    Raise UserError if they allow none; it says how many labels are needed.
    """
    folder = RunFolder(run)
    if not folder.review.exists():
        raise UserError(
            f"--max-error needs labels of some target images, and {folder.review} does not exist; "
            f"label images with `certvol review {folder.path}`"
        )
    paths, values_N = target_values(run, measure, "--max-error")
    certainty_N = certainty(measure, values_N)
    labels = read_column(folder.predictions, "label")
    # A misspelt class in a file edited by hand would count as an error of the model.
    reviews = read_review(folder.review, _classes(folder), may_be_torn=True)
    sample = sample_of(folder)
    judged = compare_reviews(reviews, paths, labels, trained_on(folder)).in_order(sample)
    allowed = in_units(measure, certainty_N, judged, max_error, len(sample.order))
    if allowed.threshold is None:
        raise UserError(_refusal(allowed, folder, max_error, sample))
    row_of = row_of_path(paths)
    unknown = [each.path for each in reviews if each.answer == "none"]
    unknown_N = certainty_N[[row_of[path] for path in unknown if path in row_of]]
    rejected = int((unknown_N < certainty(measure, np.float32(allowed.threshold))).sum())
    return Rule(measure, allowed.threshold, allowed.coverage, max_error, len(unknown_N), rejected)


def _classes(run: RunFolder) -> list[str]:
    with damage_explained(run.model):
        return list(read_about(run.model)["classes"])


def in_units(
    measure: str,
    certainty_N: NDArray[np.float32],
    judged: Judged,
    max_error: float,
    images: int,
) -> RiskThreshold:
    """Choose a threshold on the certainty of all images, and write it in the measure's units.

    `images` is how many of them may have labels that count: those that did not train the run.
    Only the first 50, 100, 200, ... answers in random order count, as many as there are. A person
    may stop as soon as a threshold appears, and looking after every label would find one by chance.
    """

    def rule(labels: int) -> RiskThreshold:
        rows_n, errors_n = judged.rows_n[:labels], judged.errors_n[:labels]
        return intervals.risk_threshold(certainty_N, certainty_N[rows_n], errors_n, max_error)

    answers = len(judged.rows_n)
    found = rule(intervals.last_look(answers, images))
    if found.threshold is not None:
        return replace(found, threshold=certainty(measure, found.threshold))
    by_all = rule(answers)
    if by_all.threshold is not None:
        return replace(found, needed=intervals.next_look(answers + 1, images))
    if by_all.needed is None:
        return by_all
    return replace(by_all, needed=intervals.next_look(by_all.needed, images))


def _refusal(found: RiskThreshold, run: RunFolder, max_error: float, sample: RandomSample) -> str:
    text = f"the random labels in {run.review} do not allow a --max-error of {percent(max_error)} %"
    if found.labels:
        text += (
            f": of the {found.labels} that are about the most certain images, {found.errors} say "
            f"that the model is wrong, so its error there may be {percent(found.bound)} %"
        )
    if found.needed is None:
        return f"{text}. More labels would hardly help; give a larger --max-error"
    text += f". About {found.needed} random labels should be enough"
    if found.needed > (images := len(sample.order)):
        return f"{text}, but the target has {images} images only; give a larger --max-error"
    asked = max(1, found.needed - len(sample.drawn))  # given labels are there already
    command = f"certvol review {printable(run.path)} --labels {asked}"
    return f"{text}; label more with `{command}`"
