"""Figures against naive counts, and against the truth of simulated reviews."""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from certvol.errors import UserError
from certvol.predict import reject
from certvol.predict.max_error import Judged, compare_reviews, in_units
from certvol.predict.random_sample import STRATA, RandomSample, random_order, strata
from certvol.review.estimates import estimate
from certvol.review.target import open_target
from certvol.runs.review_labels import COLUMNS, Review, review_cells
from certvol.runs.tables import csv_text
from certvol.scores import intervals
from support.commands import refused
from support.made_runs import MadeRun
from support.reviews import before, made_for_review, review

RIGHT_SHARES = [(0.5, 0.4), (0.97, 0.02), (0.0, 0.3), (0.8, 0.0)]  # at least, gained with certainty


@dataclass
class Simulated:
    """A target whose truth is known."""

    certainty_N: np.ndarray
    right_N: np.ndarray
    stratum_N: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.stratum_N = strata(self.certainty_N)

    def interval(self, labels: int, seed: int) -> intervals.Interval:
        rows = random_order(self.stratum_N, seed)[:labels]
        drawn = self.stratum_N[rows]
        right = drawn[self.right_N[rows]]
        return intervals.stratified(
            np.bincount(right, minlength=STRATA),
            np.bincount(drawn, minlength=STRATA),
            np.bincount(self.stratum_N, minlength=STRATA),
        )

    def threshold(self, labels: int, seed: int, risk: float) -> intervals.RiskThreshold:
        rows = random_order(self.stratum_N, seed)[:labels]
        return in_units("sigma", self.certainty_N, judged_rows(self, rows), risk, len(self.right_N))


def simulated(least: float, gain: float, count: int = 1000) -> Simulated:
    rng = np.random.default_rng(0)
    certainty_N = rng.random(count).astype(np.float32)
    return Simulated(certainty_N, rng.random(count) < least + gain * certainty_N)


@pytest.mark.parametrize("shares", RIGHT_SHARES)
@pytest.mark.parametrize("labels", [13, 50, 100])
def test_the_interval_of_the_queues_images_covers_the_truth(
    shares: tuple[float, float], labels: int
) -> None:
    target = simulated(*shares)
    truth = target.right_N.mean()
    found = [target.interval(labels, seed) for seed in range(1000)]
    assert np.mean([low <= truth <= high for _, low, high in found]) >= 0.94


@pytest.mark.parametrize(
    ("shares", "labels", "risk"),
    [
        ((0.947, 0.0), 100, 0.05),  # every threshold exceeds the risk a little: the hardest case
        ((0.947, 0.0), 200, 0.05),
        ((0.7, 0.29), 100, 0.1),
        ((0.8, 0.2), 200, 0.05),
    ],
)
def test_the_threshold_of_the_queues_images_seldom_exceeds_its_risk(
    shares: tuple[float, float], labels: int, risk: float
) -> None:
    target = simulated(*shares)
    exceeded = given = 0
    for seed in range(1000):
        found = target.threshold(labels, seed, risk)
        if found.threshold is not None:
            given += 1
            exceeded += (~target.right_N[target.certainty_N >= found.threshold]).mean() > risk
    assert exceeded <= 0.05 * 1000
    assert given > 0


def test_the_threshold_holds_if_a_person_stops_when_it_appears(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If every number of labels were looked at, 8 % would be wrong."""
    monkeypatch.setattr(intervals, "upper_bound", lru_cache(None)(intervals.upper_bound))
    target, rng, risk = simulated(1.0, 0.0, 2000), np.random.default_rng(0), 0.05
    target.right_N[rng.choice(2000, 103, replace=False)] = False
    exceeded = given = 0
    for seed in range(250):
        for labels in range(25, 401, 25):
            found = target.threshold(labels, seed, risk)
            if found.threshold is not None:
                given += 1
                exceeded += (~target.right_N[target.certainty_N >= found.threshold]).mean() > risk
                break
    assert exceeded <= 0.06 * 250  # 0.05, and a standard error
    assert given > 0


def test_only_doubled_numbers_of_labels_are_looked_at() -> None:
    looks = [intervals.last_look(labels, 300) for labels in (0, 49, 50, 99, 100, 299, 300)]
    assert looks == [0, 0, 50, 50, 100, 200, 300]
    needed = [intervals.next_look(labels, 300) for labels in (1, 50, 51, 201, 300, 301)]
    assert needed == [50, 50, 100, 300, 300, 301]
    assert intervals.last_look(20, 20) == 20


def test_the_first_images_of_the_random_order_choose_the_threshold() -> None:
    """The answers come in another order, for example from another tool."""
    target = simulated(0.9, 0.1, 500)
    rows = random_order(target.stratum_N, 3)
    sample = RandomSample(target.stratum_N, rows)
    expected = in_units("sigma", target.certainty_N, judged_rows(target, rows[:50]), 0.2, 500)
    assert expected.threshold is not None
    shuffled = np.random.default_rng(0).permutation(rows[:99])
    judged = judged_rows(target, shuffled).in_order(sample)
    assert in_units("sigma", target.certainty_N, judged, 0.2, 500) == expected


def judged_rows(target: Simulated, rows: np.ndarray) -> Judged:
    return Judged(rows, ~target.right_N[rows], np.zeros(len(rows), np.bool_))


def test_figures_equal_naive_counts(tmp_path: Path) -> None:
    made = made_for_review(tmp_path, 200)
    target = open_target(made.path)
    rows = [item.row for item in target.queue(40) if item.kind == "random"]
    reviews = [review(made, row) for row in rows[:30]]
    reviews += [review(made, rows[30], answer="none"), review(made, rows[31], answer="unsure")]
    reviews += [review(made, row, "chosen") for row in range(200) if row not in rows][:50]
    found = estimate(target, reviews, 0.2, before(made))
    assert (found.random, found.chosen, found.none, found.unsure) == (32, 50, 1, 1)
    for interval, predicted_N in ((found.accuracy, made.predicted_N), (found.before, before(made))):
        share = 0.0
        for stratum in range(STRATA):
            told = [row for row in rows[:31] if target.stratum_N[row] == stratum]
            right = [row for row in told[:] if predicted_N[row] == made.true_N[row]]
            right = [row for row in right if row != rows[30]]  # none of the classes
            share += (target.stratum_N == stratum).mean() * len(right) / len(told)
        assert interval is not None
        assert interval.estimate == pytest.approx(share)
        assert interval.low < share < interval.high


def test_images_that_nobody_could_tell_widen_what_is_said_of_all(tmp_path: Path) -> None:
    made = made_for_review(tmp_path, 200)
    target = open_target(made.path)
    rows = [item.row for item in target.queue(40) if item.kind == "random"]
    found = []
    for answer in ("unsure", "none", "class"):
        last = [review(made, row, answer=answer) for row in rows[30:]]
        if answer == "class":
            last = [replace(each, label=predicted(made, each)) for each in last]
        found.append(estimate(target, [review(made, row) for row in rows[:30]] + last, 0.2))
    unsure, wrong, right = found
    assert unsure.bounds == (wrong.accuracy.low, right.accuracy.high)
    assert "10 not sure left out; between" in unsure.data()["sentences"]["accuracy"]
    assert wrong.bounds is None
    assert "left out" not in wrong.data()["sentences"]["accuracy"]


def predicted(made: MadeRun, review: Review) -> str:
    return made.classes[made.predicted_N[made.names.index(review.path)]]


def test_an_image_that_cannot_be_told_counts_as_an_error_for_the_threshold() -> None:
    reviews = [Review("a", "x", "random"), Review("b", None, "random", "unsure")]
    reviews += [Review("c", None, "random", "none"), Review("d", "x", "chosen")]
    judged = compare_reviews(reviews, ["d", "c", "b", "a"], ["x", "x", "x", "x"])
    assert judged.rows_n.tolist() == [3, 2, 1]
    assert judged.wrong_n.tolist() == [False, False, True]
    assert judged.errors_n.tolist() == [False, True, True]


def test_without_labels_and_without_the_earlier_model_nothing_is_claimed(tmp_path: Path) -> None:
    made = made_for_review(tmp_path, 60)
    target = open_target(made.path)
    found = estimate(target, [], 0.05, before(made)).data()
    assert (found["accuracy"], found["before"], found["to_halve"]) == (None, None, 0)
    assert found["threshold"]["needed"] == 60  # all images
    known = estimate(target, [review(made, 0)], 0.05, None)
    assert known.before is None
    assert known.accuracy.estimate in (0, 1)


def write(made: MadeRun, rows: range, kind: str = "random", right: bool = True) -> None:
    lines = ["path,label,answer,kind"]
    for row in rows:
        label = int(made.predicted_N[row]) if right else (int(made.predicted_N[row]) + 1) % 3
        lines.append(f"{made.names[row]},{made.classes[label]},class,{kind}")
    (made.path / "review.csv").write_text("\n".join(lines) + "\n")


def test_max_error_takes_the_random_labels_of_the_run(tmp_path: Path) -> None:
    made = made_for_review(tmp_path, 80)
    write(made, range(0, 80, 1))
    rule = reject.choose_rule(made.path, "sigma", max_error=0.05)
    assert (rule.coverage, rule.max_error) == (1, 0.05)
    assert rule.threshold == pytest.approx(made.sigma_N.min())
    write(made, range(0, 15))
    with pytest.raises(UserError, match=r"About 50 random labels should.*--labels 50"):
        reject.choose_rule(made.path, "probability", max_error=0.15)
    with pytest.raises(UserError, match="but the target has 80 images only"):
        reject.choose_rule(made.path, "probability", max_error=0.01)
    write(made, range(0, 80), kind="chosen")
    with pytest.raises(UserError, match="About 80 random labels should"):
        reject.choose_rule(made.path, "sigma", max_error=0.05)
    write(made, range(0, 80), right=False)
    with pytest.raises(UserError, match="give a larger --max-error"):
        reject.choose_rule(made.path, "sigma", max_error=0.05)
    write(made, range(0, 80))
    labels = (made.path / "review.csv").read_text().replace(f",{made.classes[0]},", ",misspelt,", 1)
    (made.path / "review.csv").write_text(labels)
    with pytest.raises(UserError, match="`misspelt` is not a class of the run"):
        reject.choose_rule(made.path, "sigma", max_error=0.05)
    (made.path / "review.csv").unlink()
    with pytest.raises(UserError, match="label images with `certvol review"):
        reject.choose_rule(made.path, "sigma", max_error=0.05)


def test_the_threshold_says_how_many_unknown_images_it_rejects(tmp_path: Path) -> None:
    made = made_for_review(tmp_path, 80)
    order = np.argsort(-made.sigma_N, kind="stable")
    reviews = [
        Review(made.names[row], made.classes[made.predicted_N[row]], "random") for row in order[:60]
    ]
    reviews += [Review(made.names[row], None, "random", "none") for row in order[60:70]]
    reviews += [Review(made.names[row], None, "chosen", "none") for row in (order[0], order[79])]
    text = csv_text(COLUMNS, map(review_cells, reviews))
    (made.path / "review.csv").write_text(text)
    rule = reject.choose_rule(made.path, "sigma", max_error=0.2)
    rejected = [*order[60:70], order[0], order[79]]
    assert rule.unknown == 12
    assert rule.unknown_rejected == (made.sigma_N[rejected] < rule.threshold - 1e-6).sum()
    assert 0 < rule.unknown_rejected < 12


def test_a_threshold_of_an_uncertainty_is_in_its_own_units(tmp_path: Path) -> None:
    made = made_for_review(tmp_path, 80)
    write(made, range(0, 80))
    rule = reject.choose_rule(made.path, "entropy", max_error=0.05)
    assert rule.threshold == pytest.approx(made.extra["entropy"].max())
    half = reject.choose_rule(made.path, "entropy", coverage=0.5)
    assert half.threshold == pytest.approx(np.median(made.extra["entropy"]), abs=0.1)
    assert half.coverage == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize("change", ["sorted", "cut"])
@pytest.mark.parametrize("table", ["predictions.csv", "measures.csv"])
@pytest.mark.parametrize("measure", ["sigma", "entropy"])
def test_tables_whose_rows_do_not_agree_are_refused(
    change: str, table: str, measure: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = made_for_review(tmp_path, 80)
    write(made, range(0, 80))
    header, *rows = (made.path / table).read_text().splitlines()
    rows = rows[::-1] if change == "sorted" else rows[:70]
    (made.path / table).write_text("\n".join([header, *rows]) + "\n")
    with pytest.raises(UserError, match=rf"{measure_file(measure)}\.csv is damaged: .* other rows"):
        reject.choose_rule(made.path, measure, max_error=0.5)
    said = refused(capsys, "review", str(made.path), "--export", str(tmp_path / "t.csv"))
    assert "is damaged" in said


def measure_file(measure: str) -> str:
    return "predictions" if measure == "sigma" else "measures"
