"""Turn cached images into what the network sees: a random view for training, the centre for tests.

The random view is the authors': random resized crop, horizontal flip, affine map about the centre,
random crop of the network's size, grey or colour jitter. All of its geometry is one affine map from
the view's pixels to the image's, so each image is interpolated only once; all of its colour is one
3 x 3 matrix and one offset.

Coordinates are continuous: a pixel's centre lies at (column + 0.5, row + 0.5), an image of side S
spans 0..S, y points down. N images, S side of the cached square, H = W side of the view, C = 3
channels.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from certvol.settings import AugmentConfig

# As in torchvision, so that crops have the same distribution as in the authors' release.
CROP_ATTEMPTS = 10
Triple = tuple[float, float, float]
_LUMA = (0.299, 0.587, 0.114)  # ITU-R 601, as in Pillow's grey conversion


class InputFormat(Protocol):
    """The input of a network: the side in pixels, and how channels are normalised."""

    @property
    def image_size(self) -> int: ...
    @property
    def mean(self) -> Triple: ...
    @property
    def std(self) -> Triple: ...


def cache_size(image_size: int, view_set: str = "random") -> int:
    """Return the side of the cached square: 8/7 of the input's, with margins of whole pixels.

    For shifted crops it is 9/7 of the input's: 288 px for crops of 224 px.
    """
    if view_set == "shifted":
        return image_size + (len(SHIFTS) - 1) * _shift(image_size)
    side = -(-image_size * 8 // 7)
    return side + (side - image_size) % 2


SHIFTS = (0, 1, 2)  # in either direction, in steps of a seventh of the view's side


def _shift(image_size: int) -> int:
    return round(image_size / 7)


@dataclass(frozen=True)
class WarpParameters:
    """The random choices for N images of any size; each is [N], float32, on the CPU."""

    crop_width: Tensor  # share of the side
    crop_height: Tensor
    crop_x: Tensor  # share of the free room that is left of the crop
    crop_y: Tensor  # share of it that is above
    flip: Tensor  # 1 or 0
    rotation: Tensor  # radians, counter-clockwise as seen
    shear: Tensor  # radians, of vertical lines
    shift_x: Tensor  # share of the side, to the right
    shift_y: Tensor  # share of the side, down
    scale: Tensor  # above 1 enlarges
    view_x: Tensor  # 0..1, place of the view in the square, left to right
    view_y: Tensor  # top to bottom
    grey: Tensor  # 1 or 0; 1 switches off the jitter below
    brightness: Tensor  # factor
    contrast: Tensor  # factor
    saturation: Tensor  # factor
    hue: Tensor  # radians on the colour circle

    def __len__(self) -> int:
        return len(self.flip)

    def __getitem__(self, index: slice | Tensor | list[int]) -> "WarpParameters":
        return WarpParameters(**{name: values_N[index] for name, values_N in vars(self).items()})


def draw_parameters(n: int, config: AugmentConfig, generator: torch.Generator) -> WarpParameters:
    """Draw every image's choices.

    All settings consume the same random numbers, so changing one leaves the other choices alone.
    The number of columns must not change either: a new augmentation draws its own with a second
    call of `torch.rand`, at the end. Then views without it stay the same.
    """
    uniform_NK = torch.rand(n, 15 + 2 * CROP_ATTEMPTS, generator=generator)
    columns = iter(uniform_NK[:, 2 * CROP_ATTEMPTS :].unbind(1))

    def share() -> Tensor:
        return next(columns).clone()

    def either_way(limit: float) -> Tensor:
        return (2 * next(columns) - 1) * limit

    def factor(limit: float, smallest: float = 0.0) -> Tensor:
        return (1 + either_way(limit)).clamp_min(smallest)

    crop_NK = uniform_NK[:, : 2 * CROP_ATTEMPTS]
    area_NA, aspect_NA = crop_NK[:, :CROP_ATTEMPTS], crop_NK[:, CROP_ATTEMPTS:]
    width_N, height_N = _crop_shape(area_NA, aspect_NA, config)
    return WarpParameters(
        crop_width=width_N,
        crop_height=height_N,
        crop_x=share(),
        crop_y=share(),
        flip=(share() < (0.5 if config.flip else 0.0)).float(),
        rotation=either_way(math.radians(config.rotate)),
        # A shear of 90 degrees or a scale of 0 has no inverse.
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
    )


def _crop_shape(area_NA: Tensor, aspect_NA: Tensor, config: AugmentConfig) -> tuple[Tensor, Tensor]:
    """Return width and height of the first of A attempts that fits, or of the whole image."""
    area_NA = config.crop_area + (1 - config.crop_area) * area_NA
    half_log_aspect_NA = (2 * aspect_NA - 1) * (abs(math.log(config.crop_aspect)) / 2)
    width_NA = area_NA.sqrt() * half_log_aspect_NA.exp()
    height_NA = area_NA.sqrt() * (-half_log_aspect_NA).exp()
    whole_N1 = torch.ones(len(area_NA), 1)
    fits_NA = torch.cat([(width_NA <= 1) & (height_NA <= 1), whole_N1.bool()], dim=1)
    first_N1 = fits_NA.int().argmax(dim=1, keepdim=True)  # the first of several equal maxima
    width_N1, height_N1 = (
        torch.cat([size_NA, whole_N1], dim=1).gather(1, first_N1)
        for size_NA in (width_NA, height_NA)
    )
    return width_N1.squeeze(1), height_N1.squeeze(1)


def warp_matrices(parameters: WarpParameters, side: int, out_size: int) -> Tensor:
    """Return [N, 2, 3] in float64: from (x, y, 1) of the view to the image, both in pixels.

    A view is made by crop, flip, affine map and second crop, so its coordinates go through the
    inverses of these, the last one first.
    """
    p = {name: values_N.double() for name, values_N in vars(parameters).items()}
    room = side - out_size
    # Whole pixels, each place equally likely; the clamp is for a share of exactly 1.
    offset_x = (p["view_x"] * (room + 1)).floor().clamp_max(room)
    offset_y = (p["view_y"] * (room + 1)).floor().clamp_max(room)
    undo_view_N33 = _affine(1.0, 0.0, offset_x, 0.0, 1.0, offset_y)

    centre = side / 2
    cos, sin, tan = p["rotation"].cos(), p["rotation"].sin(), p["shear"].tan()
    # Inverse of rotation * shear * scale about the centre, then shift. y points down, so
    # counter-clockwise is (cos, sin; -sin, cos).
    unscale = 1 / p["scale"]
    a, b = (cos + tan * sin) * unscale, (-sin + tan * cos) * unscale
    d, e = sin * unscale, cos * unscale
    from_x, from_y = centre + p["shift_x"] * side, centre + p["shift_y"] * side
    c, f = centre - a * from_x - b * from_y, centre - d * from_x - e * from_y
    undo_affine_N33 = _affine(a, b, c, d, e, f)

    flip = p["flip"]
    undo_flip_N33 = _affine(1 - 2 * flip, 0.0, flip * side, 0.0, 1.0, torch.zeros_like(flip))

    width, height = p["crop_width"], p["crop_height"]
    left, top = p["crop_x"] * (1 - width) * side, p["crop_y"] * (1 - height) * side
    undo_crop_N33 = _affine(width, 0.0, left, 0.0, height, top)
    return (undo_crop_N33 @ undo_flip_N33 @ undo_affine_N33 @ undo_view_N33)[:, :2]


def _affine(
    a: Tensor | float, b: Tensor | float, c: Tensor, d: Tensor | float, e: Tensor | float, f: Tensor
) -> Tensor:
    """Return [N, 3, 3] that maps x, y to a x + b y + c, d x + e y + f."""
    entries = (a, b, c, d, e, f, 0.0, 0.0, 1.0)
    columns = [torch.as_tensor(entry, dtype=torch.float64).expand(len(c)) for entry in entries]
    return torch.stack(columns, dim=1).reshape(-1, 3, 3)


def _hue_generator() -> Tensor:
    """Return K that turns a colour about the grey axis in YIQ space.

    The turned colour is grey + cos(angle) (colour - grey) + sin(angle) K colour.
    """
    yiq = [_LUMA, (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112)]
    quarter_turn = [[0.0, 0.0, 0.0], [0.0, 0.0, -1.0], [0.0, 1.0, 0.0]]
    yiq_33, quarter_turn_33 = (
        torch.tensor(rows, dtype=torch.float64) for rows in (yiq, quarter_turn)
    )
    return torch.as_tensor(torch.linalg.inv(yiq_33) @ quarter_turn_33 @ yiq_33)


_GREY_33 = torch.tensor([_LUMA] * 3, dtype=torch.float64)
_HUE_33 = _hue_generator()


def colour_matrices(parameters: WarpParameters) -> tuple[Tensor, Tensor]:
    """Return [N, 3, 3] and [N] in float64: matrix @ colour + factor * (mean grey of the view).

    They apply brightness, contrast (about the mean grey), saturation and hue in this order, or
    grey. Hue turns about the grey axis at constant luma, which is linear, unlike HSV's hue.
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
    images_u8_NSSC: Tensor, parameters: WarpParameters, info: InputFormat, fused: bool = False
) -> Tensor:
    """Return [N, 3, H, H], float32, normalised: each image under its own parameters.

    An image continues as its own reflection: black corners or a repeated border would be edges that
    no test image has. `fused` uses torch.compile, for a constant number of images. The call never
    waits for the device.
    """
    _check_images(images_u8_NSSC, info)
    n, side = images_u8_NSSC.shape[:2]
    if len(parameters) != n:
        raise ValueError(f"parameters of {len(parameters)} images for {n} images")
    # Small matrices are computed on the host in float64 and travel together.
    warp_N23 = _between_units(
        warp_matrices(parameters, side, info.image_size), side, info.image_size
    )
    colour_N33, from_mean_N = colour_matrices(parameters)
    per_std_3 = 1 / (255 * torch.tensor(info.std, dtype=torch.float64))
    matrix_N33, from_mean_N3 = colour_N33 * per_std_3[:, None], from_mean_N[:, None] * per_std_3
    packed_NK = torch.cat([warp_N23.flatten(1), matrix_N33.flatten(1), from_mean_N3], dim=1)
    packed_NK = packed_NK.float().to(images_u8_NSSC.device, non_blocking=True)

    warp = _compiled_warp() if fused else _warp
    return warp(images_u8_NSSC, packed_NK, info.image_size, info.mean, info.std)


@functools.cache
def _compiled_warp() -> Callable[..., Tensor]:
    compiled: Callable[..., Tensor] = torch.compile(_warp, dynamic=False)
    return compiled


def _warp(
    images_u8_NSSC: Tensor, packed_NK: Tensor, out_size: int, mean: Triple, std: Triple
) -> Tensor:
    """Warp and recolour; `packed_NK` holds 2 x 3 warp, 3 x 3 colour and 3 mean grey entries."""
    # Half precision and TF32 would move coordinates by a pixel, so autocast is off, and sums of
    # products replace matrix products.
    with torch.autocast(images_u8_NSSC.device.type, enabled=False):
        grid_NHW2 = _grid(packed_NK[:, :6].reshape(-1, 2, 3), out_size)
        images_NCSS = images_u8_NSSC.permute(0, 3, 1, 2).float()
        view_NCHW = F.grid_sample(
            images_NCSS, grid_NHW2, "bilinear", "reflection", align_corners=False
        )
        matrix_N33 = packed_NK[:, 6:15].reshape(-1, 3, 3)
        return _recolour(view_NCHW, matrix_N33, packed_NK[:, 15:], mean, std)


def centre_view(images_u8_NSSC: Tensor, info: InputFormat) -> Tensor:
    """Return the centre as normalised float32 [N, 3, H, H]; half a pixel off if a margin is odd."""
    _check_images(images_u8_NSSC, info)
    start = (images_u8_NSSC.shape[1] - info.image_size) // 2
    inner = slice(start, start + info.image_size)
    centre_NHWC = images_u8_NSSC[:, inner, inner]
    scale_3, offset_3 = _scale_and_offset(info.mean, info.std, images_u8_NSSC.device)
    return torch.addcmul(offset_3, centre_NHWC.float(), scale_3).permute(0, 3, 1, 2)


def shifted_views(images_u8_NSSC: Tensor, info: InputFormat) -> Iterator[Tensor]:
    """Yield 18 views [N, 3, H, H]: crops at 3 x 3 places, each as it is and mirrored.

    The images have the size `cache_size(info.image_size, "shifted")`.
    """
    for crop_NHHC in crops_at_shifts(images_u8_NSSC, info.image_size):
        view_NCHW = centre_view(crop_NHHC, info)
        yield view_NCHW
        yield view_NCHW.flip(3)


def crops_at_shifts(images_NSSC: Tensor, side: int) -> Iterator[Tensor]:
    """Yield the 9 crops [N, side, side, C] of images of the size for shifted views."""
    step = (images_NSSC.shape[1] - side) // (len(SHIFTS) - 1)
    for down in SHIFTS:
        for right in SHIFTS:
            rows = slice(down * step, down * step + side)
            yield images_NSSC[:, rows, right * step : right * step + side]


def _check_images(images_u8_NSSC: Tensor, info: InputFormat) -> None:
    kind, shape = images_u8_NSSC.dtype, list(images_u8_NSSC.shape)
    if kind != torch.uint8 or len(shape) != 4 or shape[1] != shape[2] or shape[3] != 3:
        raise ValueError(f"expected uint8 images [N, S, S, 3], found {kind} {shape}")
    if info.image_size > shape[1]:
        raise ValueError(
            f"a view of {info.image_size} px does not fit into images of {shape[1]} px"
        )


def _between_units(warp_N23: Tensor, side: int, out_size: int) -> Tensor:
    """Convert the map to coordinates that run from -1 to 1 over view and image."""
    linear_N22 = warp_N23[:, :, :2] * (out_size / side)
    offset_N2 = linear_N22.sum(dim=2) + warp_N23[:, :, 2] * (2 / side) - 1
    return torch.cat([linear_N22, offset_N2[:, :, None]], dim=2)


def _grid(warp_N23: Tensor, out_size: int) -> Tensor:
    """Return [N, H, W, 2]: where in the image to look for each pixel's centre of the view."""
    place_H = torch.arange(out_size, device=warp_N23.device, dtype=torch.float32)
    centres_H = (place_H * 2 + (1 - out_size)) / out_size
    x_1W1, y_H11 = centres_H.reshape(1, -1, 1), centres_H.reshape(-1, 1, 1)
    across, down, offset = (warp_N23[:, :, k].reshape(-1, 1, 1, 2) for k in range(3))
    return across * x_1W1 + (down * y_H11 + offset)


def _recolour(
    view_NCHW: Tensor, matrix_N33: Tensor, from_mean_N3: Tensor, mean: Triple, std: Triple
) -> Tensor:
    """Recolour and normalise at once; `matrix` and `from_mean` are divided by 255 std already."""
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
def _scale_and_offset(mean: Triple, std: Triple, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return what turns 0..255 into (value / 255 - mean) / std.

    The result is cached, because copying it to the device waits for the device.
    """
    with torch.inference_mode(False):
        means, stds = (torch.tensor(values, dtype=torch.float64) for values in (mean, std))
        return (1 / (255 * stds)).float().to(device), (-means / stds).float().to(device)
