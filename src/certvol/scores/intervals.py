"""Compute intervals and bounds for shares that are estimated from a few labels.

`stratified` estimates the accuracy on all images from a stratified random sample; `upper_bound` and
`lower_bound` are exact for a simple one. `risk_threshold` accepts the most certain images whose
error stays below a risk, with confidence. H strata, n labels, N images.
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

Counts = NDArray[np.int64]
Flags = NDArray[np.bool_]
Values = NDArray[np.floating]

CONFIDENCE = 0.95
CANDIDATES = 20  # thresholds that `risk_threshold` tests
FIRST_LOOK = 50  # labels
FIRST_ERRORS = 3  # errors that the strictest threshold should allow
MOST_LABELS = 10**7  # if more labels would be needed, report that none are enough
PSEUDO = 2.0  # labels with the overall rate that are added to those of each stratum


class Interval(NamedTuple):
    """An estimated share with its two-sided interval."""

    estimate: float
    low: float
    high: float

    @property
    def width(self) -> float:
        return self.high - self.low


@dataclass(frozen=True)
class RiskThreshold:
    """The least certain value to accept, in the units of the certainty that was given."""

    threshold: float | None
    """None if the labels do not allow any."""
    coverage: float
    """Share of all images accepted."""
    labels: int
    """Labels among the accepted images; without a threshold, among the first candidate's."""
    errors: int
    bound: float
    """Upper bound of their error; 1 without labels."""
    needed: int | None
    """Total labels that should allow a threshold at the present error rates; None if none would."""


def clopper_pearson(successes: float, trials: float) -> Interval:
    """Return the exact binomial interval, which covers any share in at least 95 % of samples."""
    if trials <= 0:
        return Interval(math.nan, 0.0, 1.0)
    one_sided = (1 + CONFIDENCE) / 2
    low = lower_bound(successes, trials, one_sided)
    return Interval(successes / trials, low, upper_bound(successes, trials, one_sided))


def upper_bound(successes: float, trials: float, confidence: float = CONFIDENCE) -> float:
    """Return the exact one-sided upper bound of a binomial share (Clopper and Pearson)."""
    if successes >= trials:
        return 1.0
    return float(special.betaincinv(successes + 1, trials - successes, confidence))


def lower_bound(successes: float, trials: float, confidence: float = CONFIDENCE) -> float:
    return 1 - upper_bound(trials - successes, trials, confidence)


def stratified(
    right_H: Counts, drawn_H: Counts, size_H: Counts, is_finite: bool = True
) -> Interval:
    """Estimate the share of all images from the random images drawn in each stratum.

    With `is_finite`, it is the share of the images themselves, a multiple of 1 / N, and images with
    a label are certain. Without, it is that of new images, of which the strata have these shares.

    The interval is Clopper and Pearson's for the effective number of labels, as Korn and Graubard
    (1998) do it: the number that a simple random sample would need for the same variance. A
    stratum's variance is computed with a rate pulled towards the overall one, so that a few labels
    that happen to agree do not look precise. A stratum without labels joins its neighbour, so order
    the strata by certainty, or whatever they were made by.
    """
    right_H, drawn_H, size_H = _joined(right_H, drawn_H, size_H)
    if drawn_H.sum() == 0:
        return Interval(math.nan, 0.0, 1.0)
    weight_H, rate_H = size_H / size_H.sum(), right_H / drawn_H
    share = min(1.0, float(weight_H @ rate_H))
    effective = _effective(right_H, drawn_H, size_H, is_finite)
    if math.isinf(effective):  # every image has a label
        return Interval(share, share, share)
    _, low, high = clopper_pearson(share * effective, effective)
    # That interval is for shares in steps of 1 / effective; labels come in larger ones.
    step = max(0.0, 1 / drawn_H.sum() - 1 / effective) / 2
    low, high = low - step, high + step
    if is_finite:
        images = int(size_H.sum())
        low = math.floor(low * images + 1e-9) / images
        high = math.ceil(high * images - 1e-9) / images
    return Interval(share, max(0.0, low), min(1.0, high))


def _joined(right_H: Counts, drawn_H: Counts, size_H: Counts) -> tuple[Counts, Counts, Counts]:
    rows: list[list[int]] = []
    for row in zip(right_H, drawn_H, size_H, strict=True):
        if row[2] == 0:
            continue
        if rows and (row[1] == 0 or rows[-1][1] == 0):
            rows[-1] = [int(a + b) for a, b in zip(rows[-1], row, strict=True)]
        else:
            rows.append([int(number) for number in row])
    right, drawn, size = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return right, drawn, size


def _effective(right_H: Counts, drawn_H: Counts, size_H: Counts, is_finite: bool = True) -> float:
    overall = (right_H.sum() + 1) / (drawn_H.sum() + 2)
    rate_H = (right_H + PSEUDO * overall) / (drawn_H + PSEUDO)
    weight_H = size_H / size_H.sum()
    left_H = 1 - is_finite * drawn_H / size_H  # an image with a label is certain
    variance = float(np.sum(weight_H**2 * left_H * rate_H * (1 - rate_H) / drawn_H))
    mean = float(weight_H @ rate_H)
    return mean * (1 - mean) / variance if variance > 0 else math.inf


def labels_to_halve(right_H: Counts, drawn_H: Counts, size_H: Counts) -> int:
    """Return how many more random labels should halve the interval of `stratified`."""
    images, drawn = int(size_H.sum()), int(drawn_H.sum())
    now = stratified(right_H, drawn_H, size_H)
    if drawn == 0 or now.width == 0:
        return 0
    right, each, size = _joined(right_H, drawn_H, size_H)

    def width(count: int) -> float:
        """Return the width if `count` labels fall as the present ones did."""
        if count >= images:
            return 0.0
        times = (images - drawn) * count / (drawn * (images - count))
        effective = _effective(right, each, size) * max(1.0, times)
        return clopper_pearson(now.estimate * effective, effective).width

    return _least(lambda count: width(count) <= now.width / 2, drawn, images) - drawn


def labels_to_reach(rate: float, risk: float) -> int | None:
    """Return how many labels with this error rate put their upper bound at the risk.

    None if the rate is not below the risk.
    """
    if rate >= risk:
        return None
    found = _least(lambda n: upper_bound(math.ceil(n * rate), n) <= risk, 0, MOST_LABELS)
    return found if found < MOST_LABELS else None


def _least(enough: Callable[[int], bool], low: int, high: int) -> int:
    """Find the least number above `low` that is enough, by bisection; `high` counts as enough."""
    numbers = range(low + 1, high)
    return low + 1 + bisect_left(numbers, True, key=enough)


def last_look(labels: int, images: int) -> int:
    """Return how many of the labels a threshold may use: 50, 100, 200, ..., or all images.

    `risk_threshold` holds its confidence at a few fixed numbers of labels, even if a person stops
    at the first that gives a threshold, but not if it is computed after every label.
    """
    if labels >= images:
        return images
    look = FIRST_LOOK
    while 2 * look <= labels:
        look *= 2
    return look if look <= labels else 0


def next_look(labels: int, images: int) -> int:
    """Return the least number that `last_look` allows and that is not below `labels`."""
    if labels > images:
        return labels
    look = FIRST_LOOK
    while look < labels:
        look *= 2
    return min(look, images)


def risk_threshold(
    all_N: Values, certainty_n: Values, wrong_n: Flags, risk: float
) -> RiskThreshold:
    """Choose the loosest threshold whose error among accepted images is at most `risk`.

    `all_N` holds the certainty of every image, and the labels are a random sample of them. The
    candidates depend on `all_N` and on the number of labels only, never on what the labels say.
    They are tested from the strictest, each by the exact binomial test, up to the first that fails
    (fixed-sequence testing): the chosen one exceeds the risk with probability 1 - CONFIDENCE at
    most, without a correction for testing many.
    """
    if not 0 < risk < 1:
        raise ValueError(f"`risk` must lie between 0 and 1, found {risk}")
    order_N = np.sort(np.asarray(all_N, dtype=np.float64))[::-1]
    certainty_n = np.asarray(certainty_n, dtype=np.float64)
    none_yet = RiskThreshold(None, 0.0, 0, 0, 1.0, None)
    chosen = none_yet
    for coverage in np.linspace(_first_coverage(len(certainty_n), risk), 1, CANDIDATES):
        value = float(order_N[max(0, math.ceil(coverage * len(order_N)) - 1)])
        accepted_n = certainty_n >= value
        count, errors = int(accepted_n.sum()), int(wrong_n[accepted_n].sum())
        bound = upper_bound(errors, count) if count else 1.0
        if bound > risk:
            if chosen is none_yet:
                needed = _labels_for_any(certainty_n, wrong_n, risk)
                return replace(none_yet, labels=count, errors=errors, bound=bound, needed=needed)
            break
        share = float((order_N >= value).mean())
        chosen = RiskThreshold(value, share, count, errors, bound, len(certainty_n))
    return chosen


def _first_coverage(labels: int, risk: float) -> float:
    """Return the share of the images that the strictest candidate accepts.

    It accepts enough labels to allow a few errors, as long as that takes at most half of them:
    otherwise a single error would often end the sequence at its first candidate.
    """
    none, few = (_labels_that_allow(errors, risk) for errors in (0, FIRST_ERRORS))
    return min(1.0, max(none, min(few, labels / 2)) / max(1, labels))


def _labels_that_allow(errors: int, risk: float) -> int:
    return _least(lambda n: upper_bound(errors, n) <= risk, errors, MOST_LABELS)


def _labels_for_any(certainty_n: Values, wrong_n: Flags, risk: float) -> int | None:
    """Return how many labels in total should allow some threshold, at the error rates seen so far.

    Half an error is added to those seen, so that a few right labels do not promise too much. If no
    threshold follows from that, the rates count as seen. Without labels, this is the number that
    allows a threshold if all are right.
    """
    labels = len(certainty_n)
    if labels == 0:
        return labels_to_reach(0, risk)
    errors_n = wrong_n[np.argsort(-certainty_n, kind="stable")].cumsum()
    for more in (0.5, 0.0):
        found: set[int] = set()
        for share in np.linspace(0.1, 1, 10):
            count = math.ceil(share * labels)
            rate = (float(errors_n[count - 1]) + more) / (count + 2 * more)
            if (needed := labels_to_reach(rate, risk)) is not None:
                found.add(max(labels + 1, math.ceil(needed / share)))
        if found:
            return min(found)
    return None
