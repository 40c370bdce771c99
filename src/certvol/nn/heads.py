"""Heads on a backbone's features: f_Cl gives logits, f_Sigma the width of the sampled Gaussian.

N images, M samples, D features, C classes.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Drop = Callable[[Tensor], Tensor]
"""Dropout, applied before each linear layer of a classifier."""

# f_Sigma starts near this width for any feature: small compared with log C, and not saturated.
INITIAL_SIGMA = 0.7
# Slope of f_Sigma's hidden units below zero. Without it, one large step can switch all of them off
# for good, and sigma with them.
LEAK = 0.01
JITTER = 1e-6  # share of the mean variance added to a covariance, which may be singular
MC_ROWS = 4096  # images per chunk of MC-dropout, which keeps all passes of a chunk


class Classifier(nn.Module):
    """f_Cl: Linear(D, C), or Linear(D, D) started as the identity, ReLU, Linear(D, C)."""

    def __init__(self, dim: int, num_classes: int, layers: int = 2, dropout: float = 0.5) -> None:
        super().__init__()
        self.hidden = nn.Linear(dim, dim) if layers == 2 else None
        self.output = nn.Linear(dim, num_classes)
        self.dropout = dropout
        if self.hidden is not None:
            nn.init.eye_(self.hidden.weight)
            nn.init.zeros_(self.hidden.bias)

    @property
    def fewer_logits_than_features(self) -> bool:
        """True if sampling logits is exact and cheaper than sampling features."""
        return self.hidden is None and self.output.out_features < self.output.in_features

    def forward(self, features: Tensor, drop: Drop | None = None) -> Tensor:
        """Return the logits. `drop` replaces the classifier's own dropout, in evaluation too."""
        drop = drop or partial(F.dropout, p=self.dropout, training=self.training)
        if self.hidden is not None:
            features = F.relu(self.hidden(drop(features)))
        logits: Tensor = self.output(drop(features))
        return logits


class ResidualLayer(nn.Module):
    """x + up(relu(down(x))), started as the identity: `up` is zero at first."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.down = nn.Linear(dim, hidden)
        self.up = nn.Linear(hidden, dim)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, features_ND: Tensor) -> Tensor:
        adapted_ND: Tensor = features_ND + self.up(F.relu(self.down(features_ND)))
        return adapted_ND


class SigmaHead(nn.Module):
    """f_Sigma: D -> D -> 1, softplus. Its input is not detached: sigma trains the backbone too.

    In a plain ReLU network one large step can set sigma to 0 for good. Two things prevent this:
    hidden units leak a little, and softplus runs in float32, where its gradient vanishes only far
    below any useful sigma.
    """

    def __init__(self, dim: int, hidden: int | None = None) -> None:
        super().__init__()
        self.hidden = nn.Linear(dim, hidden or dim)
        self.output = nn.Linear(hidden or dim, 1)
        nn.init.constant_(self.output.bias, math.log(math.expm1(INITIAL_SIGMA)))

    def forward(self, features_ND: Tensor) -> Tensor:
        width_N = self.output(F.leaky_relu(self.hidden(features_ND), LEAK)).squeeze(1)
        with torch.autocast(width_N.device.type, enabled=False):
            return F.softplus(width_N.float())


def sample_features(mu_ND: Tensor, sigma_N: Tensor, noise_NMD: Tensor) -> Tensor:
    """Return phi = mu + sigma * eps; gradients reach mu and sigma (reparameterisation)."""
    return mu_ND[:, None, :] + sigma_N.to(mu_ND.dtype)[:, None, None] * noise_NMD


def sample_logits(mean_NC: Tensor, sigma_N: Tensor, weight_CD: Tensor, noise_NMC: Tensor) -> Tensor:
    """Sample logits W phi + b directly from N(W mu + b, sigma^2 W W^T), in C dimensions.

    `mean_NC` is W mu + b. The distribution equals that of `sample_features` through the same linear
    layer, and so do expected losses and their gradients by mu, sigma and W. The cost falls from
    N M D C to C^2 D + N M C^2.
    """
    with torch.autocast(mean_NC.device.type, enabled=False):
        weight_CD = weight_CD.float() if weight_CD.dtype != torch.float64 else weight_CD
        covariance_CC = weight_CD @ weight_CD.T
        jitter = JITTER * covariance_CC.diagonal().mean().detach().clamp_min(1e-20)
        identity_CC = torch.eye(len(weight_CD), device=weight_CD.device, dtype=weight_CD.dtype)
        # cholesky_ex does not wait for the device to report success.
        factor_CC = torch.linalg.cholesky_ex(covariance_CC + jitter * identity_CC).L
        spread_NMC = noise_NMC.to(factor_CC.dtype) @ factor_CC.T
        sigma_N11 = sigma_N.to(factor_CC.dtype)[:, None, None]
        logits_NMC: Tensor = mean_NC[:, None, :].to(factor_CC.dtype) + sigma_N11 * spread_NMC
        return logits_NMC


def mc_dropout(
    logits: Callable[[Tensor, Drop], Tensor],
    features_ND: Tensor,
    passes: int,
    rate: float,
    seed: int,
    shared: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation (1/T) of probabilities over passes with dropout, N x C.

    `shared`: all images share the units that a pass drops, and these are drawn on the CPU. The
    result of an image then depends neither on its batch nor on the device.
    """
    drop = partial(_drop_shared if shared else F.dropout, p=rate)
    means: list[Tensor] = []
    deviations: list[Tensor] = []
    with torch.random.fork_rng([features_ND.device] if features_ND.is_cuda else []):
        for rows_RD in torch.split(features_ND, MC_ROWS):
            if shared or not means:
                torch.manual_seed(seed)
            drawn = [logits(rows_RD, drop).float().softmax(1) for _ in range(passes)]
            drawn_TRC = torch.stack(drawn)
            means.append(drawn_TRC.mean(0))
            deviations.append(drawn_TRC.std(0, correction=0))
    return torch.cat(means), torch.cat(deviations)


def _drop_shared(rows_ND: Tensor, p: float) -> Tensor:
    kept_D = (torch.rand(rows_ND.shape[-1]) >= p).float() / (1 - p)
    return rows_ND * kept_D.to(rows_ND)
