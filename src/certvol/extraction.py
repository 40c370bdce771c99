"""Features of images through a frozen backbone: several views of each, computed once and kept in the cache.

View 0 is the test view, the others are augmented. Which views an image gets does not depend on the run's seed, so that runs
of all methods and seeds share one extraction; a run draws from them by its own seed.
"""

import hashlib
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from certvol.config import SMALLEST_IMAGE, AugmentConfig, DataConfig, ModelConfig
from certvol.data.augment import cache_size, draw_parameters, test_view, train_view
from certvol.data.decoding import DECODER_VERSION
from certvol.data.domains import SourceImages, TargetImages, open_target, sort_keys
from certvol.data.feature_cache import open_features
from certvol.data.feature_files import check_place, write_features
from certvol.data.folders import class_level, class_of, printable, scan
from certvol.environment import pick_device
from certvol.errors import UserError
from certvol.inference import mixed_precision
from certvol.nn import norm
from certvol.nn.backbones import BackboneInfo, features_dim
from certvol.nn.network import seeded_backbone
from certvol.reporting import Progress, Reporter, Silent
from certvol.seeding import torch_generator

CHUNK = 64  # images between two lines of the cache's journal: what a kill can cost
VERSION = 1


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
    views: int,
    augment: AugmentConfig,
    data: DataConfig,
    device: torch.device,
    bf16: bool = False,
    progress: Progress | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """(features of images x views x D in the order of their content, the row of each of `images`).

    The order of content makes the features the same whatever folders the images lie in, as source or as target."""
    views = views if augment.enabled else 1
    order = np.lexsort(sort_keys(images.hashes))
    rows = np.empty(len(order), dtype=np.int64)
    rows[order] = np.arange(len(order))
    about = (
        VERSION,
        DECODER_VERSION,
        info,
        views,
        asdict(augment) if views > 1 else None,
        data.max_megapixels,
        device.type,
        bf16,
        CHUNK,
    )
    key = hashlib.blake2b(f"certvol features {about} {weights_digest(backbone)}\0".encode(), digest_size=16)
    key.update(images.hashes[order].tobytes())
    pixel_rows = images.rows[order]

    def compute(start: int, stop: int) -> NDArray[np.float32]:
        pixels = torch.from_numpy(images.pixels[pixel_rows[start:stop]]).to(device)
        found = np.empty((stop - start, views, info.dim), dtype=np.float32)
        for view in range(views):
            found[:, view] = _forward(backbone, _view(pixels, view, start, info, augment), bf16)
        return found

    was_training = backbone.training
    backbone.eval()
    try:
        features = open_features(key.hexdigest(), (len(order), views, info.dim), compute, CHUNK, data, progress)
    finally:
        backbone.train(was_training)
    return features, rows


def _view(pixels: Tensor, view: int, start: int, info: BackboneInfo, augment: AugmentConfig) -> Tensor:
    if view == 0:
        images = test_view(pixels, info.image_size, info.mean, info.std)
    else:
        parameters = draw_parameters(len(pixels), augment, torch_generator("cpu", 0, "extract.views", start, view))
        images = train_view(pixels, parameters, info.image_size, info.mean, info.std)
    return images.contiguous(memory_format=torch.channels_last)


def _forward(backbone: nn.Module, images_NCHW: Tensor, bf16: bool) -> NDArray[np.float32]:
    with torch.inference_mode(), mixed_precision(images_NCHW.device, bf16):
        features: NDArray[np.float32] = backbone(images_NCHW).float().cpu().numpy()
    return features


def extract(
    folder: str | Path,
    out: str | Path,
    backbone: str,
    weights: str | None = None,
    *,
    image_size: int | None = None,
    views: int = 1,
    device: str = "auto",
    reporter: Reporter | None = None,
) -> int:
    """Writes the features of a folder's images to the file `out`, with labels where every image lies in a class folder.

    `views`: beside the test view, as many augmented ones as make this number. Gives the number of images."""
    check_place(Path(out))
    if features_dim(backbone) is not None or views < 1:
        raise UserError("expected a backbone for images and one view or more")
    if image_size is not None and image_size < SMALLEST_IMAGE:
        raise UserError(f"the image size should be {SMALLEST_IMAGE} pixels or more, found {image_size}")
    data, augment, place = DataConfig(), AugmentConfig(), pick_device(device)
    if not Path(folder).is_dir():
        scan(folder)
    module, info = seeded_backbone(ModelConfig(backbone=backbone, weights=weights), image_size, 0)
    # As a run with model.train head has it, so that both share the cache.
    norm.install(module, norm.Domains(mode="frozen"))
    images = open_target(folder, cache_size(info.image_size), data, reporter)
    for path, reason in images.failures[:5]:
        (reporter or Silent()).warn(f"skipped {printable(path)}: {reason}")
    features, rows = extract_features(module.to(place), info, images, views, augment, data, place, False, reporter)
    level = class_level(images.paths)
    names = [class_of(path, level) for path in images.paths]
    labels = [name for name in names if name is not None]
    about = f"{info.name} at {info.image_size} px, weights {weights_digest(module)}"
    by_path = sorted(range(len(images.paths)), key=images.paths.__getitem__)
    chosen = features[rows[by_path]] if views > 1 else features[rows[by_path], 0]
    write_features(
        Path(out),
        chosen,
        [images.paths[i] for i in by_path],
        [labels[i] for i in by_path] if len(labels) == len(names) else None,
        about,
    )
    return len(by_path)
