"""The neighbour graph against naive loops and closed forms."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from certvol.methods import _clusters
from certvol.training.pseudo_labels._graph import (
    Neighbours,
    nearest_neighbours,
    neighbours_for,
    propagate,
    smooth,
)


def units(count: int = 30, dims: int = 6, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, dims, generator=generator), dim=1)


def probabilities(count: int = 30, classes: int = 4, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, classes, generator=generator).softmax(dim=1)


def affinity(neighbours: Neighbours) -> Tensor:
    """W as a dense matrix: the mean of the graph and its transpose."""
    count = len(neighbours.rows_NK)
    directed_NN = torch.zeros(count, count)
    for i, row in enumerate(neighbours.rows_NK.tolist()):
        for j in row:
            directed_NN[i, j] = 1
    return (directed_NN + directed_NN.T) / 2


@pytest.mark.parametrize("chunk", [1, 7, 30])
def test_neighbours_are_those_of_a_naive_search(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_clusters, "SIMILARITIES_AT_ONCE", chunk * 30)
    rows_ND = units()
    found = nearest_neighbours(rows_ND, 4).rows_NK
    for i, row in enumerate(found.tolist()):
        others = [j for j in range(30) if j != i]
        nearest = sorted(others, key=lambda j: -float(rows_ND[i] @ rows_ND[j]))[:4]
        assert set(row) == set(nearest)


@pytest.mark.parametrize(("count", "k"), [(1, 0), (2, 1), (3, 2)])
def test_a_few_rows_have_as_many_neighbours_as_there_are_others(count: int, k: int) -> None:
    assert nearest_neighbours(units(count), 5).rows_NK.shape == (count, k)


def test_sums_over_neighbours_are_the_product_with_the_affinity() -> None:
    neighbours, values_NC = nearest_neighbours(units(), 4), probabilities()
    torch.testing.assert_close(neighbours.add_up(values_NC), affinity(neighbours) @ values_NC)


def test_smoothing_repeats_the_formula_of_lame() -> None:
    neighbours, opinion_NC = nearest_neighbours(units(), 3), probabilities()
    expected_NC, weights_NN = opinion_NC, affinity(neighbours)
    for _ in range(4):
        scores_NC = opinion_NC.log() + weights_NN @ expected_NC
        expected_NC = scores_NC.exp() / scores_NC.exp().sum(dim=1, keepdim=True)
    torch.testing.assert_close(smooth(opinion_NC, neighbours, rounds=4), expected_NC)


def test_smoothing_without_neighbours_changes_nothing() -> None:
    opinion_NC = probabilities(1)
    torch.testing.assert_close(smooth(opinion_NC, nearest_neighbours(units(1), 5)), opinion_NC)


def test_propagation_ends_at_its_closed_form() -> None:
    """Z = (1 - alpha) (I - alpha S)^-1 P, with rows brought to a sum of 1."""
    neighbours, opinion_NC, alpha = nearest_neighbours(units(), 4), probabilities(), 0.6
    weights_NN = affinity(neighbours)
    scale_N = weights_NN.sum(dim=1).rsqrt()
    spreading_NN = scale_N[:, None] * weights_NN * scale_N
    expected_NC = torch.linalg.solve(torch.eye(30) - alpha * spreading_NN, (1 - alpha) * opinion_NC)
    expected_NC = expected_NC / expected_NC.sum(dim=1, keepdim=True)
    found_NC = propagate(opinion_NC, neighbours, alpha, rounds=1000)
    torch.testing.assert_close(found_NC, expected_NC, atol=1e-3, rtol=0)


def test_propagation_without_neighbours_keeps_the_opinion() -> None:
    opinion_NC = probabilities(1)
    torch.testing.assert_close(
        propagate(opinion_NC, nearest_neighbours(units(1), 5), 0.8), opinion_NC
    )


@pytest.mark.parametrize(
    ("count", "in_use", "expected"), [(100, 4, 5), (20, 4, 2), (12, 4, 2), (4, 4, 1), (20, 1, 5)]
)
def test_neighbours_are_at_most_half_of_a_class_in_use(
    count: int, in_use: int, expected: int
) -> None:
    labels_N = torch.arange(count) % in_use
    opinion_NC = F.one_hot(labels_N, 4).float().clamp(min=1e-9)
    assert neighbours_for(opinion_NC, 5) == expected
    assert math.isclose(float(opinion_NC.sum()), count, rel_tol=1e-6)


def test_the_nearest_of_many_neighbours_are_the_few_that_a_search_finds() -> None:
    many = nearest_neighbours(units(), 7)
    for k in (1, 3, 7):
        assert torch.equal(many.nearest(k).rows_NK, nearest_neighbours(units(), k).rows_NK)
