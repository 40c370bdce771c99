import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from certvol.data.augment import cache_size, centre_view, train_view, warp_matrices
from support.images import Format
from support.views import NO_NORM, draw, noise, photo, pixels, plain


@pytest.mark.parametrize(
    ("image_size", "side"), [(224, 256), (299, 343), (32, 38), (8, 10), (28, 32)]
)
def test_the_cached_square_is_larger_by_a_seventh_with_margins_of_whole_pixels(
    image_size: int, side: int
) -> None:
    assert cache_size(image_size) == side
    assert (side - image_size) % 2 == 0
    assert side >= image_size * 8 / 7


def test_the_test_view_is_the_exact_centre() -> None:
    images = noise(16, n=3)
    view = centre_view(images, Format(10))
    expected = (images[:, 3:13, 3:13].numpy() / 255 - Format.mean) / Format.std
    assert view.shape == (3, 3, 10, 10)
    assert view.dtype == torch.float32
    np.testing.assert_allclose(view.permute(0, 2, 3, 1).numpy(), expected, atol=1e-5)


def test_views_leave_the_cached_images_unchanged() -> None:
    images = noise(16)
    before = images.clone()
    centre_view(images, Format(16))
    train_view(images, plain(), Format(16))
    assert torch.equal(images, before)


def test_plain_parameters_give_the_image_itself() -> None:
    images = noise(16)
    assert torch.allclose(
        train_view(images, plain(), Format(16)), centre_view(images, Format(16)), atol=1e-3
    )


@pytest.mark.parametrize(("share", "offset"), [(0.0, 0), (0.5, 3), (0.99, 6), (1.0, 6)])
def test_the_view_is_an_exact_slice_at_whole_pixels(share: float, offset: int) -> None:
    images = noise(16)
    view = train_view(images, plain(view_x=share, view_y=0.0), Format(10, *NO_NORM))
    np.testing.assert_allclose(
        pixels(view), images[0, :10, offset : offset + 10].numpy(), atol=0.05
    )


def test_shift_by_whole_pixels_moves_right_and_down() -> None:
    images = noise(16)
    view = train_view(images, plain(shift_x=2 / 16, shift_y=3 / 16), Format(16, *NO_NORM))
    np.testing.assert_allclose(pixels(view)[3:, 2:], images[0, :-3, :-2].numpy(), atol=0.05)


def test_flip_equals_numpys() -> None:
    images = noise(16)
    view = train_view(images, plain(flip=1.0), Format(16, *NO_NORM))
    np.testing.assert_allclose(pixels(view), images[0].numpy()[:, ::-1], atol=0.05)


def test_quarter_turn_equals_numpys() -> None:
    images = noise(16)
    view = train_view(images, plain(rotation=math.pi / 2), Format(16, *NO_NORM))
    np.testing.assert_allclose(pixels(view), np.rot90(images[0].numpy()), atol=0.05)


def test_outside_an_image_lies_its_reflection() -> None:
    images = noise(16)
    view = train_view(images, plain(shift_x=3 / 16), Format(16, *NO_NORM))
    np.testing.assert_allclose(pixels(view)[:, :3], images[0, :, :3].numpy()[:, ::-1], atol=0.05)


@pytest.mark.parametrize("corner", [(0.0, 0.0), (1.0, 0.5)])
def test_crop_of_half_the_side_equals_pillows_resize_of_that_box(
    corner: tuple[float, float],
) -> None:
    images = photo(32)
    view = train_view(
        images,
        plain(crop_width=0.5, crop_height=0.5, crop_x=corner[0], crop_y=corner[1]),
        Format(32, *NO_NORM),
    )
    left, top = corner[0] * 16, corner[1] * 16
    box = (left, top, left + 16, top + 16)
    expected = Image.fromarray(images[0].numpy()).resize(
        (32, 32), Image.Resampling.BILINEAR, box=box
    )
    inner = slice(2, -2)  # at the box's edge Pillow repeats the border
    assert np.abs(pixels(view) - np.asarray(expected, dtype=float))[inner, inner].max() < 1.1


def test_scale_by_two_equals_pillows_resize_of_the_middle() -> None:
    images = photo(32)
    view = train_view(images, plain(scale=2.0), Format(32, *NO_NORM))
    expected = Image.fromarray(images[0].numpy()).resize(
        (32, 32), Image.Resampling.BILINEAR, box=(8, 8, 24, 24)
    )
    assert np.abs(pixels(view) - np.asarray(expected, dtype=float))[2:-2, 2:-2].max() < 1.1


@pytest.mark.parametrize("degrees", [10.0, -25.0])
def test_rotation_equals_pillows(degrees: float) -> None:
    images = photo(48)
    view = train_view(images, plain(rotation=math.radians(degrees)), Format(48, *NO_NORM))
    expected = Image.fromarray(images[0].numpy()).rotate(degrees, Image.Resampling.BILINEAR)
    inner = slice(12, -12)
    assert np.abs(pixels(view) - np.asarray(expected, dtype=float))[inner, inner].max() < 1.1


def test_the_whole_warp_equals_pillows_affine_transform() -> None:
    images = photo(64, n=6)
    parameters = draw(6, grey=0.0, jitter=0.0)
    view = train_view(images, parameters, Format(56, *NO_NORM))
    matrices = warp_matrices(parameters, 64, 56)
    for k in range(6):
        coefficients = matrices[k].flatten().tolist()
        image = Image.fromarray(images[k].numpy())
        expected = image.transform(
            (56, 56), Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR
        )
        inside = Image.new("L", (64, 64), 255)
        mask = (
            np.asarray(
                inside.transform(
                    (56, 56), Image.Transform.AFFINE, coefficients, Image.Resampling.NEAREST
                )
            )
            > 0
        )
        # Pillow leaves the outside black and repeats the border in the outermost half pixel.
        mask[1:-1, 1:-1] &= mask[:-2, 1:-1] & mask[2:, 1:-1] & mask[1:-1, :-2] & mask[1:-1, 2:]
        mask[[0, -1]] = mask[:, [0, -1]] = False
        assert mask.mean() > 0.5
        assert np.abs(pixels(view[k : k + 1]) - np.asarray(expected, dtype=float))[mask].max() < 1.1


def test_the_matrix_undoes_the_steps_one_after_another() -> None:
    side, out_size, parameters = 64, 56, draw(20)
    matrices = warp_matrices(parameters, side, out_size).numpy()
    points = np.random.default_rng(0).uniform(0, side, (30, 2))
    for k in range(20):
        p = {name: float(values[k]) for name, values in vars(parameters).items()}
        seen = []
        for x, y in points:
            # random resized crop: the box becomes the whole square
            x = (x - p["crop_x"] * (1 - p["crop_width"]) * side) / p["crop_width"]
            y = (y - p["crop_y"] * (1 - p["crop_height"]) * side) / p["crop_height"]
            # flip
            x = side - x if p["flip"] else x
            # scale, shear, rotate about the centre, then shift
            x, y = (x - side / 2) * p["scale"], (y - side / 2) * p["scale"]
            x = x - math.tan(p["shear"]) * y
            angle = p["rotation"]
            x, y = (
                math.cos(angle) * x + math.sin(angle) * y,
                -math.sin(angle) * x + math.cos(angle) * y,
            )
            x, y = x + side / 2 + p["shift_x"] * side, y + side / 2 + p["shift_y"] * side
            # random crop
            x, y = (
                x - math.floor(p["view_x"] * (side - out_size + 1)),
                y - math.floor(p["view_y"] * (side - out_size + 1)),
            )
            seen.append((x, y, 1.0))
        np.testing.assert_allclose(np.array(seen) @ matrices[k].T, points, atol=1e-4)


def test_each_image_has_its_own_parameters() -> None:
    images = photo(24, n=5)
    parameters = draw(5)
    together = train_view(images, parameters, Format(20))
    for k in range(5):
        alone = train_view(images[k : k + 1], parameters[k : k + 1], Format(20))
        assert torch.allclose(together[k], alone[0], atol=1e-5)
    same_image = train_view(images[:1].expand(5, -1, -1, -1), parameters, Format(20))
    assert not any(torch.allclose(same_image[0], same_image[k], atol=1e-2) for k in range(1, 5))


def test_parameters_can_be_sliced_and_picked() -> None:
    parameters = draw(8)
    assert len(parameters[2:6]) == 4
    assert torch.equal(parameters[2:6].rotation, parameters.rotation[2:6])
    assert torch.equal(parameters[torch.tensor([5, 1])].hue, parameters.hue[[5, 1]])


def test_parameters_lie_within_their_bounds_and_fill_them() -> None:
    p = draw(20_000)
    area, aspect = p.crop_width * p.crop_height, p.crop_width / p.crop_height
    assert float(area.min()) >= 0.75 - 1e-5
    assert float(area.min()) < 0.755
    assert float(area.max()) <= 1
    assert float(p.crop_width.max()) <= 1
    assert float(p.crop_height.max()) <= 1
    assert float(aspect.min()) >= 0.75 - 1e-5
    assert float(aspect.max()) <= 4 / 3 + 1e-5
    assert float(aspect.max()) > 1.3
    limits = {
        "rotation": math.radians(10),
        "shear": math.radians(10),
        "shift_x": 0.025,
        "shift_y": 0.025,
    }
    for name, limit in {**limits, "hue": 0.05 * 2 * math.pi}.items():
        values = getattr(p, name)
        assert 0.99 * limit < float(values.abs().max()) <= limit * 1.0001
        assert abs(float(values.mean())) < 0.02 * limit
    for name, limit in {
        "scale": 0.025,
        "brightness": 0.05,
        "contrast": 0.05,
        "saturation": 0.05,
    }.items():
        values = getattr(p, name) - 1
        assert 0.99 * limit < float(values.abs().max()) <= limit * 1.0001
    assert float(p.flip.mean()) == pytest.approx(0.5, abs=0.02)
    assert float(p.grey.mean()) == pytest.approx(0.2, abs=0.02)
    for name in ("crop_x", "crop_y", "view_x", "view_y"):
        assert 0 <= float(getattr(p, name).min()) < 0.01
        assert 0.99 < float(getattr(p, name).max()) <= 1
    tensors = list(vars(p).values())
    assert all(t.shape == (20_000,) and t.dtype == torch.float32 for t in tensors)
    # independent of each other
    assert (
        float(
            torch.corrcoef(torch.stack(tensors[2:]))[~torch.eye(15, dtype=torch.bool)].abs().max()
        )
        < 0.04
    )


def test_settings_of_zero_switch_everything_off() -> None:
    zeros: dict[str, Any] = dict.fromkeys(
        ("rotate", "shear", "shift", "scale", "grey", "jitter"), 0.0
    )
    images = noise(16, n=4)
    view = train_view(images, draw(4, crop_area=1.0, flip=False, **zeros), Format(16))
    assert torch.allclose(view, centre_view(images, Format(16)), atol=1e-3)


def test_extreme_settings_stay_finite() -> None:
    parameters = draw(
        64,
        crop_area=0.01,
        crop_aspect=9.0,
        rotate=360.0,
        shear=90.0,
        shift=2.0,
        scale=5.0,
        jitter=3.0,
    )
    assert train_view(photo(16, n=64), parameters, Format(14)).isfinite().all()


def test_only_the_generator_decides_the_choices() -> None:
    torch.manual_seed(1)
    first = draw(6, seed=3)
    torch.manual_seed(2)
    second, other = draw(6, seed=3), draw(6, seed=4)
    for name, values in vars(first).items():
        assert torch.equal(values, getattr(second, name))
    assert not torch.equal(first.rotation, other.rotation)
    images = photo(16, n=6)
    assert torch.equal(
        train_view(images, first, Format(12)), train_view(images, second, Format(12))
    )


def test_one_setting_leaves_the_other_choices_alone() -> None:
    with_flip, without = draw(50), draw(50, flip=False, rotate=0.0)
    assert torch.equal(with_flip.crop_width, without.crop_width)
    assert torch.equal(with_flip.hue, without.hue)
    assert float(without.flip.sum()) == 0


def test_mixed_precision_does_not_blur_the_view() -> None:
    images, parameters = noise(64, n=2), draw(2)
    plain_view = train_view(images, parameters, Format(56))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed_view = train_view(images, parameters, Format(56))
    assert mixed_view.dtype == torch.float32
    assert torch.equal(plain_view, mixed_view)


def test_invalid_images_are_refused() -> None:
    with pytest.raises(ValueError, match="uint8"):
        centre_view(torch.zeros(1, 8, 8, 3), Format(8))
    with pytest.raises(ValueError, match="does not fit"):
        centre_view(noise(8), Format(9))
    with pytest.raises(ValueError, match="parameters of 2 images"):
        train_view(noise(8), plain(2), Format(8))
