"""The two heads on a backbone's feature: f_Cl gives logits, f_Sigma a width."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# f_Sigma starts near this width, whatever the feature: small against log C, and far from where softplus saturates.
INITIAL_SIGMA = 0.7
# Slope of f_Sigma's hidden units below zero. With none, one large step can switch all of them off for good, and sigma with them.
LEAK = 0.01


class Classifier(nn.Module):
    """f_Cl: Linear(D, C), or Linear(D, D) started as the identity, ReLU, Linear(D, C). Dropout before each linear layer."""

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
        """One layer, from many dimensions to few: samples of its logits are cheaper than samples of its input."""
        return self.hidden is None and self.output.out_features < self.output.in_features

    def forward(self, features: Tensor, dropout: float | None = None) -> Tensor:
        """`dropout`: drop with this probability even in evaluation (MC-dropout)."""
        p = self.dropout if dropout is None else dropout
        active = self.training if dropout is None else True
        if self.hidden is not None:
            features = F.relu(self.hidden(F.dropout(features, p, active)))
        logits: Tensor = self.output(F.dropout(features, p, active))
        return logits


class ResidualLayer(nn.Module):
    """Moves features: x + up(relu(down(x))), with `up` started at zero, so that it starts as the identity."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.down = nn.Linear(dim, hidden)
        self.up = nn.Linear(hidden, dim)
        nn.init.zeros_(self.up.weight)
        nn.init.zeros_(self.up.bias)

    def forward(self, features_ND: Tensor) -> Tensor:
        moved: Tensor = features_ND + self.up(F.relu(self.down(features_ND)))
        return moved


class SigmaHead(nn.Module):
    """f_Sigma: D -> D -> 1, softplus. Its input is not detached: sigma's gradient reaches the backbone.

    Two things keep it alive where a plain ReLU network dies of one large step (sigma 0 for ever): hidden units leak a little,
    and softplus is evaluated in float32, where its gradient vanishes only far below any sigma of use.
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
