"""A run's model, ready to predict."""

import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from certvol import methods
from certvol.data.augment import cache_size, centre_view
from certvol.data.decoding import UnreadableImage, decode, read_file, square
from certvol.data.folders import printable
from certvol.device import pick_device
from certvol.errors import UserError, is_out_of_memory
from certvol.methods._base import AdaptationMethod
from certvol.nn.backbones import BackboneInfo, features_dim
from certvol.nn.network import Network, seeded_backbone
from certvol.nn.norm import TARGET, Mode
from certvol.predict.extract import shifted_features
from certvol.predict.forward import Outputs, run_batches
from certvol.predict.max_error import Rule
from certvol.predict.reject import check_options, choose_measure, choose_rule
from certvol.randomness import torch_seed
from certvol.runs.changed_settings import check_unchanged
from certvol.runs.checkpoint import FROZEN, damage_explained, load_into, load_with_about
from certvol.runs.folder import RunFolder
from certvol.scores.calibration import COLDEST, HOTTEST
from certvol.settings import Config, flatten, read_settings_file, resolve

PREDICT_BATCH = 256
Which = Literal["delivered", "pretrained"]  # the model that a run delivers, or its pretrained one


def create_method(
    config: Config, backbone: nn.Module, info: BackboneInfo, num_classes: int
) -> AdaptationMethod:
    """Create the method with its heads and extra networks, initialised from the run's seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(torch_seed(config.training.seed, "heads"))
        try:
            network = Network(backbone, info, num_classes, config.model)
            return methods.discover()[config.method_name](network, config.method)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(
                f"the layers behind the backbone {info.name} do not fit into memory; lower the "
                "widths among the settings of the method"
            ) from None


@dataclass(frozen=True)
class Prediction:
    """Predictions for N images, in the order they were given."""

    labels: list[str]
    probabilities: NDArray[np.float32]
    """N x C; columns are in the order of the model's `classes`."""
    sigma: NDArray[np.float32] | None
    """Certainty; None for a method without one."""


class _OneAtATime:
    """A lock that copies of its owner do not share, and that can be pickled with it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __reduce__(self) -> tuple[type["_OneAtATime"], tuple[()]]:
        return _OneAtATime, ()


class Model:
    """A run's model. `classes` holds the names of its labels, in order."""

    def __init__(
        self,
        method: AdaptationMethod,
        classes: list[str],
        config: Config,
        device: torch.device,
        temperature: float = 1.0,
    ) -> None:
        """Probabilities are softmax(logits / `temperature`)."""
        self.method, self.classes, self.config, self.device = method, classes, config, device
        self.temperature = temperature
        self._predicting = _OneAtATime()
        """Predicting sets the network's current domain: only one thread may predict at a time."""
        self.run: Path | None = None
        """The run whose delivered model this is; None for its pretrained model."""
        self.features_about = ""
        """What made the files of features that the run was trained on; empty if not known."""

    def __repr__(self) -> str:
        words = [f"{self.config.method_name} on {self.info.name}", f"{len(self.classes)} classes"]
        words += [] if self.run is None else [f"run {str(self.run)!r}"]
        return f"<certvol.Model: {', '.join(words)}, on {self.device}>"

    @property
    def info(self) -> BackboneInfo:
        return self.method.network.info

    @property
    def has_sigma(self) -> bool:
        with torch.no_grad():
            return (
                self.method.sigma(torch.zeros(1, self.method.network.dim, device=self.device))
                is not None
            )

    @property
    def frozen(self) -> bool:
        """Whether the backbone was frozen."""
        return self.config.model.train == "head"

    def predict(self, images: Any, batch_size: int = PREDICT_BATCH) -> Prediction:
        """Predict labels, probabilities and sigma.

        `images` holds paths or PIL images, or is one of them, or is a uint8 tensor or array
        N x H x W x 3 or N x 3 x H x W. For a run with a frozen backbone it may also be a tensor or
        array N x D of features.
        """
        if batch_size < 1:
            raise UserError(f"`batch_size` should be 1 or more, found {batch_size}")
        outputs = self._outputs(_as_inputs(images), batch_size)
        labels = [self.classes[i] for i in outputs.labels_N]
        return Prediction(labels, outputs.probabilities_NC, outputs.sigma_N)

    def threshold_for(
        self,
        *,
        max_error: float | None = None,
        coverage: float | None = None,
        measure: str | None = None,
    ) -> Rule:
        """Return which images to accept: by reviewed labels (`max_error`), or a share of them all.

        The threshold refers to the run's target. `max_error` holds with 95 % confidence; it is a
        UserError if the labels in RUN/review.csv do not allow it.
        """
        check_options(coverage, None, None, max_error)
        if self.run is None:
            raise UserError("thresholds need the delivered model of a run: certvol.load(RUN)")
        return choose_rule(
            self.run, choose_measure(measure, self.has_sigma, self.frozen), coverage, max_error
        )

    def _outputs(self, images: list[Any] | Tensor, batch_size: int) -> Outputs:
        if len(images) == 0:
            sigma_N = np.empty(0, np.float32) if self.has_sigma else None
            return Outputs(np.empty((0, len(self.classes)), np.float32), sigma_N)
        batches = (
            images[start : start + batch_size] for start in range(0, len(images), batch_size)
        )
        inputs: Iterable[Tensor] = map(self._view, batches)
        if isinstance(images, Tensor) and images.ndim == 2:
            self.check_features(images.shape[1], "the tensor")
            inputs = (_finite(rows).to(self.device) for rows in torch.split(images, batch_size))
        with self._predicting.lock:
            outputs = run_batches(self.method, inputs, TARGET)
        outputs.refuse_faulty(None)
        return outputs.at_temperature(self.temperature)

    def check_features(self, dim: int, what: str, about: str = "") -> None:
        """Refuse features that this model cannot take; `about` says what made them."""
        if self.config.model.train != "head":
            raise UserError(
                f"{what} holds features, but the run trained its backbone (`model.train "
                f"{self.config.model.train}`); give images"
            )
        if dim != self.info.dim:
            raise UserError(
                f"the features of {what} have {dim} dimensions; the model takes {self.info.dim}"
            )
        if about and self.features_about and about != self.features_about:
            raise UserError(
                f"the features of {what} were made by {printable(about)}, those of the run by "
                f"{printable(self.features_about)}; extract them with the same backbone, weights "
                "and image size"
            )

    def check_images(self) -> None:
        """Refuse images if the model takes features only."""
        if features_dim(self.info.name) is not None:
            raise UserError(
                f"the run's model takes features (N x {self.info.dim}), not images; "
                "`certvol extract` makes .npz files of them"
            )

    def read_pixels(self, image: str | os.PathLike[str] | Image.Image) -> NDArray[np.uint8]:
        """Decode an image to the square that `view` takes; raises UnreadableImage."""
        size, most = self.pixels_size, self.config.data.max_megapixels
        if isinstance(image, Image.Image):
            return square(image, size, most)
        return decode(read_file(Path(image), most)[0], size, most)

    @property
    def pixels_size(self) -> int:
        """The side of the squares that the model's views are cut from."""
        return cache_size(self.info.image_size, self.config.data.view_set)

    def view(self, pixels: Tensor) -> Tensor:
        """Return what the network takes: a normalised view, or the mean features of several."""
        pixels = pixels.to(self.device)
        if self.config.data.view_set == "shifted":
            backbone = self.method.network.backbone
            return torch.from_numpy(shifted_features(backbone, pixels, self.info)).to(self.device)
        return centre_view(pixels, self.info)

    def _view(self, images: list[Any] | Tensor) -> Tensor:
        self.check_images()
        if isinstance(images, Tensor):
            return self.view(_square_pixels(images, self.pixels_size))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            pixels = np.stack(list(pool.map(self._given_pixels, images)))
        return self.view(torch.from_numpy(pixels))

    def _given_pixels(self, image: Any) -> NDArray[np.uint8]:
        if not isinstance(image, str | os.PathLike | Image.Image):
            raise UserError(
                f"expected paths or PIL images, found one {type(image).__name__} among them; give "
                "pixels as one uint8 tensor or array, N x H x W x 3"
            )
        try:
            return self.read_pixels(image)
        except UnreadableImage as error:
            raise UserError(f"cannot read the image {printable(str(image))}: {error}") from None


def _as_inputs(images: Any) -> list[Any] | Tensor:
    """Return paths and PIL images as a list, and pixels and features as a tensor."""
    if isinstance(images, str | os.PathLike | Image.Image):
        return [images]
    if isinstance(images, np.ndarray) and images.dtype.kind in "USO":
        return list(images.ravel().tolist())
    if isinstance(images, np.ndarray):
        images = _as_tensor(images)
    if isinstance(images, Tensor):
        if images.ndim == 0 or images.is_complex():
            raise UserError(
                "expected a uint8 tensor of images or a tensor N x D of real features, "
                f"found {images.dtype} {tuple(images.shape)}"
            )
        return images.detach()
    try:
        return list(images)
    except TypeError:
        kind = type(images).__name__
        raise UserError(f"expected paths, PIL images or a tensor, found one {kind}") from None


def _as_tensor(array: NDArray[Any]) -> Tensor:
    """Convert an array to a tensor, even if its byte order or its strides are reversed."""
    try:
        return torch.from_numpy(np.asarray(array, array.dtype.newbyteorder("="), order="C"))
    except (TypeError, ValueError):
        raise UserError(f"expected an array of numbers, found the type {array.dtype}") from None


def _finite(rows_ND: Tensor) -> Tensor:
    found = rows_ND.float()
    if not bool(found.isfinite().all()):
        raise UserError(
            "some features are not finite numbers, or too large for 32 bits; leave those rows out"
        )
    return found


def _square_pixels(images: Tensor, size: int) -> Tensor:
    """Resize a uint8 tensor of images to N x size x size x 3."""
    channels = images.shape[1::2] if images.ndim == 4 else ()
    if images.dtype != torch.uint8 or 3 not in channels or 0 in images.shape:
        raise UserError(
            "expected a uint8 tensor N x 3 x H x W or N x H x W x 3, "
            f"found {images.dtype} {tuple(images.shape)}"
        )
    images_N3HW = images if images.shape[1] == 3 else images.permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(
        images_N3HW.float(), (size, size), mode="bilinear", antialias=True, align_corners=False
    )
    return resized.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1)


def load(run: str | Path, device: str = "auto", which: Which = "delivered") -> Model:
    """Load the delivered model of a run, or with `which="pretrained"` its pretrained model."""
    if which not in get_args(Which):
        raise ValueError(f"`which` must be delivered or pretrained, found {which!r}")
    folder = RunFolder(run)
    folder.check_run()
    weights = folder.model if which == "delivered" else folder.pretrained
    config = resolve(methods.config_classes(), file=read_settings_file(folder.config))
    check_unchanged(folder, flatten(config.as_dict(), str(folder.config)))
    # The delivered weights alone hold a frozen backbone.
    needs_backbone = which == "pretrained" and config.model.train == "head"
    folder.check_complete(weights, folder.model if needs_backbone else weights)
    with damage_explained(weights):
        complete, of_model = load_with_about(folder.model) if folder.model.exists() else ({}, {})
        tensors, about = (complete, of_model) if which == "delivered" else load_with_about(weights)
        classes, mode = about["classes"], about["norm"]
        names = classes if isinstance(classes, list) else []
        if len(names) < 2 or not all(isinstance(name, str) for name in names):
            raise ValueError("it names no classes")
        if mode not in get_args(Mode):
            raise ValueError("its norm mode is invalid")
        temperature = _temperature(of_model, which)
        if needs_backbone:
            backbone_tensors = {n: t for n, t in complete.items() if n.startswith(FROZEN)}
            tensors = {**backbone_tensors, **tensors}
        if not all(bool(t.isfinite().all()) for t in tensors.values() if t.is_floating_point()):
            raise ValueError("some weights are not finite numbers")
    without_weights = replace(config.model, weights="none")
    backbone, info = seeded_backbone(without_weights, config.data.image_size, 0)
    method = create_method(config, backbone, info, len(classes))
    method.teacher = None  # the delivered weights are the teacher's already
    load_into(method, tensors, str(weights))
    method.network.domains.mode = mode
    place = pick_device(device)
    model = Model(method.to(place).eval(), classes, config, place, temperature)
    model.run = folder.path if which == "delivered" else None
    model.features_about = str(about.get("features", ""))
    return model


def _temperature(about: dict[str, Any], which: Which) -> float:
    """Read a model's temperature from the header of the delivered one; 1 if it has none."""
    key = "model_temperature" if which == "delivered" else "pretrained_temperature"
    found = about.get(key, 1.0)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ValueError("its temperature is not a number")
    if not COLDEST <= found <= HOTTEST:
        raise ValueError(f"its temperature is {found}")
    return float(found)
