"""Images and parameters of views for tests of augmentation."""

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from certvol.data.augment import WarpParameters, draw_parameters
from certvol.settings import AugmentConfig

NO_NORM = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def plain(n: int = 1, **changed: Any) -> WarpParameters:
    """Make parameters that change nothing, except those given."""
    ones = ("crop_width", "crop_height", "scale", "brightness", "contrast", "saturation")
    names = [f.name for f in dataclasses.fields(WarpParameters)]
    values = {name: torch.full((n,), 1.0 if name in ones else 0.0) for name in names}
    for name, value in changed.items():
        values[name] = torch.as_tensor(value, dtype=torch.float32).expand(n).clone()
    return WarpParameters(**values)


def photo(side: int = 32, n: int = 1, seed: int = 0) -> Tensor:
    """Draw smooth random colours, so that interpolation can be compared."""
    coarse = torch.rand(n, 3, 5, 5, generator=torch.Generator().manual_seed(seed))
    fine = torch.nn.functional.interpolate(coarse, (side, side), mode="bicubic").clamp(0, 1)
    return (fine * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def noise(side: int = 32, n: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (n, side, side, 3), dtype=torch.uint8, generator=generator)


def pixels(view_NCHW: Tensor) -> np.ndarray:
    """Return the first view as [H, W, 3] on the scale of the image."""
    return (view_NCHW[0].permute(1, 2, 0) * 255).numpy()


def draw(n: int, seed: int = 0, **settings: Any) -> WarpParameters:
    return draw_parameters(n, AugmentConfig(**settings), torch.Generator().manual_seed(seed))
