"""Estimate from labels the accuracy, a threshold, and how many more labels are needed.

Only random images count. Images that the reviewer was unsure about are left out of the accuracy,
and count as errors for the threshold.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from certvol.data import Indices
from certvol.predict.max_error import Judged, compare_reviews, in_units
from certvol.predict.random_sample import Design
from certvol.progress import percent
from certvol.review.target import ReviewTarget
from certvol.runs.review_labels import Review
from certvol.runs.tables import label_cell
from certvol.scores.intervals import Interval, RiskThreshold, labels_to_halve, stratified


@dataclass(frozen=True)
class Estimates:
    """Figures of the run's model on its target, with 95 % confidence."""

    images: int
    """Images of the target that the run did not train on with a label."""
    target_images: int
    """All images of the target."""
    is_finite: bool
    """Whether the accuracy is that of these images; else it is that of new images like them."""
    random: int
    """Random images with an answer."""
    chosen: int
    none: int
    """Answers that the image shows none of the classes."""
    unsure: int
    """Random images that the reviewer was unsure about."""
    accuracy: Interval
    bounds: tuple[float, float] | None
    """Bounds of the accuracy if all unsure images were wrong or all right; None without any."""
    before: Interval | None
    """Accuracy of the model before adaptation; None if its predictions are not known."""
    to_halve: int
    """How many more random labels should halve the interval."""
    measure: str
    max_error: float
    threshold: RiskThreshold

    def data(self) -> dict[str, Any]:
        """Return the figures as JSON can hold them: null for what is not known."""

        def plain(interval: Interval | None) -> dict[str, float] | None:
            known = interval is not None and np.isfinite(interval.estimate)
            return interval._asdict() if interval is not None and known else None

        return {
            **asdict(self),
            "accuracy": plain(self.accuracy),
            "before": plain(self.before),
            "sentences": sentences(self),
        }


def estimate(
    target: ReviewTarget,
    reviews: Sequence[Review],
    max_error: float,
    before_N: Indices | None = None,
) -> Estimates:
    """Estimate from the reviews; `before_N` predicts before adaptation, -1 where not known."""
    cells = [label_cell(name) for name in target.classes]

    def judge(predicted_N: Indices) -> Judged:
        labels = [cells[label] for label in predicted_N]
        found = compare_reviews(reviews, target.paths, labels, target.trained)
        return found.in_order(target.sample)

    judged = judge(target.predicted_N)
    told_n = ~judged.unsure_n
    rows_n = judged.rows_n[told_n]
    design = target.sample.design(rows_n)
    counts = _counts(design, ~judged.wrong_n[told_n])
    before = None
    if before_N is not None and len(rows_n) and (before_N[rows_n[design.kept_n]] >= 0).all():
        right_n = ~judge(before_N).wrong_n[told_n]
        before = stratified(*_counts(design, right_n), design.is_finite)
    known = [each for each in reviews if each.path in target.row_of]
    images = len(target.sample.order)
    return Estimates(
        images=images,
        target_images=len(target.paths),
        is_finite=design.is_finite,
        random=len(judged.rows_n),
        chosen=sum(each.kind == "chosen" for each in known),
        none=sum(each.answer == "none" for each in known),
        unsure=int(judged.unsure_n.sum()),
        accuracy=stratified(*counts, design.is_finite),
        bounds=_bounds(target, judged),
        before=before,
        to_halve=min(labels_to_halve(*counts), len(target.sample.queue)),
        measure=target.measure,
        max_error=max_error,
        threshold=in_units(target.measure, target.certainty_N, judged, max_error, images),
    )


def _counts(design: Design, right_n: NDArray[np.bool_]) -> tuple[Indices, Indices, Indices]:
    """Return right answers, answers and images of each stratum."""
    size = len(design.size_H)
    right_H = np.bincount(design.stratum_n[right_n[design.kept_n]], minlength=size)
    drawn_H = np.bincount(design.stratum_n, minlength=size)
    return right_H.astype(np.int64), drawn_H.astype(np.int64), design.size_H


def _bounds(target: ReviewTarget, judged: Judged) -> tuple[float, float] | None:
    """Return the bounds of the accuracy with the unsure images counted as wrong, then as right."""
    if not judged.unsure_n.any():
        return None
    design = target.sample.design(judged.rows_n)
    low, high = (
        stratified(*_counts(design, right_n), design.is_finite)
        for right_n in (~judged.errors_n, ~judged.wrong_n)
    )
    return low.low, high.high


def sentences(found: Estimates) -> dict[str, str]:
    """Describe the figures in words, for the page and the console."""
    words = {
        "accuracy": _interval(found.accuracy) + _unsure(found),
        "before": "" if found.before is None else _interval(found.before),
        "threshold": _threshold(found),
        "more": "",
        "about": "" if found.random == 0 else _about(found),
    }
    if found.random and found.to_halve:
        words["more"] = f"{found.to_halve} more random labels should halve the interval."
    return words


def _interval(interval: Interval) -> str:
    if not np.isfinite(interval.estimate):
        return "no random image has a label yet"
    low, high = percent(interval.low, 0), percent(interval.high, 0)
    return f"{percent(interval.estimate)} % (95 % interval: {low} to {high} %)"


def _unsure(found: Estimates) -> str:
    if found.bounds is None:
        return ""
    low, high = (percent(share, 0) for share in found.bounds)
    return f" ({found.unsure} not sure left out; between {low} and {high} % of all)"


def _about(found: Estimates) -> str:
    """Say which images the figures are about, if they are not simply all."""
    if not found.is_finite:
        return (
            "These figures are about new images like the target's. They rest on the random labels "
            "that the run was given; new ones join from the 25th on."
        )
    if found.images < found.target_images:
        return (
            f"These figures are about the {found.images} target images whose labels did not train "
            "the run."
        )
    return ""


def _threshold(found: Estimates) -> str:
    rule, limit = found.threshold, f"at most {percent(found.max_error)} % wrong"
    if rule.threshold is not None:
        return f"accept {percent(rule.coverage)} % of the images, {limit} (95 % confidence)"
    if rule.needed is None:
        return f"no threshold yet for {limit}: even the most certain images are wrong too often"
    if rule.needed > found.images:
        return f"no threshold for {limit}: the target has too few images"
    return f"no threshold yet for {limit}; about {rule.needed} random labels should be enough"
