"""The figures of a run that trained on labels cover what they say they are about."""

from pathlib import Path

import numpy as np
import pytest

from certvol.errors import UserError
from certvol.predict import reject
from certvol.predict.random_sample import (
    FEWEST_NEW,
    GIVEN,
    STRATA,
    TRAINED,
    RandomSample,
    drawn_in,
    random_order,
    random_sample,
    strata,
)
from certvol.review.estimates import estimate
from certvol.review.sampling import useful_order
from certvol.review.target import open_target
from certvol.runs.folder import RunFolder
from certvol.runs.given_labels import Stratum, keep_drawn
from certvol.runs.review_labels import COLUMNS, Review, review_cells
from certvol.runs.tables import csv_text
from certvol.scores.intervals import Interval, stratified
from support.made_runs import MadeRun
from support.reviews import made_for_review, review

IMAGES, GIVEN_LABELS = 500, 100


class Continued:
    """A run that continues from another one, whose chosen images were mostly difficult."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(0)
        is_hard_N = np.arange(IMAGES) < 100
        self.wrong_N = rng.random(IMAGES) < np.where(is_hard_N, 0.5, 0.02)
        before_N = rng.normal(size=IMAGES) - 3 * is_hard_N
        after_N = rng.normal(size=IMAGES) - is_hard_N
        stratum_N = strata(before_N)
        sizes, nothing = np.bincount(stratum_N), np.zeros(IMAGES, np.int64)
        drawn = random_order(stratum_N, seed)[:GIVEN_LABELS].tolist()
        chosen = useful_order(100, -before_N, nothing, None, drawn, seed)
        now_N = np.zeros(IMAGES, np.int64)
        now_N[chosen], now_N[drawn] = TRAINED, GIVEN
        rest_N = now_N == 0
        now_N[rest_N] = strata(after_N[rest_N])
        order = random_order(now_N, seed, 200)
        order = np.concatenate([drawn, order[rest_N[order]]])
        number = {row: int(stratum_N[row]) for row in drawn}
        earlier = {row: Stratum(each, int(sizes[each])) for row, each in number.items()}
        self.sample = RandomSample(now_N, order, dict(earlier))

    def interval(self, answers: int) -> Interval:
        rows = self.sample.order[:answers]
        design = self.sample.design(rows)
        assert design.is_finite == (answers >= GIVEN_LABELS + FEWEST_NEW)
        right_n, size = ~self.wrong_N[rows][design.kept_n], len(design.size_H)
        return stratified(
            np.bincount(design.stratum_n[right_n], minlength=size),
            np.bincount(design.stratum_n, minlength=size),
            design.size_H,
            design.is_finite,
        )

    @property
    def accuracy_of_rest(self) -> float:
        return float(1 - self.wrong_N[self.sample.stratum_N != TRAINED].mean())


@pytest.fixture(scope="module")
def draws() -> list[Continued]:
    return [Continued(seed) for seed in range(400)]


@pytest.mark.parametrize("new", [0, FEWEST_NEW - 1])
def test_given_labels_stand_for_new_images(draws: list[Continued], new: int) -> None:
    found = [each.interval(GIVEN_LABELS + new) for each in draws]
    truth = 1 - draws[0].wrong_N.mean()
    assert np.mean([each.estimate for each in found]) == pytest.approx(truth, abs=0.004)
    assert np.mean([low <= truth <= high for _, low, high in found]) >= 0.94


@pytest.mark.parametrize("new", [FEWEST_NEW, 50, 100])
def test_new_labels_stand_for_the_images_that_did_not_train(
    draws: list[Continued], new: int
) -> None:
    found = [each.interval(GIVEN_LABELS + new) for each in draws]
    errors = [
        interval.estimate - each.accuracy_of_rest
        for interval, each in zip(found, draws, strict=True)
    ]
    assert np.mean(errors) == pytest.approx(0, abs=0.004)
    covered = [
        interval.low <= each.accuracy_of_rest <= interval.high
        for interval, each in zip(found, draws, strict=True)
    ]
    assert np.mean(covered) >= 0.93


def given(made: MadeRun, reviews: list[Review]) -> None:
    """Give a run labels, as `adapt --labels` does."""
    text = csv_text(COLUMNS, map(review_cells, reviews))
    for name in ("labels.csv", "review.csv"):
        (made.path / name).write_text(text)


@pytest.fixture
def runs(tmp_path: Path) -> tuple[MadeRun, MadeRun]:
    """Return a run, and one that continues from it with 20 random and 20 chosen labels."""
    first = made_for_review(tmp_path / "first", 120)
    second = made_for_review(tmp_path / "second", 120, seed=0)
    reviews = [review(first, item.row, item.kind) for item in open_target(first.path).queue(20)]
    given(second, reviews)
    random = [each for each in reviews if each.kind == "random"]
    keep_drawn(RunFolder(second.path), drawn_in(RunFolder(first.path), random[::-1], 120))
    return first, second


def test_the_draw_of_given_labels_is_kept(runs: tuple[MadeRun, MadeRun]) -> None:
    first, second = (open_target(made.path) for made in runs)
    asked = [item.row for item in first.queue(20) if item.kind == "random"]
    assert list(second.sample.drawn) == asked
    for row in asked:
        stratum = Stratum(int(first.stratum_N[row]), 120 // STRATA)
        assert second.sample.drawn[row] == stratum
    assert (second.stratum_N[asked] == GIVEN).all()
    known = {item.row for item in first.queue(20)}
    assert known.isdisjoint(item.row for item in second.queue(30))
    assert sorted([*second.sample.queue, *known]) == list(range(120))


def test_new_labels_join_the_given_ones_once_there_are_enough(
    runs: tuple[MadeRun, MadeRun],
) -> None:
    _, made = runs
    target = open_target(made.path)
    known = [review(made, row) for row in target.sample.drawn]
    rows = target.sample.queue.tolist()
    alone = estimate(target, known, 0.2)
    assert "about new images like the target's" in alone.data()["sentences"]["about"]
    some = estimate(target, known + [review(made, row) for row in rows[:24]], 0.2)
    assert (some.accuracy, some.random) == (alone.accuracy, 44)
    both = estimate(target, known + [review(made, row) for row in rows[:25]], 0.2)
    assert "about the 100 target images whose labels" in both.data()["sentences"]["about"]
    right_N = made.predicted_N == made.true_N
    share = 20 * right_N[list(target.sample.drawn)].mean()
    for stratum in range(STRATA):
        asked = [row for row in rows[:25] if target.stratum_N[row] == stratum]
        share += (target.stratum_N == stratum).sum() * right_N[asked].mean()
    assert both.accuracy.estimate == pytest.approx(share / 100)
    everything = estimate(target, known + [review(made, row) for row in rows], 0.2)
    exact = right_N[target.stratum_N != TRAINED].mean()
    assert everything.accuracy == pytest.approx((exact, exact, exact))


def test_a_threshold_asks_for_the_labels_that_are_missing(runs: tuple[MadeRun, MadeRun]) -> None:
    with pytest.raises(UserError, match=r"About 50 random labels .* --labels 30`"):
        reject.choose_rule(runs[1].path, "sigma", max_error=0.3)
    # More than the 100 images that did not train: no look takes so many.
    assert estimate(open_target(runs[1].path), [], 0.029).threshold.needed == 102


def test_labels_drawn_after_training_do_not_stand_for_new_images(
    runs: tuple[MadeRun, MadeRun], tmp_path: Path
) -> None:
    """A third run continues from the second, which was reviewed too."""
    _, second = runs
    target = open_target(second.path)
    old, new = list(target.sample.drawn), target.sample.queue[:30].tolist()
    third = made_for_review(tmp_path / "third", 120)
    given(third, [review(third, row) for row in old + new])
    (third.path / "trained.csv").write_text(
        "path,image\n"
        + "".join(f"{target.paths[row]},\n" for row in np.flatnonzero(target.stratum_N < 0))
    )
    random = [review(third, row) for row in old + new]
    keep_drawn(RunFolder(third.path), drawn_in(RunFolder(second.path), random, 120))
    sample = open_target(third.path).sample
    assert [sample.drawn[row] for row in old] == [target.sample.drawn[row] for row in old]
    assert [sample.drawn[row] for row in new] == [None] * 30
    assert sample.design(np.array(old + new)).kept_n.sum() == 20


def test_without_the_earlier_run_given_labels_are_a_simple_sample(tmp_path: Path) -> None:
    made = made_for_review(tmp_path, 60)
    reviews = [review(made, row) for row in range(10)]
    assert set(drawn_in(None, reviews, 60).values()) == {Stratum(0, 60)}
    damaged = RunFolder(tmp_path / "nothing")
    assert set(drawn_in(damaged, reviews, 60).values()) == {Stratum(0, 60)}
    given(made, reviews)  # by an older version, which kept no draw
    found = random_sample(RunFolder(made.path), made.names, made.sigma_N, 0)
    assert set(found.drawn.values()) == {Stratum(0, 60)}
    (made.path / "labels.csv").unlink()
    assert random_sample(RunFolder(made.path), made.names, made.sigma_N, 0).drawn == {}
