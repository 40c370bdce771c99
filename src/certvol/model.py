"""A run's model, ready to predict."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError
from torch import Tensor, nn

from certvol import methods
from certvol.config import Config, read_settings_file, resolve
from certvol.data.augment import cache_size, test_view
from certvol.data.decoding import UnreadableImage, decode, square
from certvol.data.feature_files import open_target_features
from certvol.data.folders import printable
from certvol.data.reading import read_file
from certvol.environment import pick_device
from certvol.errors import UserError
from certvol.inference import Outputs, run_batches
from certvol.methods.protocol import AdaptationMethod
from certvol.nn.backbones import BackboneInfo, features_dim
from certvol.nn.network import Network, seeded_backbone
from certvol.nn.norm import TARGET, Mode
from certvol.reporting import Reporter
from certvol.seeding import torch_seed
from certvol.training.checkpoint import load_into, load_tensors, read_about
from certvol.training.run_folder import RunFolder

PREDICT_BATCH = 256


def create_method(config: Config, backbone: nn.Module, info: BackboneInfo, num_classes: int) -> AdaptationMethod:
    """Heads and a method's extra networks start from the seed, whatever was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(config.training.seed, "heads"))
        network = Network(backbone, info, num_classes, config.model)
        return methods.discover()[config.method_name](network, config.method)


@dataclass(frozen=True)
class Prediction:
    """Of N images, in the order they were given."""

    labels: list[str]
    probabilities: NDArray[np.float32]
    """N x C, columns in the order of the model's `classes`."""
    sigma: NDArray[np.float32] | None
    """Certainty; None for a method without one."""


class Model:
    """A run's model, ready to predict. `classes`: the names of its labels, in order."""

    def __init__(self, method: AdaptationMethod, classes: list[str], config: Config, device: torch.device) -> None:
        self.method, self.classes, self.config, self.device = method, classes, config, device

    @property
    def info(self) -> BackboneInfo:
        return self.method.network.info

    @property
    def has_sigma(self) -> bool:
        with torch.no_grad():
            return self.method.sigma(torch.zeros(1, self.info.dim, device=self.device)) is not None

    def predict(self, images: Any, batch_size: int = 256) -> Prediction:
        """`images`: paths, PIL images, or a uint8 tensor or array N x H x W x 3 or N x 3 x H x W; or one path or PIL image.
        Where the backbone is frozen, also a tensor or array N x D of its features."""
        outputs = self.outputs(images, batch_size)
        return Prediction([self.classes[i] for i in outputs.labels_N], outputs.probabilities_NC, outputs.sigma_N)

    def outputs(self, images: Any, batch_size: int = 256, statistics: int = TARGET) -> Outputs:
        if isinstance(images, str | Path | Image.Image):
            images = [images]
        elif isinstance(images, np.ndarray):
            images = torch.from_numpy(images)
        elif not isinstance(images, Tensor):
            images = list(images)
        if len(images) == 0:
            sigma_N = np.empty(0, np.float32) if self.has_sigma else None
            return Outputs(np.empty((0, len(self.classes)), np.float32), sigma_N)
        if isinstance(images, Tensor) and images.ndim == 2:
            self.check_features(images.shape[1], "the tensor")
            return run_batches(
                self.method, (c.float().to(self.device) for c in torch.split(images, batch_size)), statistics
            )
        chunks = (images[start : start + batch_size] for start in range(0, len(images), batch_size))
        return run_batches(self.method, map(self._view, chunks), statistics)

    def check_features(self, dim: int, what: str) -> None:
        """That this model can predict from features of `dim` dimensions in place of images."""
        if self.config.model.train != "head":
            raise UserError(f"{what} holds features, but the run's backbone was trained (`model.train`): give images")
        if dim != self.info.dim:
            raise UserError(f"the features of {what} have {dim} dimensions; the run's model takes {self.info.dim}")

    def check_images(self) -> None:
        """That this model takes images, and not features alone."""
        if features_dim(self.info.name) is not None:
            raise UserError(
                f"the run's model takes features (N x {self.info.dim}), not images: `certvol extract` makes .npz files of them"
            )

    def _view(self, images: Any) -> Tensor:
        self.check_images()
        size = cache_size(self.info.image_size)
        if isinstance(images, Tensor):
            pixels = _tensor_pixels(images, size)
        else:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                pixels = torch.from_numpy(np.stack(list(pool.map(lambda image: self._pixels(image, size), images))))
        return test_view(pixels.to(self.device), self.info.image_size, self.info.mean, self.info.std)

    def _pixels(self, image: Any, size: int) -> NDArray[np.uint8]:
        most = self.config.data.max_megapixels
        try:
            if isinstance(image, Image.Image):
                return square(image, size, most)
            if not isinstance(image, str | os.PathLike):
                raise UserError(
                    f"expected paths or PIL images, found one {type(image).__name__} among them; pixels are given as one uint8 "
                    "tensor or array, N x H x W x 3"
                )
            return decode(read_file(Path(image), most)[0], size, most)
        except UnreadableImage as error:
            raise UserError(f"{printable(str(image))} is no image that can be read: {error}") from None


def _tensor_pixels(images: Tensor, size: int) -> Tensor:
    if images.dtype != torch.uint8 or images.ndim != 4 or 3 not in (images.shape[1], images.shape[3]):
        raise UserError(
            f"expected a uint8 tensor N x 3 x H x W or N x H x W x 3, found {images.dtype} {tuple(images.shape)}"
        )
    channels_first = images if images.shape[1] == 3 else images.permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(
        channels_first.float(), (size, size), mode="bilinear", antialias=True, align_corners=False
    )
    return resized.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


def load(run: str | Path, device: str = "auto", which: Literal["model", "pretrained"] = "model") -> Model:
    """The model a run delivered; `which="pretrained"`: as it was before adaptation."""
    if which not in ("model", "pretrained"):
        raise ValueError(f"`which` is model or pretrained, found {which!r}")
    folder = RunFolder(run)
    if not folder.holds_a_run:
        raise UserError(f"{folder.path} holds no run (no config.yaml)")
    folder.check_links()
    weights = folder.model if which == "model" else folder.pretrained
    if not weights.exists():
        raise UserError(
            f"the run {folder.path} is not complete; go on with it by `certvol adapt --resume {folder.path}`"
        )
    config = resolve(methods.config_classes(), file=read_settings_file(folder.config))
    try:
        about = read_about(weights)
        classes, mode = about["classes"], about["norm"]
        if not isinstance(classes, list) or len(classes) < 2 or not all(isinstance(name, str) for name in classes):
            raise ValueError("it names no classes")
        if mode not in get_args(Mode):
            raise ValueError("it names no normalisation that there is")
        tensors = load_tensors(weights)
    except (SafetensorError, KeyError, ValueError, TypeError, RecursionError, OSError) as error:
        raise UserError(f"{weights} is damaged or no weights of certvol: {error}") from None
    backbone, info = seeded_backbone(replace(config.model, weights="none"), config.data.image_size, 0)
    method = create_method(config, backbone, info, len(classes))
    method.teacher = None  # what a run delivers is its teacher already
    load_into(method, tensors, str(weights))
    method.network.domains.mode = mode
    place = pick_device(device)
    return Model(method.to(place).eval(), classes, config, place)


def read_batches(
    model: Model, paths: list[str], reporter: Reporter, readable: list[str], failures: list[tuple[str, str]]
) -> Iterator[Tensor]:
    """Normalised images of the files that can be read, which `readable` then names; the others go to `failures`, with the reason.
    Memory does not grow with the number of files."""
    model.check_images()
    size = cache_size(model.info.image_size)

    def pixels(path: str) -> NDArray[np.uint8] | str:
        try:
            most = model.config.data.max_megapixels
            return decode(read_file(Path(path), most)[0], size, most)
        except UnreadableImage as error:
            return str(error)

    reporter.start("predicting", len(paths))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for start in range(0, len(paths), PREDICT_BATCH):
            chunk = paths[start : start + PREDICT_BATCH]
            kept = []
            for path, found in zip(chunk, pool.map(pixels, chunk), strict=True):
                if isinstance(found, str):
                    failures.append((path, found))
                else:
                    kept.append(found)
                    readable.append(path)
            reporter.advance(len(chunk))
            if kept:
                images = torch.from_numpy(np.stack(kept)).to(model.device)
                yield test_view(images, model.info.image_size, model.info.mean, model.info.std)
    reporter.finish()


def feature_batches(model: Model, files: list[str], readable: list[str]) -> Iterator[Tensor]:
    """Of .npz files of features: those of the test view, which is the first; `readable` then names the rows."""
    for file in files:
        found = open_target_features(file)
        model.check_features(found.dim, file)
        readable += found.paths
        for start in range(0, len(found.rows), PREDICT_BATCH):
            yield torch.from_numpy(found.features[found.rows[start : start + PREDICT_BATCH], 0]).to(model.device)
