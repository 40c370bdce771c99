"""Project frozen features to fewer dimensions by a fixed linear map, before the trained layers."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from certvol.settings import ModelConfig

AUTO_DIMS = 512
MOST_ROWS = 4096  # rows of each domain that the directions are estimated from
CHUNK_ROWS = 4096
OVERSAMPLING = 8

Features = tuple[NDArray[np.float32], NDArray[np.int64]]
"""Features, rows x views x D with the test view first, and the row of each image."""


def kept_dimensions(model: ModelConfig, dim: int, images: int, closed_form: bool) -> int:
    """Return how many dimensions features of `dim` are reduced to; 0 if they are not reduced.

    `images` of both domains lie in a space of at most `images - 1` dimensions.
    """
    asked = model.feature_dims
    if model.train != "head":
        asked = 0
    elif asked is None:
        asked = 0 if closed_form else AUTO_DIMS
    return min(asked, images - 1) if asked < dim else 0


class Projection(nn.Module):
    """Subtract a mean, and keep the coordinates along orthonormal directions.

    Only the part of a distance outside these directions is lost. The map is set once, by
    `fit_projection`, and delivered with the model.
    """

    mean_D: Tensor
    basis_DR: Tensor

    def __init__(self, dim: int, dims: int) -> None:
        super().__init__()
        self.register_buffer("mean_D", torch.zeros(dim))
        self.register_buffer("basis_DR", torch.zeros(dim, dims))

    def forward(self, features_ND: Tensor) -> Tensor:
        return (features_ND - self.mean_D) @ self.basis_DR

    @torch.no_grad()
    def project(self, features_NVD: NDArray[np.float32]) -> NDArray[np.float32]:
        """Project rows x views x D on the module's device, a chunk at a time."""
        count, views, _ = features_NVD.shape
        projected_NVR = np.empty((count, views, self.basis_DR.shape[1]), dtype=np.float32)
        for start in range(0, count, CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            chunk_RVD = torch.from_numpy(np.array(features_NVD[rows]))
            projected_NVR[rows] = self(chunk_RVD.to(self.mean_D.device)).cpu().numpy()
        return projected_NVR


def fit_projection(
    domains: Sequence[Features], dims: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Return the buffers of a projection onto the domains' principal directions in test views.

    The coordinates are turned at random within these directions, which changes no distance. Dropout
    drops coordinates: a few principal directions hold most of what tells classes apart, and a
    classifier that loses them in every other step learns from the directions of noise.
    """
    parts = []
    for features_NVD, rows_N in domains:
        order = torch.randperm(len(rows_N), generator=generator)[:MOST_ROWS].numpy()
        parts.append(torch.from_numpy(features_NVD[rows_N[order], 0]))
    sample_ND = torch.cat(parts)
    axes_DR = principal_directions(sample_ND, dims, generator, iterations=1)
    turn_RR = torch.linalg.qr(torch.randn(dims, dims, generator=generator)).Q
    return {"mean_D": sample_ND.mean(dim=0), "basis_DR": (axes_DR @ turn_RR).contiguous()}


def principal_directions(
    rows_ND: Tensor, count: int, generator: torch.Generator, iterations: int = 2
) -> Tensor:
    """Return the first principal directions, D x count, by randomised subspace iteration."""
    centred_ND = rows_ND - rows_ND.mean(dim=0)
    width = min(count + OVERSAMPLING, *centred_ND.shape)
    shape = (centred_ND.shape[1], width)
    basis_DR = torch.randn(shape, generator=generator, device=rows_ND.device, dtype=rows_ND.dtype)
    for _ in range(iterations + 1):
        basis_DR = torch.linalg.qr(centred_ND.T @ (centred_ND @ basis_DR)).Q
    _, _, rotation_RR = torch.linalg.svd(centred_ND @ basis_DR, full_matrices=False)
    directions_DR: Tensor = basis_DR @ rotation_RR.T[:, :count]
    return directions_DR
