import numpy as np

from certvol.training.pseudo_labels import file_by_label

LABELS = np.random.default_rng(0).choice(4, size=1000, p=[0.5, 0.3, 0.15, 0.05])


def _label(images: np.ndarray, number: int) -> np.ndarray:
    return LABELS[images]


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

    def label(images: np.ndarray, number: int) -> np.ndarray:
        numbers.append(number)
        return np.zeros(len(images), dtype=np.int64)

    file_by_label(label, np.arange(10), np.array([100]), 4)
    assert numbers == [0, 1, 2]


def test_first_draws_are_uniform_over_the_images_of_a_class() -> None:
    """The first image filed under the rarest class, over many walks: as uniform as simulated draws are."""
    members = np.flatnonzero(LABELS == 3)
    counts = dict.fromkeys(members.tolist(), 0)
    walks = 2000
    for seed in range(walks):
        order = np.random.default_rng(seed).permutation(1000)
        counts[int(file_by_label(_label, order, np.array([1, 1, 1, 1]), 20).pools[3][0])] += 1

    def chi2(observed: np.ndarray) -> float:
        expected = walks / len(members)
        return float(((observed - expected) ** 2 / expected).sum())

    rng = np.random.default_rng(0)
    null = [chi2(rng.multinomial(walks, np.full(len(members), 1 / len(members)))) for _ in range(500)]
    assert chi2(np.array(list(counts.values()))) < np.quantile(null, 0.999)
