import math

import numpy as np
import pytest
import torch

import references
from certvol.methods._clusters import (
    cosine_distance,
    gaussian_uniform_posterior,
    match_centres,
    spherical_kmeans,
)


def test_distance_is_0_of_equal_directions_and_1_of_opposite_ones() -> None:
    rows = torch.tensor([[2.0, 0.0], [0.0, 3.0], [-1.0, 0.0]])
    assert cosine_distance(rows, torch.tensor([[5.0, 0.0]]))[:, 0].tolist() == pytest.approx(
        [0, 0.5, 1]
    )


def test_clusters_are_found_from_rough_centres() -> None:
    torch.manual_seed(0)
    true = torch.arange(3).repeat(30)
    rows = torch.eye(6)[true] * (1 + torch.rand(90, 1)) + 0.1 * torch.randn(90, 6)
    clusters, distance, centres = spherical_kmeans(rows, torch.eye(6)[:3] + 0.5)
    assert torch.equal(clusters, true)
    assert distance.max() < 0.1
    assert cosine_distance(centres, torch.eye(6)[:3]).diagonal().max() < 0.01


def test_k_means_ends_at_a_fixed_point() -> None:
    torch.manual_seed(1)
    rows = torch.randn(60, 4)
    clusters, _, centres = spherical_kmeans(rows, torch.randn(5, 4), tolerance=1e-9)
    units = torch.nn.functional.normalize(rows, dim=1)
    assert torch.equal(cosine_distance(units, centres).argmin(1), clusters)
    for number in set(clusters.tolist()):
        mean = units[clusters == number].sum(0)
        assert torch.allclose(mean / mean.norm(), centres[number], atol=1e-4)


def test_an_empty_cluster_keeps_its_first_centre() -> None:
    rows = torch.tensor([[1.0, 0.0], [1.0, 0.1]])
    first = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    clusters, _, centres = spherical_kmeans(rows, first)
    assert clusters.tolist() == [0, 0]
    assert centres[1].tolist() == [-1.0, 0.0]


def test_a_cluster_that_loses_its_rows_goes_back_to_its_first_centre() -> None:
    def at(degrees: float) -> list[float]:
        return [math.cos(math.radians(degrees)), math.sin(math.radians(degrees)), 0.0]

    rows = torch.tensor([at(60)] * 10 + [at(-60)] * 10 + [at(40), at(-40)])
    first = torch.nn.functional.normalize(torch.tensor([at(95), [1.0, 0.0, 0.5], at(-95)]), dim=1)
    # The rows at 40 and -40 draw the middle centre into their plane, then join the outer centres,
    # which have come nearer.
    one_round = spherical_kmeans(rows, first, most_rounds=1)[2]
    assert one_round[1].tolist() == pytest.approx([1.0, 0.0, 0.0], abs=1e-6)
    clusters, _, centres = spherical_kmeans(rows, first)
    assert clusters.tolist() == [0] * 10 + [2] * 10 + [0, 2]
    assert torch.allclose(centres[1], first[1])


def test_k_means_ends_when_centres_move_by_less_than_the_tolerance_on_average() -> None:
    generator = torch.Generator().manual_seed(2)
    rows, first = torch.randn(60, 4, generator=generator), torch.randn(5, 4, generator=generator)
    once, twice = (
        spherical_kmeans(rows, first, tolerance=0.0, most_rounds=rounds)[2] for rounds in (1, 2)
    )
    moved = cosine_distance(first, once).diagonal().mean().item()
    assert torch.equal(spherical_kmeans(rows, first, tolerance=1.01 * moved)[2], once)
    assert torch.equal(
        spherical_kmeans(rows, first, tolerance=0.99 * moved, most_rounds=2)[2], twice
    )
    assert not torch.allclose(once, twice, atol=1e-2)


def test_rows_of_zero_are_equally_far_from_all_centres() -> None:
    clusters, distance, centres = spherical_kmeans(torch.zeros(4, 3), torch.eye(3))
    assert distance.tolist() == [0.5] * 4
    assert torch.isfinite(centres).all()
    assert clusters.tolist() == [0] * 4


def test_centres_are_matched_one_to_one() -> None:
    known = torch.eye(4)
    found = torch.eye(4)[[2, 0, 3, 1]] + 0.2
    assert match_centres(found, known).tolist() == [2, 0, 3, 1]
    twins = torch.tensor([[1.0, 0.0], [1.0, 0.1]])  # both near the first
    assert sorted(match_centres(twins, torch.eye(2)).tolist()) == [0, 1]


def test_outliers_of_a_half_gaussian_are_recognised() -> None:
    rng = np.random.default_rng(0)
    inside, outside = np.abs(rng.normal(0, 0.1, 300)), rng.uniform(0.8, 1.5, 30)
    posterior = gaussian_uniform_posterior(
        torch.from_numpy(np.concatenate([inside, outside])).float()
    )
    assert (posterior[300:] < 0.5).all()
    assert (posterior[:300] > 0.5).float().mean() > 0.9
    assert posterior.dtype == torch.float32


@pytest.mark.parametrize("seed", range(4))
def test_the_posterior_equals_em_written_out(seed: int) -> None:
    rng = np.random.default_rng(seed)
    distances = np.concatenate([np.abs(rng.normal(0, 0.2, 40)), rng.uniform(0, 1.5, 8 * seed)])
    found = gaussian_uniform_posterior(torch.from_numpy(distances), most_rounds=30, tolerance=0.0)
    assert found.tolist() == pytest.approx(
        references.gaussian_uniform_posterior(distances.tolist(), 30), abs=1e-9
    )


def test_a_gaussian_has_at_most_half_of_the_values() -> None:
    """Outliers have at least half of the prior: without any, the farthest values count as some."""
    rng = np.random.default_rng(0)
    values = np.sort(np.abs(rng.normal(0, 1, 2000)))
    kept = gaussian_uniform_posterior(torch.from_numpy(values)) >= 0.5
    assert 0.5 < float(kept.float().mean()) < 0.9


def test_the_posterior_falls_with_the_distance() -> None:
    distances = torch.rand(100).sort().values ** 2
    posterior = gaussian_uniform_posterior(distances)
    for side in (
        posterior[::2],
        posterior[1::2],
    ):  # of either sign, whose common mean is not quite 0
        assert (side[1:] <= side[:-1] + 1e-3).all()


@pytest.mark.parametrize("size", [3, 4, 5, 8, 20])
def test_a_small_group_keeps_some_members(size: int) -> None:
    rng = np.random.default_rng(size)
    for _ in range(50):
        posterior = gaussian_uniform_posterior(torch.from_numpy(np.abs(rng.normal(0, 1, size))))
        assert 0 < (posterior >= 0.5).sum() < size


@pytest.mark.parametrize(
    "values", [[0.3], [0.1, 0.2], [0.5] * 9, [0.0, 0.0, 1.0], [1e-30, 2e-30, 5e-30]]
)
def test_few_or_equal_distances_give_finite_posteriors(values: list[float]) -> None:
    posterior = gaussian_uniform_posterior(torch.tensor(values))
    assert torch.isfinite(posterior).all()
    assert ((posterior >= 0) & (posterior <= 1)).all()
