"""Features drawn from the Gaussian around each image's feature."""

import torch
from torch import Tensor


def standard_noise(mu_ND: Tensor, num_samples: int, generator: torch.Generator) -> Tensor:
    """eps: N x M x D, drawn on the generator's device, which must be mu's."""
    shape = (mu_ND.shape[0], num_samples, mu_ND.shape[1])
    return torch.randn(shape, generator=generator, device=mu_ND.device, dtype=mu_ND.dtype)


def sample_features(mu_ND: Tensor, sigma_N: Tensor, noise_NMD: Tensor) -> Tensor:
    """phi = mu + sigma * eps: the gradient reaches mu and sigma (reparameterisation)."""
    return mu_ND[:, None, :] + sigma_N.to(mu_ND.dtype)[:, None, None] * noise_NMD
