"""Layers whose features lie on a sphere of radius r around the origin (Gu, Sun and Xu, CVPR 2020). All are computed in float32.

The tangent space is that at the north pole (0, .., 0, r): the logarithmic map flattens the sphere onto it, the exponential map
wraps it back.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHRINK = 1 - 1e-4  # of a cosine beyond it: the slope of acos is infinite at 1


def unit(x_ND: Tensor) -> Tensor:
    """Of length 1, but smoothly 0 for the zero vector, with a finite slope there."""
    return x_ND * (x_ND.square().sum(dim=-1, keepdim=True) + 1e-8).rsqrt()


def log_map(x_ND: Tensor, radius: float) -> Tensor:
    """From the sphere to the tangent space, which has one coordinate fewer."""
    units_ND = unit(x_ND)
    cosine_N1 = units_ND[:, -1:]
    angle_N1 = torch.where(cosine_N1.abs() > SHRINK, SHRINK * cosine_N1, cosine_N1).acos()
    return radius * angle_N1 * unit(units_ND[:, :-1])


def exp_map(tangent_ND: Tensor, radius: float) -> Tensor:
    """From the tangent space to the sphere, which has one coordinate more."""
    angle_N1 = (tangent_ND.square().sum(dim=1, keepdim=True) + 1e-12).sqrt() / radius
    return radius * torch.cat([angle_N1.sin() * unit(tangent_ND), angle_N1.cos()], dim=1)


class SphericalLayer(nn.Module):
    """Sphere to sphere: flattened, a linear layer, dropout, wrapped, and a ReLU that stays on the sphere."""

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
        """`frozen`: the gradient reaches x alone."""
        weight, bias = (self.weight.detach(), self.bias.detach()) if frozen else (self.weight, self.bias)
        return x_ND @ unit(weight).T + self.radius * bias.tanh()


class SphericalDiscriminator(nn.Module):
    """Two spherical layers and a logit per row, high where it takes the row for a source image."""

    def __init__(self, dim: int, radius: float, hidden: int = 1025, dropout: float = 0.5) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            SphericalLayer(dim, hidden, radius, dropout), SphericalLayer(hidden, hidden, radius, dropout)
        )
        self.output = SphericalLinear(hidden, 1, radius)

    def forward(self, x_ND: Tensor) -> Tensor:
        with torch.autocast(x_ND.device.type, enabled=False):
            logits_N: Tensor = self.output(self.layers(x_ND.float())).squeeze(1)
            return logits_N


class SphericalClassifier(nn.Module):
    """In the place of f_Cl: Linear(D, width), onto the sphere, spherical logits."""

    def __init__(self, dim: int, num_classes: int, radius: float, width: int = 256) -> None:
        super().__init__()
        self.radius = radius
        self.bottleneck = nn.Linear(dim, width)
        self.output = SphericalLinear(width, num_classes, radius)

    def embed(self, features_ND: Tensor, dropout: float | None = None) -> Tensor:
        """On the sphere. `dropout`: drop features with this probability, in evaluation too (MC-dropout)."""
        if dropout is not None:
            features_ND = F.dropout(features_ND, dropout)
        z_ND = self.bottleneck(features_ND)
        with torch.autocast(z_ND.device.type, enabled=False):
            return self.radius * unit(z_ND.float())

    def classify(self, z_ND: Tensor, frozen: bool = False) -> Tensor:
        with torch.autocast(z_ND.device.type, enabled=False):
            logits_NC: Tensor = self.output(z_ND.float(), frozen)
            return logits_NC

    def forward(self, features_ND: Tensor, dropout: float | None = None) -> Tensor:
        return self.classify(self.embed(features_ND, dropout))
