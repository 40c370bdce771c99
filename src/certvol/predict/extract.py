"""Extract features with a frozen backbone: several views of each image, computed once and cached.

View 0 is the test view, the others are augmented. The views do not depend on the run's seed, so
that runs of all methods and seeds share one extraction; each run draws from them by its own seed.
With `data.view_set shifted` there is one view: the mean features of shifted and mirrored crops.
"""

import hashlib
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from certvol.data.augment import (
    cache_size,
    centre_view,
    draw_parameters,
    shifted_views,
    train_view,
)
from certvol.data.cache import open_features
from certvol.data.decoding import DECODER_VERSION
from certvol.data.domains import SourceImages, TargetImages, open_target, sort_keys
from certvol.data.feature_files import check_name, write_features
from certvol.data.folders import class_level, class_of, printable, scan
from certvol.device import pick_device
from certvol.errors import UserError
from certvol.nn import norm
from certvol.nn.backbones import BackboneInfo, features_dim
from certvol.nn.network import seeded_backbone
from certvol.predict.forward import mixed_precision
from certvol.progress import Progress, Reporter, Silent
from certvol.randomness import torch_generator
from certvol.runs.outputs import check_output
from certvol.settings import AugmentConfig, Config

CHUNK = 64  # images between two saves: a kill loses at most these
VERSION = 2


def weights_digest(module: nn.Module) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def extract_features(
    backbone: nn.Module,
    info: BackboneInfo,
    images: SourceImages | TargetImages,
    config: Config,
    device: torch.device,
    progress: Progress | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return features, images x views x D, in the order of the images' content; and their rows.

    Because of the order, the features do not depend on the folders that the images lie in. Those of
    several sources are extracted one after the other, so that they are the same as those of each
    source alone. They have full precision unless the settings ask for bf16, because all steps use
    them.
    """
    if isinstance(images, SourceImages) and images.origins.any():
        found, rows, start = [], np.empty(len(images), dtype=np.int64), 0
        for number in np.unique(images.origins):
            own_N = np.flatnonzero(images.origins == number)
            part = replace(
                images,
                rows=images.rows[own_N],
                hashes=images.hashes[own_N],
                origins=np.zeros_like(own_N),
            )
            features, rows_N = extract_features(backbone, info, part, config, device, progress)
            rows[own_N] = start + rows_N
            start += len(own_N)
            found.append(features)
        return np.concatenate(found), rows
    augment, data, bf16 = config.augment, config.data, config.training.precision == "bf16"
    shifted = data.view_set == "shifted"
    views = data.views if augment.enabled and not shifted else 1
    order = np.lexsort(sort_keys(images.hashes))
    rows = np.empty(len(order), dtype=np.int64)
    rows[order] = np.arange(len(order))
    augmented = asdict(augment) if views > 1 else None
    versions, reading = (VERSION, DECODER_VERSION, info), (data.max_megapixels, device.type)
    about: tuple[object, ...] = (*versions, views, augmented, *reading, bf16, CHUNK)
    if shifted:
        about = (*about, data.view_set)
    text = f"certvol features {about} {weights_digest(backbone)}\0"
    key = hashlib.blake2b(text.encode(), digest_size=16)
    key.update(images.hashes[order].tobytes())
    pixel_rows = images.rows[order]

    def compute(start: int, stop: int) -> NDArray[np.float32]:
        pixels = torch.from_numpy(images.pixels[pixel_rows[start:stop]]).to(device)
        if shifted:
            return shifted_features(backbone, pixels, info, bf16)[:, None]
        found = np.empty((stop - start, views, info.dim), dtype=np.float32)
        for view in range(views):
            found[:, view] = _forward(backbone, _view(pixels, view, start, info, augment), bf16)
        return found

    was_training = backbone.training
    backbone.eval()
    shape = (len(order), views, info.dim)
    try:
        features = open_features(key.hexdigest(), shape, compute, CHUNK, data, progress)
    finally:
        backbone.train(was_training)
    return features, rows


def _view(
    pixels: Tensor, view: int, start: int, info: BackboneInfo, augment: AugmentConfig
) -> Tensor:
    if view == 0:
        return centre_view(pixels, info)
    generator = torch_generator("cpu", 0, "extract.views", start, view)
    return train_view(pixels, draw_parameters(len(pixels), augment, generator), info)


def _forward(backbone: nn.Module, images_NCHW: Tensor, bf16: bool) -> NDArray[np.float32]:
    images_NCHW = images_NCHW.contiguous(memory_format=torch.channels_last)
    with torch.inference_mode(), mixed_precision(images_NCHW.device, bf16):
        features: NDArray[np.float32] = backbone(images_NCHW).float().cpu().numpy()
    return features


def shifted_features(
    backbone: nn.Module, pixels: Tensor, info: BackboneInfo, bf16: bool = False
) -> NDArray[np.float32]:
    """Return the mean features of the shifted views of uint8 images, N x D."""
    found = [_forward(backbone, view, bf16) for view in shifted_views(pixels, info)]
    return np.asarray(np.mean(found, axis=0, dtype=np.float32))


def extract(
    folder: str | Path, out: str | Path, config: Config, reporter: Reporter | None = None
) -> int:
    """Write the features of a folder's images to the file `out` and return the number of images.

    Labels are written too if every image lies in a class folder.
    """
    data, device, reporter = config.data, pick_device(config.training.device), reporter or Silent()
    check_name(Path(out))
    check_output(out, replaces_features=True)
    if features_dim(config.model.backbone) is not None:
        raise UserError(f"`{config.model.backbone}` takes features; name a backbone for images")
    if not Path(folder).is_dir():
        scan(folder)  # raises an error with the reason
    module, info = seeded_backbone(config.model, data.image_size, 0)
    # As in a run with `model.train head`, so that both share the cache.
    norm.install(module, norm.Domains(mode="frozen"))
    images = open_target(folder, cache_size(info.image_size, data.view_set), data, reporter)
    for path, reason in images.failures[:5]:
        reporter.warn(f"skipped {printable(path)}: {reason}")
    features, rows = extract_features(module.to(device), info, images, config, device, reporter)
    by_path = sorted(range(len(images.paths)), key=images.paths.__getitem__)
    paths = [images.paths[i] for i in by_path]
    level = class_level(paths)
    labels = [label for path in paths if (label := class_of(path, level)) is not None]
    several = data.views > 1 and data.view_set == "random"
    chosen = features[rows[by_path]] if several else features[rows[by_path], 0]
    about = f"{info.name} at {info.image_size} px, weights {weights_digest(module)}"
    if data.view_set == "shifted":
        about += ", mean of shifted views"
    write_features(Path(out), chosen, paths, labels if len(labels) == len(paths) else None, about)
    return len(paths)
