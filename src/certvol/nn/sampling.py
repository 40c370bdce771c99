"""Features drawn from the Gaussian around each image's feature, and what a linear classifier makes of them."""

import torch
from torch import Tensor

JITTER = 1e-6  # of the mean variance, added to a covariance that may be singular


def sample_features(mu_ND: Tensor, sigma_N: Tensor, noise_NMD: Tensor) -> Tensor:
    """phi = mu + sigma * eps: the gradient reaches mu and sigma (reparameterisation)."""
    return mu_ND[:, None, :] + sigma_N.to(mu_ND.dtype)[:, None, None] * noise_NMD


def sample_logits(mean_NC: Tensor, sigma_N: Tensor, weight_CD: Tensor, noise_NMC: Tensor) -> Tensor:
    """Logits W phi + b of samples phi, drawn without them: N(W mu + b, sigma^2 W W^T), at C instead of D dimensions.

    `mean_NC` is W mu + b. The distribution is that of `sample_features` through the same linear layer, and so are the
    expected losses and gradients, which reach mu, sigma and W; the cost falls from N M D C to C^2 D + N M C^2.
    """
    with torch.autocast(mean_NC.device.type, enabled=False):
        weight_CD = weight_CD.float() if weight_CD.dtype != torch.float64 else weight_CD
        covariance_CC = weight_CD @ weight_CD.T
        jitter = JITTER * covariance_CC.diagonal().mean().detach().clamp_min(1e-20)
        identity_CC = torch.eye(len(covariance_CC), device=covariance_CC.device, dtype=covariance_CC.dtype)
        # _ex: without waiting for the device to say whether it worked.
        factor_CC = torch.linalg.cholesky_ex(covariance_CC + jitter * identity_CC).L
        spread_NMC = noise_NMC.to(factor_CC.dtype) @ factor_CC.T
        logits_NMC: Tensor = (
            mean_NC[:, None, :].to(factor_CC.dtype) + sigma_N.to(factor_CC.dtype)[:, None, None] * spread_NMC
        )
        return logits_NMC
