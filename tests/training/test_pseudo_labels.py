import itertools
from collections.abc import Callable

import numpy as np
import pytest

from certvol.data.batches import BatchShape, images_needed, plan_mixed_cycle
from certvol.training.pseudo_labels import file_by_label

LABELS = np.random.default_rng(0).choice(4, size=1000, p=[0.5, 0.3, 0.15, 0.05])


def _label(images: np.ndarray, number: int) -> Callable[[], np.ndarray]:
    return lambda: LABELS[images]


def test_a_walk_ends_when_every_class_has_what_it_needs() -> None:
    order = np.random.default_rng(1).permutation(1000)
    filed = file_by_label(_label, order, np.array([5, 5, 5, 5]), chunk_size=50)
    assert filed.walked < 1000
    assert filed.walked % 50 == 0
    assert (filed.counts_C >= 5).all()
    before_last_chunk = LABELS[order[: filed.walked - 50]]
    assert (np.bincount(before_last_chunk, minlength=4) < 5).any()


def test_images_are_filed_under_their_label_in_the_order_of_the_walk() -> None:
    order = np.random.default_rng(2).permutation(1000)
    filed = file_by_label(_label, order, np.array([9, 9, 9, 9]), chunk_size=64)
    for label, pool in enumerate(filed.pools):
        walked = order[: filed.walked]
        assert pool.tolist() == walked[LABELS[walked] == label].tolist()


def test_a_class_that_is_absent_costs_the_whole_walk() -> None:
    filed = file_by_label(_label, np.arange(1000), np.array([1, 1, 1, 1, 1]), chunk_size=64)
    assert filed.walked == 1000
    assert filed.counts_C[4] == 0


def test_a_class_that_is_not_needed_is_not_waited_for() -> None:
    filed = file_by_label(_label, np.arange(1000), np.array([1, 1, 1, 1, 0]), chunk_size=64)
    assert filed.walked < 1000


def test_labelling_everything_walks_everything() -> None:
    assert file_by_label(_label, np.arange(1000), np.zeros(4, dtype=int), 64, everything=True).walked == 1000


def test_chunks_are_numbered() -> None:
    numbers = []

    def label(images: np.ndarray, number: int) -> Callable[[], np.ndarray]:
        numbers.append(number)
        return lambda: np.zeros(len(images), dtype=np.int64)

    file_by_label(label, np.arange(10), np.array([100]), 4)
    assert numbers == [0, 1, 2]


def test_labels_are_asked_for_only_when_the_walk_could_end() -> None:
    """Five chunks cannot hold the 300 images that are needed in all: six are on their way before any label is waited for."""
    events: list[str] = []

    def label(images: np.ndarray, number: int) -> Callable[[], np.ndarray]:
        events.append(f"start {number}")
        return lambda: events.append(f"read {number}") or LABELS[images]  # type: ignore[func-returns-value]

    filed = file_by_label(label, np.arange(1000), np.array([150, 90, 45, 15]), chunk_size=50)
    assert events[:12] == [f"start {n}" for n in range(6)] + [f"read {n}" for n in range(6)]
    assert events[12:14] == ["start 6", "read 6"]
    assert filed.walked % 50 == 0


def _drawn(seed: int, everything: bool, shuffled: bool = True) -> np.ndarray:
    """Target images of the rarest class in a cycle of two steps, as training draws them: 2 x 4 slots."""
    rng = np.random.default_rng([seed, everything])
    order = rng.permutation(200) if shuffled else np.arange(200)
    visits = np.array([[0, 1, 2, 3], [0, 1, 2, 3]])
    shape = BatchShape(classes=4, per_domain=4)
    needed = images_needed(visits, 4, shape)
    filed = file_by_label(_label, order, needed, chunk_size=10, everything=everything)
    plan = plan_mixed_cycle([np.arange(9)] * 4, filed.pools, visits, shape, rng)
    rows = plan.images_SN[:, plan.num_source_S[0] :]
    return rows[plan.labels_SN[:, plan.num_source_S[0] :] == 3].reshape(2, 4)


def _statistics(draws: list[np.ndarray], members: np.ndarray) -> tuple[float, float]:
    """Chi-square of first slots over the class's images, and of pairs that meet in the first step, against uniform."""
    place = {int(image): number for number, image in enumerate(members)}
    first, pairs = np.zeros(len(members)), np.zeros((len(members), len(members)))
    for draw in draws:
        first[place[int(draw[0, 0])]] += 1
        for a, b in itertools.combinations(draw[0].tolist(), 2):
            pairs[place[min(a, b)], place[max(a, b)]] += 1
    pairs = pairs[np.triu_indices(len(members), 1)]
    return tuple(float(((x - x.mean()) ** 2 / x.mean()).sum()) for x in (first, pairs))


def _null(members: np.ndarray, cycles: int, repeats: int) -> np.ndarray:
    """The same statistics where each cycle draws uniformly, without replacement."""
    rng = np.random.default_rng(0)
    return np.array(
        [
            _statistics([rng.permutation(members)[:8].reshape(2, 4) for _ in range(cycles)], members)
            for _ in range(repeats)
        ]
    )


MEMBERS = np.flatnonzero(LABELS[:200] == 3)


@pytest.mark.parametrize("everything", [False, True])
def test_batches_on_demand_are_distributed_as_when_everything_is_labelled(everything: bool) -> None:
    cycles = 400
    null = _null(MEMBERS, cycles, 200)
    found = _statistics([_drawn(seed, everything) for seed in range(cycles)], MEMBERS)
    assert (np.array(found) < np.quantile(null, 0.995, axis=0)).all()


def test_a_walk_in_a_fixed_order_is_not_and_the_test_sees_it() -> None:
    cycles = 400
    null = _null(MEMBERS, cycles, 50)
    found = _statistics([_drawn(seed, False, shuffled=False) for seed in range(cycles)], MEMBERS)
    assert (np.array(found) > np.quantile(null, 0.995, axis=0)).all()
