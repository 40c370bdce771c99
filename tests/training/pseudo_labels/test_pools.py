import itertools
from collections.abc import Callable

import numpy as np
import pytest

from certvol.data.batches import BatchShape, images_needed, plan_mixed_cycle
from certvol.training.pseudo_labels._pools import fill_pools

LABELS = np.random.default_rng(0).choice(4, size=1000, p=[0.5, 0.3, 0.15, 0.05])


def _label(images: np.ndarray, number: int) -> Callable[[], np.ndarray]:
    return lambda: LABELS[images]


def test_labelling_ends_when_every_class_has_what_it_needs() -> None:
    order = np.random.default_rng(1).permutation(1000)
    pools = fill_pools(_label, order, np.array([5, 5, 5, 5]), chunk_size=50)
    assert pools.labelled < 1000
    assert pools.labelled % 50 == 0
    assert (pools.counts_C >= 5).all()
    before_last_chunk = LABELS[order[: pools.labelled - 50]]
    assert (np.bincount(before_last_chunk, minlength=4) < 5).any()


def test_a_pool_holds_the_images_of_its_label_in_the_order_of_labelling() -> None:
    order = np.random.default_rng(2).permutation(1000)
    pools = fill_pools(_label, order, np.array([9, 9, 9, 9]), chunk_size=64)
    for label, pool in enumerate(pools.by_class):
        labelled = order[: pools.labelled]
        assert pool.tolist() == labelled[LABELS[labelled] == label].tolist()


def test_an_absent_class_makes_the_whole_target_be_labelled() -> None:
    pools = fill_pools(_label, np.arange(1000), np.array([1, 1, 1, 1, 1]), chunk_size=64)
    assert pools.labelled == 1000
    assert pools.counts_C[4] == 0


def test_a_class_that_is_not_needed_is_not_waited_for() -> None:
    pools = fill_pools(_label, np.arange(1000), np.array([1, 1, 1, 1, 0]), chunk_size=64)
    assert pools.labelled < 1000


def test_images_with_the_label_minus_one_are_left_out() -> None:
    labels = np.array([0, -1, 1, -1])
    pools = fill_pools(lambda images, _: lambda: labels[images], np.arange(4), np.array([1, 1]), 4)
    assert [pool.tolist() for pool in pools.by_class] == [[0], [2]]
    assert pools.labelled == 4
    assert pools.labels_of(5).tolist() == [0, -1, 1, -1, -1]


def test_everything_is_labelled_on_request() -> None:
    assert (
        fill_pools(_label, np.arange(1000), np.zeros(4, dtype=int), 64, everything=True).labelled
        == 1000
    )


def test_chunks_are_numbered() -> None:
    numbers = []

    def label(images: np.ndarray, number: int) -> Callable[[], np.ndarray]:
        numbers.append(number)
        return lambda: np.zeros(len(images), dtype=np.int64)

    fill_pools(label, np.arange(10), np.array([100]), 4)
    assert numbers == [0, 1, 2]


def test_labels_are_waited_for_only_when_labelling_could_end() -> None:
    """Five chunks cannot hold the 300 images needed, so six start before a label is waited for."""
    events: list[str] = []

    def label(images: np.ndarray, number: int) -> Callable[[], np.ndarray]:
        events.append(f"start {number}")
        return lambda: events.append(f"read {number}") or LABELS[images]

    pools = fill_pools(label, np.arange(1000), np.array([150, 90, 45, 15]), chunk_size=50)
    assert events[:12] == [f"start {n}" for n in range(6)] + [f"read {n}" for n in range(6)]
    assert events[12:14] == ["start 6", "read 6"]
    assert pools.labelled % 50 == 0


def _drawn(seed: int, everything: bool, shuffled: bool = True) -> np.ndarray:
    """Draw target images of the rarest class for two steps of four, as training does."""
    rng = np.random.default_rng([seed, everything])
    order = rng.permutation(200) if shuffled else np.arange(200)
    visits = np.array([[0, 1, 2, 3], [0, 1, 2, 3]])
    shape = BatchShape(classes=4, per_domain=4)
    needed = images_needed(visits, 4, shape)
    pools = fill_pools(_label, order, needed, chunk_size=10, everything=everything)
    plan = plan_mixed_cycle([np.arange(9)] * 4, pools.by_class, visits, shape, rng)
    rows = plan.images_SN[:, plan.num_source_S[0] :]
    return rows[plan.labels_SN[:, plan.num_source_S[0] :] == 3].reshape(2, 4)


def _statistics(draws: list[np.ndarray], members: np.ndarray) -> tuple[float, float]:
    """Return chi-square against uniform draws of the first slot and of the first step's pairs."""
    place = {int(image): number for number, image in enumerate(members)}
    first, pairs = np.zeros(len(members)), np.zeros((len(members), len(members)))
    for draw in draws:
        first[place[int(draw[0, 0])]] += 1
        for a, b in itertools.combinations(draw[0].tolist(), 2):
            pairs[place[min(a, b)], place[max(a, b)]] += 1
    pairs = pairs[np.triu_indices(len(members), 1)]

    def chi_square(counts: np.ndarray) -> float:
        return float(((counts - counts.mean()) ** 2 / counts.mean()).sum())

    return chi_square(first), chi_square(pairs)


def _null(members: np.ndarray, cycles: int, repeats: int) -> np.ndarray:
    """Return the same statistics for uniform draws without replacement."""
    rng = np.random.default_rng(0)
    return np.array(
        [
            _statistics(
                [rng.permutation(members)[:8].reshape(2, 4) for _ in range(cycles)], members
            )
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


def test_a_fixed_order_is_noticed_by_this_test() -> None:
    cycles = 400
    null = _null(MEMBERS, cycles, 50)
    found = _statistics([_drawn(seed, False, shuffled=False) for seed in range(cycles)], MEMBERS)
    assert (np.array(found) > np.quantile(null, 0.995, axis=0)).all()
