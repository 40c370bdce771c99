"""`adapt` joins the parts into a run; `load` gives its model back."""

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from certvol import methods
from certvol.config import Config, flatten, read_settings_file, resolve
from certvol.data.augment import cache_size, test_view
from certvol.data.decoding import UnreadableImage, decode, square
from certvol.data.domains import SourceImages, TargetImages, open_source, open_target
from certvol.data.folders import folder_labels
from certvol.data.store import PixelStore
from certvol.environment import describe_environment, pick_device
from certvol.errors import UserError
from certvol.inference import Outputs, run_batches
from certvol.methods.protocol import AdaptationMethod
from certvol.nn.backbones import BackboneInfo, describe
from certvol.nn.network import create_network
from certvol.nn.norm import SOURCE, TARGET
from certvol.reporting import Reporter, Silent
from certvol.tables import figures, predictions_csv, read_column, read_json, write_text
from certvol.training.checkpoint import load_into, read_about, write_tensors
from certvol.training.distributed import Team, join_team
from certvol.training.run_folder import RunFolder
from certvol.training.trainer import Delivery, Trainer
from certvol.training.views import Views

WEIGHTS_FORMAT = "certvol/1"
PREDICT_BATCH = 256


@dataclass(frozen=True)
class Run:
    """A finished run."""

    path: Path
    metrics: dict[str, Any] | None
    """None where the target folder tells no labels."""
    delivery: Delivery

    def model(self) -> "Model":
        return load(self.path)


def resolve_settings(
    preset: str | None = None, config_file: str | Path | None = None, settings: Mapping[str, Any] | None = None
) -> Config:
    """Preset, file and settings (`{"training.cycles": 4}` or `{"training": {"cycles": 4}}`) in one checked Config."""
    file = read_settings_file(Path(config_file)) if config_file is not None else {}
    return resolve(methods.config_classes(), preset or "default", file, flatten(settings or {}, "settings"))


def adapt(
    source: str | Path | None = None,
    target: str | Path | None = None,
    out: str | Path | None = None,
    *,
    resume: str | Path | None = None,
    preset: str | None = None,
    config: str | Path | None = None,
    reporter: Reporter | None = None,
    stop_signal: Callable[[], int | None] = lambda: None,
    **settings: Any,
) -> Run:
    """Pretrains, adapts, predicts; everything it makes is in the folder `out`. `resume`: goes on with a run that was stopped.

    Settings are given by section: `adapt(S, T, out="run", training={"cycles": 40}, method={"name": "basic"})`.
    """
    reporter = reporter or Silent()
    if resume is not None:
        return _resume(RunFolder(resume), reporter, stop_signal)
    places = {f"data.{k}": _absolute(v) for k, v in (("source", source), ("target", target)) if v is not None}
    resolved = resolve_settings(preset, config, {**flatten(settings, "settings"), **places})
    for name in ("source", "target"):
        if getattr(resolved.data, name) is None:
            raise UserError(f"no {name} folder was given: use --{name} FOLDER")
    if out is None:
        raise UserError("no folder for the run was given: use --out FOLDER")
    team, device = join_team(resolved.training.device)
    run = RunFolder(out, writes=team.main)
    job = _Job(run, resolved, reporter, stop_signal, team, device)
    if not team.main:
        return job.run_to_end()
    run.create()
    with run.lock():
        write_text(run.config, resolved.to_yaml())
        run.write_json(run.environment, describe_environment(device))
        return job.run_to_end()


def _absolute(path: str | Path) -> str:
    return str(Path(path).expanduser().absolute())


def _resume(run: RunFolder, reporter: Reporter, stop_signal: Callable[[], int | None]) -> Run:
    if not run.holds_a_run:
        raise UserError(
            f"{run.path} holds no run to go on with (no config.yaml); start one with --source, --target and --out"
        )
    if run.finished:
        reporter.say(f"{run.path} is complete already")
        about = read_about(run.model)
        metrics = read_json(run.metrics) if run.metrics.exists() else None
        return Run(run.path, metrics, Delivery(about["delivered"], about["why"], about["norm"]))
    config = resolve_settings(config_file=run.config)
    team, device = join_team(config.training.device)
    run = RunFolder(run.path, writes=team.main)
    with run.lock() if team.main else nullcontext():
        return _Job(run, config, reporter, stop_signal, team, device).run_to_end()


class _Job:
    """One run from its images to its files. Made before anything is written, so that a mistake leaves nothing behind."""

    def __init__(
        self,
        run: RunFolder,
        config: Config,
        reporter: Reporter,
        stop_signal: Callable[[], int | None],
        team: Team,
        device: torch.device,
    ) -> None:
        self.run, self.config, self.team, self.device = run, config, team, device
        self.reporter, self.stop_signal = reporter if team.main else Silent(), stop_signal
        self.info = describe(config.model.backbone, config.data.image_size)
        size = cache_size(self.info.image_size)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            self.source: SourceImages = open_source(str(config.data.source), size, config.data, self.reporter)
            self.target: TargetImages = open_target(str(config.data.target), size, config.data, self.reporter)
        for warning in caught:
            self.reporter.warn(str(warning.message))
        for name, domain in (("source", self.source), ("target", self.target)):
            if domain.failures:
                self.reporter.warn(
                    f"{len(domain.failures)} unreadable {name} images were skipped, such as {domain.failures[0][0]} "
                    f"({domain.failures[0][1]}); `certvol check` lists them"
                )
        self.method = _create_method(config, len(self.source.classes))

    def run_to_end(self) -> Run:
        started = time.monotonic()
        config = self.config
        _prepare_torch(self.device)
        self.method.to(self.device)
        if self.device.type == "cuda":
            self.method.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if config.training.compile:
            self.method.network.compile_backbone()
        stores = [
            PixelStore(domain.pixels, domain.rows, self.device, config.data.device_share / 2)
            for domain in (self.source, self.target)
        ]
        self.reporter.say(
            f"{len(self.source.rows)} source images in {len(self.source.classes)} classes, "
            f"{len(self.target.rows)} target images; "
            f"{config.method_name} on {self.info.name}, {self.device}; decoded images on {stores[0].place}/{stores[1].place}"
        )
        views = Views(stores[0], stores[1], self.info, config.augment)
        fingerprints = {"source": self.source.fingerprint, "target": self.target.fingerprint}
        trainer = Trainer(
            self.run,
            config,
            self.method,
            views,
            self.source.labels,
            self.reporter,
            self._about("mixed"),
            fingerprints,
            self.stop_signal,
            self.team,
        )
        delivery = trainer.fit()
        outputs = self._predict(trainer, TARGET, "predicting the target")
        weights = {name: tensor.clone() for name, tensor in self.method.state_dict().items()}
        metrics = self._metrics(trainer, outputs, delivery)
        if self.team.main:
            write_text(self.run.predictions, predictions_csv(self.target.paths, self.source.classes, outputs))
            if metrics is not None:
                self.run.write_json(self.run.metrics, metrics)
            self.run.note_time({"phase": "all", "seconds": time.monotonic() - started})
            about = {**self._about(delivery.mode), "delivered": delivery.model, "why": delivery.why}
            write_tensors(self.run.model, weights, about)
        self.team.part()
        return Run(self.run.path, metrics, delivery)

    def _about(self, mode: str) -> dict[str, Any]:
        return {
            "format": WEIGHTS_FORMAT,
            "method": self.config.method_name,
            "backbone": self.info.name,
            "classes": self.source.classes,
            "norm": mode,
        }

    def _predict(self, trainer: Trainer, statistics: int, what: str) -> Outputs:
        everything = np.arange(len(self.target.rows))
        self.reporter.start(what, len(everything))
        outputs = trainer.predict(TARGET, everything, statistics)
        self.reporter.advance(len(everything))
        self.reporter.finish()
        return outputs

    def _metrics(self, trainer: Trainer, adapted: Outputs, delivery: Delivery) -> dict[str, Any] | None:
        """The one place where a run looks at target labels: after training, where all folders are named like source classes."""
        true_N = folder_labels(self.target.paths, self.source.classes)
        if true_N is None:
            return None
        load_into(self.method, load_file(self.run.pretrained), self.run.pretrained.name)
        source_only = self._predict(trainer, SOURCE, "predicting with the pretrained model")
        return {
            "source_only": figures(source_only.labels_N, true_N, self.source.classes),
            "adapted": figures(adapted.labels_N, true_N, self.source.classes),
            "delivered": {"model": delivery.model, "why": delivery.why, "norm": delivery.mode},
        }


def _prepare_torch(device: torch.device) -> None:
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True


def _create_method(config: Config, num_classes: int, from_scratch: bool = False) -> AdaptationMethod:
    """`from_scratch`: weights will be loaded over, so none are fetched."""
    model = replace(config.model, weights="none") if from_scratch else config.model
    network = create_network(model, config.data.image_size, num_classes, config.training.seed)
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

    def predict(self, images: Any, batch_size: int = 256) -> Prediction:
        """`images`: paths, PIL images, or a uint8 tensor N x H x W x 3 or N x 3 x H x W; or one path or PIL image."""
        outputs = self.outputs(images, batch_size)
        return Prediction([self.classes[i] for i in outputs.labels_N], outputs.probabilities_NC, outputs.sigma_N)

    def outputs(self, images: Any, batch_size: int = 256, statistics: int = TARGET) -> Outputs:
        if isinstance(images, str | Path | Image.Image):
            images = [images]
        if len(images) == 0:
            sigma = (
                np.empty(0, np.float32)
                if self.method.sigma(torch.zeros(1, self.info.dim, device=self.device)) is not None
                else None
            )
            return Outputs(np.empty((0, len(self.classes)), np.float32), sigma)
        chunks = (images[start : start + batch_size] for start in range(0, len(images), batch_size))
        return run_batches(self.method, map(self._view, chunks), statistics)

    def _view(self, images: Any) -> Tensor:
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
            return decode(Path(image).read_bytes(), size, most)
        except OSError as error:
            raise UserError(f"cannot read {image}: {error.strerror}") from None
        except UnreadableImage as error:
            raise UserError(f"{image} is no image that can be read: {error}") from None


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


def load(run: str | Path, device: str = "auto", which: str = "model") -> Model:
    """The model a run delivered; `which="pretrained"`: as it was before adaptation."""
    folder = RunFolder(run)
    if not folder.holds_a_run:
        raise UserError(f"{folder.path} holds no run (no config.yaml)")
    weights = folder.model if which == "model" else folder.pretrained
    if not weights.exists():
        raise UserError(
            f"the run {folder.path} is not complete; go on with it by `certvol adapt --resume {folder.path}`"
        )
    config = resolve_settings(config_file=folder.config)
    try:
        about = read_about(weights)
        classes, mode = about["classes"], about["norm"]
        tensors = load_file(weights)
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise UserError(f"{weights} is damaged or no weights of certvol: {error}") from None
    method = _create_method(config, len(classes), from_scratch=True)
    load_into(method, tensors, str(weights))
    method.network.domains.mode = mode
    place = pick_device(device)
    return Model(method.to(place).eval(), classes, config, place)


def evaluate(
    run: str | Path, data: str | Path, device: str = "auto", reporter: Reporter | None = None
) -> dict[str, Any]:
    """Figures of the pretrained and the delivered model on a labelled folder."""
    reporter = reporter or Silent()
    model = load(run, device)
    config = model.config
    images = open_target(str(data), cache_size(model.info.image_size), config.data, reporter)
    true_N = folder_labels(images.paths, model.classes)
    if true_N is None:
        raise UserError(
            f"{data} tells no labels: every image should lie in a folder named like one of the run's "
            f"{len(model.classes)} classes, such as {model.classes[0]}/; `certvol predict` needs no labels"
        )
    found: dict[str, Any] = {}
    for name, which, statistics in (("source_only", "pretrained", SOURCE), ("adapted", "model", TARGET)):
        model = load(run, device, which)
        store = PixelStore(images.pixels, images.rows, model.device, config.data.device_share)
        views = Views(store, store, model.info, config.augment)
        batches = views.test_batches(TARGET, np.arange(len(store)), 256)
        found[name] = figures(run_batches(model.method, batches, statistics).labels_N, true_N, model.classes)
    return {"run": str(run), "data": str(data), **found}


def predict_files(
    model: Model, paths: list[str], reporter: Reporter
) -> tuple[list[str], Outputs, list[tuple[str, str]]]:
    """(readable files, their outputs, unreadable ones with the reason). Memory does not grow with the number of files."""
    readable: list[str] = []
    failures: list[tuple[str, str]] = []
    size = cache_size(model.info.image_size)

    def pixels(path: str) -> NDArray[np.uint8] | str:
        try:
            return decode(Path(path).read_bytes(), size, model.config.data.max_megapixels)
        except (OSError, UnreadableImage) as error:
            return str(error)

    def batches() -> Iterator[Tensor]:
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

    outputs = run_batches(model.method, batches(), TARGET)
    return readable, outputs, failures


def accept(run: str | Path, outputs: Outputs, coverage: float) -> NDArray[np.bool_]:
    """Images at least as certain as the most certain `coverage` of the run's own target, by sigma or else by probability."""
    column, values = ("probability", outputs.confidence_N) if outputs.sigma_N is None else ("sigma", outputs.sigma_N)
    target = np.array([float(value) for value in read_column(RunFolder(run).predictions, column)])
    threshold = np.quantile(target, 1 - coverage, method="lower")
    return np.asarray(values >= threshold)
