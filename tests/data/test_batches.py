import numpy as np
import pytest

from certvol.data.batches import (
    Mixture,
    batch_shape,
    by_class,
    class_visits,
    draw_plain,
    hold_out,
    images_needed,
    plan_mixed_cycle,
    plan_plain_cycle,
    plan_source_cycle,
)


@pytest.mark.parametrize(
    ("batch_size", "num_classes", "classes", "per_domain"),
    [
        (128, 31, 16, 4),
        (128, 10, 10, 6),
        (128, 123, 16, 4),
        (128, 12, 12, 5),
        (8, 5, 1, 4),
        (4, 3, 1, 2),
        (128, 2, 2, 32),
    ],
)
def test_batch_shape(batch_size: int, num_classes: int, classes: int, per_domain: int) -> None:
    shape = batch_shape(batch_size, num_classes)
    assert (shape.classes, shape.per_domain) == (classes, per_domain)
    assert shape.size <= batch_size


def test_every_class_is_visited_equally_often() -> None:
    visits = class_visits(31, 16, first_step=0, steps=31, seed=0, stream="t")
    assert np.bincount(visits.ravel(), minlength=31).tolist() == [16] * 31


def test_visits_are_a_window_into_one_endless_row() -> None:
    whole = class_visits(7, 3, 0, 20, seed=5, stream="t")
    parts = [class_visits(7, 3, first, 4, seed=5, stream="t") for first in range(0, 20, 4)]
    assert np.array_equal(whole, np.concatenate(parts))
    assert not np.array_equal(whole, class_visits(7, 3, 0, 20, seed=6, stream="t"))


def test_by_class_returns_positions() -> None:
    groups = by_class(np.array([2, 0, 2, 3, 0]), 5)
    assert [group.tolist() for group in groups] == [[1, 4], [], [0, 2], [3], []]


def _pools(sizes: list[int], start: int = 0) -> list[np.ndarray]:
    pools = []
    for size in sizes:
        pools.append(np.arange(start, start + size))
        start += size
    return pools


def test_mixed_batches_are_half_and_half_and_balanced() -> None:
    shape = batch_shape(64, 6)
    source, target = _pools([30] * 6), _pools([40] * 6, start=1000)
    visits = class_visits(6, shape.classes, 0, 5, seed=0, stream="t")
    plan = plan_mixed_cycle(source, target, visits, shape, np.random.default_rng(0))
    assert plan.num_source_S.tolist() == [shape.size // 2] * 5
    for images, labels, classes in zip(plan.images_SN, plan.labels_SN, visits, strict=True):
        half = shape.size // 2
        assert (images[:half] < 1000).all()
        assert (images[half:] >= 1000).all()
        assert all(
            label == image // 30 for image, label in zip(images[:half], labels[:half], strict=True)
        )
        assert all(
            label == (image - 1000) // 40
            for image, label in zip(images[half:], labels[half:], strict=True)
        )
        for part in (labels[:half], labels[half:]):
            assert np.bincount(part, minlength=6)[classes].tolist() == [shape.per_domain] * len(
                classes
            )


def test_source_images_stand_in_for_a_class_without_pseudo_labels() -> None:
    shape = batch_shape(24, 3)
    source, target = (
        _pools([20] * 3),
        [np.array([100, 101]), np.array([], dtype=np.int64), np.array([102])],
    )
    visits = class_visits(3, shape.classes, 0, 2, seed=0, stream="t")
    plan = plan_mixed_cycle(source, target, visits, shape, np.random.default_rng(0))
    per_class = shape.per_domain
    assert plan.num_source_S.tolist() == [4 * per_class] * 2
    for images, labels in zip(plan.images_SN, plan.labels_SN, strict=True):
        assert (images[: 4 * per_class] < 60).all()
        assert (images[4 * per_class :] >= 100).all()
        assert np.bincount(labels).tolist() == [2 * per_class] * 3
        assert (images[: 4 * per_class] // 20 == labels[: 4 * per_class]).all()


def test_a_class_is_used_up_before_an_image_repeats() -> None:
    shape = batch_shape(16, 2)  # 2 classes, 4 + 4
    source, target = _pools([100, 100]), _pools([12, 12], start=1000)
    visits = class_visits(2, 2, 0, 6, seed=0, stream="t")
    plan = plan_mixed_cycle(source, target, visits, shape, np.random.default_rng(0))
    drawn = plan.images_SN[:, 8:].ravel()
    first_three, last_three = drawn[: 3 * 8], drawn[3 * 8 :]
    assert sorted(first_three) == sorted(last_three) == list(range(1000, 1024))
    source_drawn = plan.images_SN[:, :8].ravel()
    assert len(set(source_drawn)) == len(source_drawn)


def test_the_first_images_of_a_class_come_in_the_given_order() -> None:
    shape = batch_shape(16, 2)
    target = [np.array([7, 3, 9, 1]), np.array([2, 8, 4, 6])]
    plan = plan_mixed_cycle(
        _pools([9, 9]), target, np.array([[1, 0]]), shape, np.random.default_rng(0)
    )
    assert plan.images_SN[0, 8:].tolist() == [2, 8, 4, 6, 7, 3, 9, 1]


def test_pretraining_batches_hold_source_images_only() -> None:
    shape = batch_shape(32, 4)
    visits = class_visits(4, 4, 0, 3, seed=0, stream="t")
    plan = plan_source_cycle(_pools([50] * 4), visits, shape, np.random.default_rng(0))
    assert plan.images_SN.shape == (3, shape.size)
    assert (plan.images_SN // 50 == plan.labels_SN).all()
    assert plan.num_source_S.tolist() == [shape.size] * 3


def test_images_needed_counts_what_a_plan_draws() -> None:
    shape = batch_shape(64, 6)
    visits = class_visits(6, 4, 0, 5, seed=3, stream="t")
    assert images_needed(visits, 6, shape).tolist() == [
        (visits == c).sum() * shape.per_domain for c in range(6)
    ]


def test_hold_out_takes_the_same_share_of_every_class_and_spares_small_ones() -> None:
    labels = np.repeat([0, 1, 2], [100, 10, 4])
    kept, held = hold_out(labels, 3, 0.1, seed=0)
    assert np.bincount(labels[held], minlength=3).tolist() == [10, 1, 0]
    assert sorted([*kept, *held]) == list(range(114))
    assert hold_out(labels, 3, 0.0, seed=0)[1].size == 0
    assert hold_out(np.zeros(10_000, dtype=np.int64), 1, 0.5, seed=0, most=100)[1].size == 100


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95, 0.999])
def test_hold_out_never_takes_a_whole_class(share: float) -> None:
    labels = np.repeat([0, 1, 2], [100, 5, 7])
    kept, _ = hold_out(labels, 3, share, seed=0)
    assert (np.bincount(labels[kept], minlength=3) > 0).all()


def test_a_class_without_images_is_an_error() -> None:
    shape = batch_shape(16, 2)
    with pytest.raises(ValueError, match="without images"):
        plan_source_cycle(
            [np.arange(5), np.array([], dtype=np.int64)],
            np.array([[0, 1]]),
            shape,
            np.random.default_rng(0),
        )


def test_plain_batches_take_each_image_once_before_any_twice() -> None:
    rng = np.random.default_rng(0)
    drawn = draw_plain(np.arange(10, 30), 6, 5, rng).ravel()
    assert sorted(drawn[:20].tolist()) == list(range(10, 30))
    assert len(set(drawn[20:].tolist())) == 10


def test_a_plain_batch_is_half_target_with_labels_by_number() -> None:
    rng = np.random.default_rng(0)
    source_labels, target_labels = rng.integers(0, 3, 40), rng.integers(0, 3, 50)
    target = draw_plain(np.arange(50), 4, 6, rng)
    plan = plan_plain_cycle(np.arange(0, 40, 2), source_labels, target, target_labels, 12, rng)
    assert plan.images_SN.shape == (4, 12)
    assert plan.num_source_S.tolist() == [6] * 4
    assert (plan.images_SN[:, :6] % 2 == 0).all()
    assert np.array_equal(plan.labels_SN[:, :6], source_labels[plan.images_SN[:, :6]])
    assert np.array_equal(plan.images_SN[:, 6:], target)
    assert np.array_equal(plan.labels_SN[:, 6:], target_labels[target])
    plan.check(40, 50, 3)


def test_source_images_fill_a_plain_batch_without_target_images() -> None:
    rng = np.random.default_rng(0)
    target = draw_plain(np.empty(0, dtype=np.int64), 3, 6, rng)
    plan = plan_plain_cycle(
        np.arange(9), np.zeros(9, dtype=np.int64), target, np.full(5, -1), 12, rng
    )
    assert plan.num_source_S.tolist() == [12] * 3
    plan.check(9, 5, 2)


def test_plain_batches_keep_the_class_frequencies() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1], [90, 10])
    plan = plan_plain_cycle(
        np.arange(100), labels, np.empty((20, 0), dtype=np.int64), labels[:0], 10, rng
    )
    assert np.bincount(plan.labels_SN.ravel()).tolist() == [180, 20]


@pytest.mark.parametrize(
    ("shares", "expected"), [([1, 1], [24, 24]), ([2, 1], [32, 16]), ([1, 7], [6, 42])]
)
def test_each_source_has_its_share_of_every_class(shares: list[int], expected: list[int]) -> None:
    """The second source is three times as large; class 1 occurs in the first alone."""
    one, two = _pools([5, 4]), _pools([15, 0], 100)
    weights = np.array(shares) / sum(shares)
    source = [Mixture(parts, weights) for parts in zip(one, two, strict=True)]
    shape, visits = batch_shape(16, 2), np.array([[0, 1]] * 6)
    plan = plan_source_cycle(source, visits, shape, np.random.default_rng(0))
    first, second = plan.images_SN[:, :8], plan.images_SN[:, 8:]
    counts = [int((first < 100).sum()), int((first >= 100).sum())]
    assert counts == expected
    of_batch = (first < 100).sum(axis=1)
    assert np.ptp(of_batch) <= 1  # each batch has the shares, as nearly as whole images can
    assert (second < 100).all()
    drawn = np.bincount(first[first >= 100] - 100, minlength=15)
    assert np.ptp(drawn) <= 1


def test_plain_batches_have_the_shares_too() -> None:
    source = Mixture(_pools([3, 30]), np.array([0.5, 0.5]))
    drawn = draw_plain(source, steps=5, per_step=8, rng=np.random.default_rng(0))
    assert ((drawn < 3).sum(axis=1) == 4).all()


def test_a_mixture_of_one_source_draws_all_of_it_once() -> None:
    source = Mixture([np.arange(6), np.empty(0, np.int64)], np.array([0.5, 0.5]))
    drawn = draw_plain(source, steps=2, per_step=3, rng=np.random.default_rng(0))
    assert sorted(drawn.ravel().tolist()) == list(range(6))
    with pytest.raises(ValueError, match="without images"):
        plan_source_cycle(
            [Mixture([np.empty(0, np.int64)], np.ones(1))],
            np.zeros((1, 1), np.int64),
            batch_shape(8, 1),
            np.random.default_rng(0),
        )
