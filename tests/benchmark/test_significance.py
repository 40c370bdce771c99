import itertools

import pytest
from scipy import stats

from certvol.benchmark import significance


def test_differences_of_one_sign_give_the_least_p() -> None:
    assert (
        significance.sign_flip_p([1.0, 2.0, 0.5, 3.0])
        == pytest.approx(2 / 16)
        == significance.least_p(4)
    )
    assert significance.sign_flip_p([1.0]) == 1.0 == significance.least_p(1)
    assert significance.sign_flip_p([]) == 1.0


def test_p_is_the_share_of_flips_with_as_large_a_sum() -> None:
    values = [0.3, -0.1, 0.25, 0.4, -0.05, 0.1]
    seen = abs(sum(values))
    sums = [
        abs(sum(s * v for s, v in zip(signs, values, strict=True)))
        for signs in itertools.product((1, -1), repeat=6)
    ]
    expected = sum(total >= seen - 1e-12 for total in sums) / 64
    assert significance.sign_flip_p(values) == pytest.approx(expected)
    assert 0.05 < expected < 0.5


def test_over_tasks_all_seeds_of_a_task_count_once() -> None:
    gains = {(task, seed): 1.0 + seed for task in "abcdef" for seed in range(5)}
    assert (
        significance.PairedTest(gains).p_over_tasks
        == pytest.approx(2 / 64)
        == significance.least_p(6)
    )
    assert significance.sign_flip_p(list(gains.values())) < 0.001
    one_task_loses = {pair: -10.0 if pair[0] == "a" else value for pair, value in gains.items()}
    means = [-10.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    assert significance.PairedTest(one_task_loses).p_over_tasks == pytest.approx(
        significance.sign_flip_p(means)
    )
    five_tasks = {pair: value for pair, value in gains.items() if pair[0] != "a"}
    assert significance.PairedTest(five_tasks).p_over_tasks is None


def test_zero_and_opposite_differences_are_noise() -> None:
    assert significance.sign_flip_p([0.0] * 5) == 1.0
    assert significance.sign_flip_p([1.0, -1.0] * 4) == 1.0


def test_random_flips_of_many_pairs_give_almost_the_exact_p() -> None:
    values = [0.5, -0.3, 0.8, 0.1] * 3
    exact = significance.sign_flip_p(values)
    drawn = significance.sign_flip_p([*values, 0.0, 0.0, 0.0])  # zeros change no sum
    assert 2 ** (len(values) + 3) > significance.RESAMPLES, "too many flips to try them all"
    assert drawn == pytest.approx(exact, abs=0.01)
    assert significance.sign_flip_p([1.0] * 40) > 0


@pytest.mark.parametrize(
    ("first", "second"),
    [([1, 2, 3, 4], [10, 20, 20, 5]), ([3, 1, 1, 1, 9], [0.1, 0.4, 0.2, 0.2, 0.2])],
)
def test_rank_correlation_is_spearmans(first: list[float], second: list[float]) -> None:
    assert significance.rank_correlation(first, second) == pytest.approx(
        stats.spearmanr(first, second).statistic
    )


def test_constant_values_have_no_rank_correlation() -> None:
    assert significance.rank_correlation([1, 1, 1], [1, 2, 3]) is None
    assert significance.rank_correlation([1, 2], [1, 2]) is None
    assert significance.rank_correlation([1, 2, 3], [5, 6, 7]) == pytest.approx(1)
