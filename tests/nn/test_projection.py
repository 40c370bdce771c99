"""The projection of frozen features to fewer dimensions."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from certvol.nn import projection
from certvol.nn.network import Network, seeded_backbone
from certvol.nn.projection import AUTO_DIMS, Projection, fit_projection, kept_dimensions
from certvol.settings import ModelConfig


def rows(count: int, rank: int, dim: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    directions = np.random.default_rng(9).normal(size=(rank, dim))
    return (rng.normal(size=(count, rank)) @ directions + 3).astype(np.float32)


def fitted(dims: int, *domains: np.ndarray) -> Projection:
    module = Projection(domains[0].shape[1], dims)
    found = [(domain[:, None], np.arange(len(domain))) for domain in domains]
    module.load_state_dict(fit_projection(found, dims, torch.Generator().manual_seed(0)))
    return module


def test_distances_between_rows_of_both_domains_stay_if_their_rank_fits() -> None:
    source, target = rows(40, 6, 30, 0), rows(50, 6, 30, 1)
    module = fitted(6, source, target)
    torch.testing.assert_close(module.basis_DR.T @ module.basis_DR, torch.eye(6), rtol=0, atol=1e-5)
    before = torch.from_numpy(np.concatenate([source, target]))
    expected, found = (
        torch.cdist(each, each, compute_mode="donot_use_mm_for_euclid_dist")
        for each in (before, module(before))
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_directions_are_those_of_a_full_decomposition() -> None:
    both = rows(200, 20, 20, 0) * (0.6 ** np.arange(20)).astype(np.float32)
    module = fitted(4, both[:80], both[80:])
    centred = torch.from_numpy(both - both.mean(axis=0))
    best = torch.linalg.svdvals(centred)[:4].square().sum()
    torch.testing.assert_close(
        module(torch.from_numpy(both)).square().sum(), best, rtol=1e-3, atol=0
    )


def test_no_coordinate_holds_most_of_the_differences() -> None:
    """Dropout of one coordinate must not drop a whole principal direction."""
    both = rows(200, 20, 20, 0) * (0.6 ** np.arange(20)).astype(np.float32)
    module = fitted(8, both)
    variance_R = module(torch.from_numpy(both)).var(dim=0)
    _, axes_RR = torch.linalg.eigh(torch.cov(module(torch.from_numpy(both)).T))
    turned_R = (module(torch.from_numpy(both)) @ axes_RR).var(dim=0)
    assert variance_R.max() / variance_R.sum() < 0.7 * turned_R.max() / turned_R.sum()


def test_a_large_domain_does_not_outvote_a_small_one() -> None:
    """At most MOST_ROWS rows of a domain count, so the few others still set directions."""
    source = np.zeros((30, 12), np.float32)
    source[:, 0] = np.linspace(-1, 1, 30)
    target = np.zeros((3000, 12), np.float32)
    target[:, 1:4] = np.random.default_rng(0).normal(size=(3000, 3)) * 0.2
    before = projection.MOST_ROWS
    projection.MOST_ROWS = 30
    try:
        module = fitted(1, source, target)
    finally:
        projection.MOST_ROWS = before
    assert module.basis_DR[0].abs() > 0.99


def test_views_are_projected_in_chunks_as_the_module_projects_them() -> None:
    features = rows(11, 8, 8, 2).reshape(11, 1, 8).repeat(3, axis=1)
    module = fitted(3, features[:, 0])
    before = projection.CHUNK_ROWS
    projection.CHUNK_ROWS = 4
    try:
        found = module.project(features)
    finally:
        projection.CHUNK_ROWS = before
    assert found.shape == (11, 3, 3)
    torch.testing.assert_close(torch.from_numpy(found), module(torch.from_numpy(features)))


def test_a_network_takes_features_as_they_are_or_projected() -> None:
    config = ModelConfig(backbone="features-20", train="head", feature_dims=5)
    network = Network(*seeded_backbone(config, None, 0), 3, config).eval()
    assert network.projection is not None
    assert (network.dim, network.info.dim) == (5, 20)
    network.projection.load_state_dict(fitted(5, rows(40, 9, 20, 0)).state_dict())
    features = torch.from_numpy(rows(4, 9, 20, 1))
    found = network.features(features)
    assert found.shape == (4, 5)
    assert torch.equal(network.features(network.projection(features)), found)


def test_nothing_is_projected_without_the_setting_or_behind_a_trained_backbone() -> None:
    for changed in ({}, {"feature_dims": 0}, {"feature_dims": 4, "train": "all"}):
        settings = {"backbone": "small_cnn", "train": "head", **changed}
        config = ModelConfig(**settings)  # type: ignore[arg-type]
        network = Network(*seeded_backbone(config, 16, 0), 3, config)
        assert network.projection is None
        assert network.dim == network.info.dim


@pytest.mark.parametrize(
    ("settings", "dim", "images", "closed_form", "expected"),
    [
        ({}, 2048, 5000, False, AUTO_DIMS),
        ({}, 2048, 100, False, 99),  # centred rows span one dimension less
        ({}, AUTO_DIMS, 5000, False, 0),  # nothing would be left out
        ({}, 2048, 5000, True, 0),
        ({"feature_dims": 64}, 2048, 5000, True, 64),
        ({"feature_dims": 0}, 2048, 5000, False, 0),
        ({"train": "all"}, 2048, 5000, False, 0),
        ({"train": "all", "feature_dims": 64}, 2048, 5000, False, 0),
    ],
)
def test_how_many_dimensions_are_kept(
    settings: dict[str, Any], dim: int, images: int, closed_form: bool, expected: int
) -> None:
    model = ModelConfig(**{"train": "head", **settings})
    found = kept_dimensions(model, dim, images, closed_form)
    assert found == expected
    settled = replace(model, feature_dims=found)  # as a resumed run finds it
    assert kept_dimensions(settled, dim, images, closed_form) == expected
