"""Features drawn from the Gaussian around each image's feature."""

from torch import Tensor


def sample_features(mu_ND: Tensor, sigma_N: Tensor, noise_NMD: Tensor) -> Tensor:
    """phi = mu + sigma * eps: the gradient reaches mu and sigma (reparameterisation)."""
    return mu_ND[:, None, :] + sigma_N.to(mu_ND.dtype)[:, None, None] * noise_NMD
