"""Colours of augmented views, compared with Pillow."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance

from certvol.data.augment import colour_matrices, train_view
from support.images import Format
from support.views import NO_NORM, noise, pixels, plain


def test_grey_makes_channels_equal_and_equals_pillows() -> None:
    images = noise(16)
    view = train_view(images, plain(grey=1.0, hue=1.0, brightness=0.5), Format(16, *NO_NORM))
    assert torch.allclose(view[:, 0], view[:, 1], atol=1e-5)
    assert torch.allclose(view[:, 0], view[:, 2], atol=1e-5)
    expected = np.asarray(Image.fromarray(images[0].numpy()).convert("L"), dtype=float)
    assert np.abs(pixels(view)[:, :, 0] - expected).max() < 1.01


def test_no_jitter_changes_no_colour() -> None:
    matrices, from_mean = colour_matrices(plain(3))
    assert torch.allclose(matrices, torch.eye(3, dtype=torch.float64).expand(3, 3, 3), atol=1e-12)
    assert torch.equal(from_mean, torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("name", "enhancer"),
    [("brightness", "Brightness"), ("contrast", "Contrast"), ("saturation", "Color")],
)
@pytest.mark.parametrize("factor", [0.6, 1.3])
def test_jitter_equals_pillows_enhancement(name: str, enhancer: str, factor: float) -> None:
    images = noise(16)
    view = train_view(images, plain(1, **{name: factor}), Format(16, *NO_NORM))
    expected = getattr(ImageEnhance, enhancer)(Image.fromarray(images[0].numpy())).enhance(factor)
    assert np.abs(pixels(view) - np.asarray(expected, dtype=float)).max() < 1.6


def test_hue_keeps_grey_and_luma_and_turns_back() -> None:
    there, back = colour_matrices(plain(hue=0.7))[0][0], colour_matrices(plain(hue=-0.7))[0][0]
    luma = torch.tensor([0.299, 0.587, 0.114], dtype=torch.float64)
    assert torch.allclose(
        there @ torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    )
    assert torch.allclose(luma @ there, luma)
    assert torch.allclose(back @ there, torch.eye(3, dtype=torch.float64), atol=1e-9)
    red = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    assert not torch.allclose(there @ red, red, atol=0.1)


def test_colours_stay_in_range() -> None:
    view = train_view(
        noise(16, n=2), plain(2, brightness=2.0, saturation=2.0), Format(16, *NO_NORM)
    )
    assert float(view.min()) >= 0
    assert float(view.max()) <= 1 + 1e-6
