import itertools

import pytest
from scipy import stats

from certvol.benchmark import statistics


def test_all_of_one_sign_is_the_least_p_there_is() -> None:
    assert statistics.sign_flip_p([1.0, 2.0, 0.5, 3.0]) == pytest.approx(2 / 16) == statistics.least_p(4)
    assert statistics.sign_flip_p([1.0]) == 1.0 == statistics.least_p(1)
    assert statistics.sign_flip_p([]) == 1.0


def test_p_against_a_plain_count() -> None:
    values = [0.3, -0.1, 0.25, 0.4, -0.05, 0.1]
    seen = abs(sum(values))
    sums = [
        abs(sum(s * v for s, v in zip(signs, values, strict=True))) for signs in itertools.product((1, -1), repeat=6)
    ]
    expected = sum(total >= seen - 1e-12 for total in sums) / 64
    assert statistics.sign_flip_p(values) == pytest.approx(expected)
    assert 0.05 < expected < 0.5


def test_over_tasks_the_seeds_of_one_count_once() -> None:
    gains = {(task, seed): 1.0 + seed for task in "abcdef" for seed in range(5)}
    assert statistics.tasks_p(gains) == pytest.approx(2 / 64) == statistics.least_p(6)
    assert statistics.sign_flip_p(list(gains.values())) < 0.001
    one_task_loses = {pair: -10.0 if pair[0] == "a" else value for pair, value in gains.items()}
    means = [-10.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    assert statistics.tasks_p(one_task_loses) == pytest.approx(statistics.sign_flip_p(means))
    assert statistics.tasks_p({pair: value for pair, value in gains.items() if pair[0] != "a"}) is None  # five tasks


def test_no_difference_and_opposite_ones_are_noise() -> None:
    assert statistics.sign_flip_p([0.0] * 5) == 1.0
    assert statistics.sign_flip_p([1.0, -1.0] * 4) == 1.0


def test_many_pairs_are_drawn_and_give_about_the_same() -> None:
    values = [0.5, -0.3, 0.8, 0.1] * 4
    exact = statistics.sign_flip_p(values)
    drawn = statistics.sign_flip_p([*values, 0.0])  # one pair more than is tried out, which changes nothing
    assert drawn == pytest.approx(exact, abs=0.005)
    assert statistics.sign_flip_p([1.0] * 40) > 0


@pytest.mark.parametrize(
    ("first", "second"), [([1, 2, 3, 4], [10, 20, 20, 5]), ([3, 1, 1, 1, 9], [0.1, 0.4, 0.2, 0.2, 0.2])]
)
def test_rank_correlation_is_spearmans(first: list[float], second: list[float]) -> None:
    assert statistics.rank_correlation(first, second) == pytest.approx(stats.spearmanr(first, second).statistic)


def test_rank_correlation_of_what_does_not_vary_is_none() -> None:
    assert statistics.rank_correlation([1, 1, 1], [1, 2, 3]) is None
    assert statistics.rank_correlation([1, 2], [1, 2]) is None
    assert statistics.rank_correlation([1, 2, 3], [5, 6, 7]) == pytest.approx(1)
