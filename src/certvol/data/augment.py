"""What the network sees of a cached image: a random view for training, the centre for testing.

The random view is the authors': random resized crop, horizontal flip, affine map about the centre, random crop of the network's
size, grey or colour jitter. All of its geometry is one affine map from the view's pixels to the image's, so that each image is
interpolated once only; all of its colour is one 3 x 3 matrix and one offset.

Coordinates are continuous: a pixel's centre lies at (column + 0.5, row + 0.5), an image of side S spans 0..S, y points down.
N images, S side of the cached square, H = W side of the view, C = 3 channels.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from certvol.config import AugmentConfig

CROP_ATTEMPTS = 10  # torchvision's number, so that areas and aspects are distributed as in the authors' release

_LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, as in Pillow's grey conversion


def cache_size(image_size: int) -> int:
    """Side of the cached square for a network's input side: 8/7 of it (256 for 224), with margins of whole pixels."""
    side = -(-image_size * 8 // 7)
    return side + (side - image_size) % 2


@dataclass(frozen=True)
class WarpParameters:
    """The random choices for N images; each tensor is [N], float32, on the CPU. Independent of the images' size."""

    crop_width: Tensor  # share of the side
    crop_height: Tensor
    crop_x: Tensor  # share of the free room left of the crop
    crop_y: Tensor
    flip: Tensor  # 1 or 0
    rotation: Tensor  # radians, counter-clockwise as seen
    shear: Tensor  # radians, of vertical lines
    shift_x: Tensor  # share of the side, to the right
    shift_y: Tensor  # share of the side, down
    scale: Tensor  # above 1 enlarges
    view_x: Tensor  # 0..1, place of the view in the square, left to right
    view_y: Tensor
    grey: Tensor  # 1 or 0; where 1, the jitter below does not count
    brightness: Tensor  # factor
    contrast: Tensor  # factor
    saturation: Tensor  # factor
    hue: Tensor  # radians on the colour circle
    enabled: bool = True
    """Where false, the training view is the test view, exactly."""

    def __len__(self) -> int:
        return len(self.flip)

    def __getitem__(self, index: slice | Tensor | list[int]) -> "WarpParameters":
        tensors = {f.name: getattr(self, f.name)[index] for f in fields(self) if f.name != "enabled"}
        return WarpParameters(**tensors, enabled=self.enabled)


def draw_parameters(n: int, config: AugmentConfig, generator: torch.Generator) -> WarpParameters:
    """Every image its own choices. Consumes the same amount of randomness whatever the settings, so that changing one setting
    leaves all other choices as they were."""
    uniform_NK = torch.rand(n, 15 + 2 * CROP_ATTEMPTS, generator=generator)
    columns = iter(uniform_NK[:, 2 * CROP_ATTEMPTS :].unbind(1))

    def share() -> Tensor:
        return next(columns).clone()

    def either_way(limit: float) -> Tensor:
        return (2 * next(columns) - 1) * limit

    def factor(limit: float, smallest: float = 0.0) -> Tensor:
        return (1 + either_way(limit)).clamp_min(smallest)

    width_N, height_N = _crop_shape(
        uniform_NK[:, :CROP_ATTEMPTS], uniform_NK[:, CROP_ATTEMPTS : 2 * CROP_ATTEMPTS], config
    )
    return WarpParameters(
        crop_width=width_N,
        crop_height=height_N,
        crop_x=share(),
        crop_y=share(),
        flip=(share() < (0.5 if config.flip else 0.0)).float(),
        rotation=either_way(math.radians(config.rotate)),
        # At 90 degrees a shear, and at 0 a scale, could not be inverted.
        shear=either_way(math.radians(min(config.shear, 80.0))),
        shift_x=either_way(config.shift),
        shift_y=either_way(config.shift),
        scale=factor(config.scale, smallest=0.05),
        view_x=share(),
        view_y=share(),
        grey=(share() < config.grey).float(),
        brightness=factor(config.jitter),
        contrast=factor(config.jitter),
        saturation=factor(config.jitter),
        hue=either_way(2 * math.pi * min(config.jitter, 0.5)),
        enabled=config.enabled,
    )


def _crop_shape(area_NA: Tensor, aspect_NA: Tensor, config: AugmentConfig) -> tuple[Tensor, Tensor]:
    """Width and height as shares of the side: of A attempts the first that fits into the image, else the whole image."""
    area_NA = config.crop_area + (1 - config.crop_area) * area_NA
    half_log_aspect_NA = (2 * aspect_NA - 1) * (abs(math.log(config.crop_aspect)) / 2)
    width_NA = area_NA.sqrt() * half_log_aspect_NA.exp()
    height_NA = area_NA.sqrt() * (-half_log_aspect_NA).exp()
    whole_N1 = torch.ones(len(area_NA), 1)
    fits_NA = torch.cat([(width_NA <= 1) & (height_NA <= 1), whole_N1.bool()], dim=1)
    first_N1 = fits_NA.int().argmax(dim=1, keepdim=True)  # of several equal maxima, argmax gives the first
    width_N = torch.cat([width_NA, whole_N1], dim=1).gather(1, first_N1).squeeze(1)
    height_N = torch.cat([height_NA, whole_N1], dim=1).gather(1, first_N1).squeeze(1)
    return width_N, height_N


def warp_matrices(parameters: WarpParameters, side: int, out_size: int) -> Tensor:
    """[N, 2, 3] in float64: coordinates (x, y, 1) of the view to coordinates of the image, both in pixels.

    The view is made by crop, flip, affine map, second crop; so its coordinates go back through their inverses, last one first.
    """
    p = {f.name: getattr(parameters, f.name).double() for f in fields(parameters) if f.name != "enabled"}
    room = side - out_size
    # Whole pixels, each place as likely as any other; the clamp is for a share of exactly 1.
    offset_x = (p["view_x"] * (room + 1)).floor().clamp_max(room)
    offset_y = (p["view_y"] * (room + 1)).floor().clamp_max(room)
    undo_view_N33 = _affine(1.0, 0.0, offset_x, 0.0, 1.0, offset_y)

    centre = side / 2
    cos, sin, tan = p["rotation"].cos(), p["rotation"].sin(), p["shear"].tan()
    # Inverse of rotation * shear * scale about the centre, then shift. y points down: counter-clockwise is (cos, sin; -sin, cos).
    unscale = 1 / p["scale"]
    a, b = (cos + tan * sin) * unscale, (-sin + tan * cos) * unscale
    d, e = sin * unscale, cos * unscale
    from_x, from_y = centre + p["shift_x"] * side, centre + p["shift_y"] * side
    undo_affine_N33 = _affine(a, b, centre - a * from_x - b * from_y, d, e, centre - d * from_x - e * from_y)

    undo_flip_N33 = _affine(1 - 2 * p["flip"], 0.0, p["flip"] * side, 0.0, 1.0, torch.zeros_like(p["flip"]))

    width, height = p["crop_width"], p["crop_height"]
    left, top = p["crop_x"] * (1 - width) * side, p["crop_y"] * (1 - height) * side
    undo_crop_N33 = _affine(width, 0.0, left, 0.0, height, top)
    return (undo_crop_N33 @ undo_flip_N33 @ undo_affine_N33 @ undo_view_N33)[:, :2]


def _affine(a: Tensor | float, b: Tensor | float, c: Tensor, d: Tensor | float, e: Tensor | float, f: Tensor) -> Tensor:
    """[N, 3, 3]: x, y to a x + b y + c, d x + e y + f. Each entry [N], or one number for all."""
    entries = (a, b, c, d, e, f, 0.0, 0.0, 1.0)
    columns = [torch.as_tensor(entry, dtype=torch.float64).expand(len(c)) for entry in entries]
    return torch.stack(columns, dim=1).reshape(-1, 3, 3)


def _hue_generator() -> Tensor:
    """K such that grey + cos(angle) (colour - grey) + sin(angle) K colour turns a colour about the grey axis, in YIQ space."""
    to_yiq_33 = torch.tensor([_LUMA, (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112)], dtype=torch.float64)
    quarter_turn_33 = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, -1.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
    generator_33: Tensor = torch.linalg.inv(to_yiq_33) @ quarter_turn_33 @ to_yiq_33
    return generator_33


_GREY_33 = torch.tensor([_LUMA] * 3, dtype=torch.float64)
_HUE_33 = _hue_generator()


def colour_matrices(parameters: WarpParameters) -> tuple[Tensor, Tensor]:
    """[N, 3, 3] and [N] in float64: a view's colours become matrix @ colour + factor * (mean grey value of the view).

    Brightness, contrast (about the mean grey value), saturation and hue in this order, or grey. Hue turns about the grey axis
    at constant luma, which is linear, where HSV's hue is not.
    """
    brightness, contrast, saturation, hue, grey = (
        getattr(parameters, name).double().reshape(-1, 1, 1)
        for name in ("brightness", "contrast", "saturation", "hue", "grey")
    )
    eye_33 = torch.eye(3, dtype=torch.float64)
    colour_33 = eye_33 - _GREY_33
    saturate_N33 = _GREY_33 + saturation * colour_33
    turn_N33 = _GREY_33 + hue.cos() * colour_33 + hue.sin() * _HUE_33
    jitter_N33 = turn_N33 @ saturate_N33 * (brightness * contrast)
    matrix_N33 = grey * _GREY_33 + (1 - grey) * jitter_N33
    # A grey offset passes saturation and hue unchanged.
    from_mean_N = ((1 - grey) * brightness * (1 - contrast)).reshape(-1)
    return matrix_N33, from_mean_N


def train_view(
    images_u8_NSSC: Tensor,
    parameters: WarpParameters,
    out_size: int,
    mean: Sequence[float],
    std: Sequence[float],
    fused: bool = False,
) -> Tensor:
    """[N, 3, H, H], float32, normalised: each image under its own parameters. Never waits for the device.

    What lies outside an image is its reflection: black corners or the streaks of a repeated border would be edges that no test
    image has. `fused`: through torch.compile, for a number of images that does not change.
    """
    _check_images(images_u8_NSSC, out_size)
    if not parameters.enabled:
        return test_view(images_u8_NSSC, out_size, mean, std)
    n, side = images_u8_NSSC.shape[:2]
    if len(parameters) != n:
        raise ValueError(f"parameters of {len(parameters)} images for {n} images")
    device = images_u8_NSSC.device
    # Small matrices are made on the host, in double precision, and travel together.
    warp_N23 = _between_units(warp_matrices(parameters, side, out_size), side, out_size)
    colour_N33, from_mean_N = colour_matrices(parameters)
    per_std_3 = 1 / (255 * torch.tensor(std, dtype=torch.float64))
    matrix_N33, from_mean_N3 = colour_N33 * per_std_3[:, None], from_mean_N[:, None] * per_std_3
    packed_NK = torch.cat([warp_N23.flatten(1), matrix_N33.flatten(1), from_mean_N3], dim=1)
    packed_NK = packed_NK.float().to(device, non_blocking=True)

    warp = _compiled_warp() if fused else _warp
    return warp(images_u8_NSSC, packed_NK, out_size, tuple(mean), tuple(std))


@functools.cache
def _compiled_warp() -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = torch.compile(_warp, dynamic=False)
    return compiled


def _warp(
    images_u8_NSSC: Tensor, packed_NK: Tensor, out_size: int, mean: tuple[float, ...], std: tuple[float, ...]
) -> Tensor:
    """`packed`: of each image the 2 x 3 entries of its warp, the 3 x 3 of its colours, 3 of its mean grey value."""
    n = len(images_u8_NSSC)
    # In half precision a coordinate would be off by a pixel; so no autocast, and no matrix product, which may be TF32.
    with torch.autocast(images_u8_NSSC.device.type, enabled=False):
        grid_NHW2 = _grid(packed_NK[:, :6].reshape(n, 2, 3), out_size)
        images_NCSS = images_u8_NSSC.permute(0, 3, 1, 2).float()
        view_NCHW = F.grid_sample(images_NCSS, grid_NHW2, "bilinear", "reflection", align_corners=False)
        return _recolour(view_NCHW, packed_NK[:, 6:15].reshape(n, 3, 3), packed_NK[:, 15:], mean, std)


def test_view(images_u8_NSSC: Tensor, out_size: int, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """[N, 3, H, H], float32, normalised: the centre, pixel for pixel (half a pixel off where the margin is odd)."""
    _check_images(images_u8_NSSC, out_size)
    start = (images_u8_NSSC.shape[1] - out_size) // 2
    centre_NHWC = images_u8_NSSC[:, start : start + out_size, start : start + out_size]
    scale_3, offset_3 = _scale_and_offset(tuple(mean), tuple(std), images_u8_NSSC.device)
    return torch.addcmul(offset_3, centre_NHWC.float(), scale_3).permute(0, 3, 1, 2)


test_view.__test__ = False  # type: ignore[attr-defined]  # its name would make pytest take it for a test


def _check_images(images_u8_NSSC: Tensor, out_size: int) -> None:
    shape = tuple(images_u8_NSSC.shape)
    if images_u8_NSSC.dtype != torch.uint8 or len(shape) != 4 or shape[1] != shape[2] or shape[3] != 3:
        raise ValueError(f"expected uint8 images [N, S, S, 3], found {images_u8_NSSC.dtype} {list(shape)}")
    if out_size > shape[1]:
        raise ValueError(f"a view of {out_size} pixels does not fit into cached images of {shape[1]}")


def _between_units(warp_N23: Tensor, side: int, out_size: int) -> Tensor:
    """The same map between coordinates that run from -1 to 1 over view and image."""
    linear_N22 = warp_N23[:, :, :2] * (out_size / side)
    offset_N2 = linear_N22.sum(dim=2) + warp_N23[:, :, 2] * (2 / side) - 1
    return torch.cat([linear_N22, offset_N2[:, :, None]], dim=2)


def _grid(warp_N23: Tensor, out_size: int) -> Tensor:
    """[N, H, W, 2]: for each pixel's centre of the view, where to look in the image."""
    centres = (torch.arange(out_size, device=warp_N23.device, dtype=torch.float32) * 2 + (1 - out_size)) / out_size
    x_1W1, y_H11 = centres.reshape(1, -1, 1), centres.reshape(-1, 1, 1)
    across, down, offset = (warp_N23[:, :, k].reshape(-1, 1, 1, 2) for k in range(3))
    return across * x_1W1 + (down * y_H11 + offset)


def _recolour(
    view_NCHW: Tensor, matrix_N33: Tensor, from_mean_N3: Tensor, mean: Sequence[float], std: Sequence[float]
) -> Tensor:
    """Colours and normalisation at once. `matrix` and `from_mean` are divided by 255 std already."""
    channel_means_NC = view_NCHW.mean(dim=(2, 3))
    mean_grey_N1 = sum(luma * channel_means_NC[:, c : c + 1] for c, luma in enumerate(_LUMA))
    offset_NC11 = (from_mean_N3 * mean_grey_N1)[:, :, None, None]
    out_NCHW = torch.addcmul(offset_NC11, matrix_N33[:, :, 0, None, None], view_NCHW[:, 0:1])
    for c in (1, 2):
        out_NCHW.addcmul_(matrix_N33[:, :, c, None, None], view_NCHW[:, c : c + 1])
    for c, (m, s) in enumerate(zip(mean, std, strict=True)):
        out_NCHW[:, c].clamp_(0, 1 / s).sub_(m / s)
    return out_NCHW


@functools.cache
def _scale_and_offset(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Of values 0..255, to (value / 255 - mean) / std. Kept, as each copy to a device would be waited for."""
    with torch.inference_mode(False):
        means, stds = torch.tensor(mean, dtype=torch.float64), torch.tensor(std, dtype=torch.float64)
        return (1 / (255 * stds)).float().to(device), (-means / stds).float().to(device)
