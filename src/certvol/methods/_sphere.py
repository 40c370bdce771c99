"""Layers on a sphere of radius r around the origin (Gu, Sun and Xu, CVPR 2020), in float32.

The tangent space is that at the north pole (0, .., 0, r): the logarithmic map flattens the sphere
onto it, the exponential map wraps it back.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from certvol.nn.heads import Drop

SHRINK = 1 - 1e-4  # keeps cosines below 1, where the slope of acos is infinite


def unit(x_ND: Tensor) -> Tensor:
    """Scale to length 1, but smoothly to 0 at the zero vector, with a finite slope."""
    return x_ND * (x_ND.square().sum(dim=-1, keepdim=True) + 1e-8).rsqrt()


def log_map(x_ND: Tensor, radius: float) -> Tensor:
    """Map the sphere to the tangent space, which has one coordinate fewer."""
    units_ND = unit(x_ND)
    cosine_N1 = units_ND[:, -1:]
    angle_N1 = torch.where(cosine_N1.abs() > SHRINK, SHRINK * cosine_N1, cosine_N1).acos()
    return radius * angle_N1 * unit(units_ND[:, :-1])


def exp_map(tangent_ND: Tensor, radius: float) -> Tensor:
    """Map the tangent space to the sphere, which has one coordinate more."""
    angle_N1 = (tangent_ND.square().sum(dim=1, keepdim=True) + 1e-12).sqrt() / radius
    return radius * torch.cat([angle_N1.sin() * unit(tangent_ND), angle_N1.cos()], dim=1)


class SphericalLayer(nn.Module):
    """Map a sphere to a sphere: flatten, linear layer, dropout, wrap, ReLU back onto the sphere."""

    def __init__(self, dim: int, out_dim: int, radius: float, dropout: float) -> None:
        super().__init__()
        self.radius, self.dropout = radius, dropout
        self.linear = nn.Linear(dim - 1, out_dim - 1)

    def forward(self, x_ND: Tensor) -> Tensor:
        tangent_ND = F.dropout(self.linear(log_map(x_ND, self.radius)), self.dropout, self.training)
        return self.radius * unit(exp_map(tangent_ND, self.radius).relu())


class SphericalLinear(nn.Module):
    """Logits x . w / |w| + r tanh(b): signed distances from hyperplanes that cut the sphere."""

    def __init__(self, dim: int, out_dim: int, radius: float) -> None:
        super().__init__()
        self.radius = radius
        self.weight = nn.Parameter(nn.init.xavier_normal_(torch.empty(out_dim, dim)))
        self.bias = nn.Parameter(torch.zeros(out_dim))

    def forward(self, x_ND: Tensor, frozen: bool = False) -> Tensor:
        """Return the logits. `frozen`: the gradient reaches x alone."""
        used = (self.weight, self.bias)
        weight, bias = (each.detach() for each in used) if frozen else used
        return x_ND @ unit(weight).T + self.radius * bias.tanh()


class SphericalDiscriminator(nn.Module):
    """Two spherical layers and a logit per row, high for a source image."""

    def __init__(self, dim: int, radius: float, hidden: int = 1025, dropout: float = 0.5) -> None:
        super().__init__()
        layers = [SphericalLayer(width, hidden, radius, dropout) for width in (dim, hidden)]
        self.layers = nn.Sequential(*layers)
        self.output = SphericalLinear(hidden, 1, radius)

    def forward(self, x_ND: Tensor) -> Tensor:
        with torch.autocast(x_ND.device.type, enabled=False):
            logits_N: Tensor = self.output(self.layers(x_ND.float())).squeeze(1)
            return logits_N


class SphericalClassifier(nn.Module):
    """A classifier in place of f_Cl: Linear(D, width), onto the sphere, spherical logits."""

    def __init__(self, dim: int, num_classes: int, radius: float, width: int = 256) -> None:
        super().__init__()
        self.radius = radius
        self.bottleneck = nn.Linear(dim, width)
        self.output = SphericalLinear(width, num_classes, radius)

    def embed(self, features_ND: Tensor, drop: Drop | None = None) -> Tensor:
        """Return points on the sphere. Without `drop`, nothing is dropped."""
        z_ND = self.bottleneck(features_ND if drop is None else drop(features_ND))
        with torch.autocast(z_ND.device.type, enabled=False):
            return self.radius * unit(z_ND.float())

    def classify(self, z_ND: Tensor, frozen: bool = False) -> Tensor:
        with torch.autocast(z_ND.device.type, enabled=False):
            logits_NC: Tensor = self.output(z_ND.float(), frozen)
            return logits_NC

    def forward(self, features_ND: Tensor, drop: Drop | None = None) -> Tensor:
        return self.classify(self.embed(features_ND, drop))
