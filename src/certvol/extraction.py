"""Features of images through a frozen backbone: several views of each, computed once and kept in the cache.

View 0 is the test view, the others are augmented. Which views an image gets does not depend on the run's seed, so that runs
of all methods and seeds share one extraction; a run draws from them by its own seed.
"""

import hashlib
from dataclasses import asdict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from certvol.config import AugmentConfig, DataConfig
from certvol.data.augment import draw_parameters, test_view, train_view
from certvol.data.domains import SourceImages, TargetImages, sort_keys
from certvol.data.feature_cache import open_features
from certvol.inference import mixed_precision
from certvol.nn.backbones import BackboneInfo
from certvol.reporting import Progress
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
