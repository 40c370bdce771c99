"""`adapt` joins the parts into a run; `evaluate` measures one."""

import time
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError

from certvol import methods
from certvol.config import AugmentConfig, Config, DataConfig, flatten, read_settings_file, resolve
from certvol.data.augment import cache_size
from certvol.data.domains import SourceImages, TargetImages, open_source, open_target
from certvol.data.feature_files import (
    SUFFIX,
    SourceFeatures,
    TargetFeatures,
    check_alike,
    is_feature_file,
    known_labels,
    open_source_features,
    open_target_features,
    write_features,
)
from certvol.data.folders import class_level, class_of, folder_labels, printable, scan
from certvol.data.store import PixelStore
from certvol.environment import describe_environment, pick_device
from certvol.errors import RunFailed, UserError
from certvol.extraction import extract_features, weights_digest
from certvol.inference import Outputs, run_batches
from certvol.model import Model, create_method, load
from certvol.nn import norm
from certvol.nn.backbones import create_backbone, features_dim
from certvol.nn.network import seeded_backbone
from certvol.nn.norm import SOURCE, TARGET
from certvol.reporting import Reporter, Silent
from certvol.stopping import StopSignal
from certvol.tables import figures, predictions_csv, read_metrics, write_text
from certvol.training.checkpoint import load_into, read_about, read_tensors, write_tensors
from certvol.training.distributed import Team, join_team
from certvol.training.feature_views import FeatureStore, FeatureViews
from certvol.training.position import Delivery
from certvol.training.run_folder import RunFolder
from certvol.training.trainer import Trainer
from certvol.training.views import Batches, Views

WEIGHTS_FORMAT = "certvol/1"


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
    stop_signal: StopSignal | None = None,
    **settings: Any,
) -> Run:
    """Pretrains, adapts, predicts; everything it makes is in the folder `out`. `resume`: goes on with a run that was stopped.

    Settings are given by section: `adapt(S, T, out="run", training={"cycles": 40}, method={"name": "basic"})`.
    """
    reporter, stop_signal = reporter or Silent(), stop_signal or StopSignal()
    if resume is not None:
        return _resume(RunFolder(resume), reporter, stop_signal)
    places = {f"data.{k}": str(v) for k, v in (("source", source), ("target", target)) if v is not None}
    resolved = _frozen_where_needed(
        _anchored(resolve_settings(preset, config, {**flatten(settings, "settings"), **places})), reporter
    )
    for name in ("source", "target"):
        if getattr(resolved.data, name) is None:
            raise UserError(f"no {name} folder was given: use --{name} FOLDER")
    if out is None:
        raise UserError("no folder for the run was given: use --out FOLDER")
    team, device = join_team(resolved.training.device)
    run = RunFolder(out, writes=team.main)
    if team.main:
        run.check_free()
    job = _Job(run, resolved, reporter, stop_signal, team, device)
    if not team.main:
        return job.run_to_end()
    run.create()
    with run.lock():
        write_text(run.config, job.config.to_yaml())
        run.write_json(run.environment, describe_environment(device))
        return job.run_to_end()


def _anchored(config: Config) -> Config:
    """Paths made absolute, so that a run can be gone on with from anywhere."""

    def absolute(path: str | None) -> str | None:
        return path if path in (None, "none") else str(Path(str(path)).expanduser().absolute())

    data = replace(
        config.data,
        source=absolute(config.data.source),
        target=absolute(config.data.target),
        cache_dir=absolute(config.data.cache_dir),
    )
    return replace(config, data=data, model=replace(config.model, weights=absolute(config.model.weights)))


def _frozen_where_needed(config: Config, reporter: Reporter) -> Config:
    """A method in closed form works on features as they are: without a trained backbone, and without an adapter."""
    if not methods.discover()[config.method_name].closed_form:
        return config
    if config.model.train != "head":
        reporter.say(f"{config.method_name} works on fixed features: `model.train` is set to head")
    return replace(config, model=replace(config.model, train="head", adapter=False))


def _resume(run: RunFolder, reporter: Reporter, stop_signal: StopSignal) -> Run:
    if not run.holds_a_run:
        raise UserError(
            f"{run.path} holds no run to go on with (no config.yaml); start one with --source, --target and --out"
        )
    run.check_links()
    if run.finished:
        reporter.say(f"{run.path} is complete already")
        try:
            about = read_about(run.model)
            metrics = read_metrics(run.metrics) if run.metrics.exists() else None
            return Run(run.path, metrics, Delivery(about["delivered"], about["why"], about["norm"]))
        except (SafetensorError, KeyError, ValueError, TypeError, RecursionError, OSError) as error:
            raise UserError(f"the run {run.path} is complete, but its files are damaged: {error}") from None
    config = resolve_settings(config_file=run.config)
    team, device = join_team(config.training.device)
    run = RunFolder(run.path, writes=team.main)
    with run.lock() if team.main else nullcontext():
        run.note_resumption(describe_environment(device))
        return _Job(run, config, reporter, stop_signal, team, device).run_to_end()


class _Job:
    """One run from its images to its files. Made before anything is written, so that a mistake leaves nothing behind."""

    def __init__(
        self,
        run: RunFolder,
        config: Config,
        reporter: Reporter,
        stop_signal: StopSignal,
        team: Team,
        device: torch.device,
    ) -> None:
        self.run, self.config, self.team, self.device = run, config, team, device
        self.reporter, self.stop_signal = reporter if team.main else Silent(), stop_signal
        self.source: SourceImages | SourceFeatures
        self.target: TargetImages | TargetFeatures
        if self._given_features():
            self.source = open_source_features(str(config.data.source))
            self.target = open_target_features(str(config.data.target))
            check_alike(self.source, self.target)
            model = replace(config.model, backbone=f"features-{self.source.dim}", weights=None, train="head")
            self.config = config = replace(config, model=model)
            backbone, self.info = seeded_backbone(config.model, None, config.training.seed)
        else:
            backbone, self.info = seeded_backbone(config.model, config.data.image_size, config.training.seed)
            self._open_folders()
        self.method = create_method(config, backbone, self.info, len(self.source.classes))

    def _given_features(self) -> bool:
        """Whether both domains are files of features; says what is wrong with a place that is neither that nor a folder."""
        places = [str(self.config.data.source), str(self.config.data.target)]
        files = [place for place in places if is_feature_file(place)]
        if len(files) == 1:
            raise UserError(
                f"{printable(files[0])} holds features, but the other domain is no .npz file; give features for both, or images"
            )
        for folder in places:
            if not files and not Path(folder).is_dir():
                scan(folder)  # says what is wrong with it, before weights are fetched and images decoded
        if not files and features_dim(self.config.model.backbone) is not None:
            raise UserError(
                f"the backbone `{self.config.model.backbone}` is for files of features; name one for images"
            )
        return bool(files)

    def _open_folders(self) -> None:
        data, size = self.config.data, cache_size(self.info.image_size)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            source = open_source(str(data.source), size, data, self.reporter)
            target = open_target(str(data.target), size, data, self.reporter)
        for warning in caught:
            self.reporter.warn(str(warning.message))
        for name, failures in (("source", source.failures), ("target", target.failures)):
            if failures:
                self.reporter.warn(
                    f"{len(failures)} unreadable {name} images were skipped, such as {printable(failures[0][0])} "
                    f"({failures[0][1]}); `certvol check` lists them"
                )
        self.source, self.target = source, target

    def run_to_end(self) -> Run:
        try:
            return self._run_to_end()
        except torch.OutOfMemoryError:
            training = self.config.training
            raise RunFailed(
                f"the GPU ran out of memory with `training.batch_size {training.batch_size}`: try {training.batch_size // 2}, "
                f"or a lower `data.device_share` (now {self.config.data.device_share:g}) so that images stay in RAM"
            ) from None

    def _run_to_end(self) -> Run:
        started = time.monotonic()
        config = self.config
        _prepare_torch(self.device)
        self.method.to(self.device)
        if self.device.type == "cuda":
            self.method.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if config.training.compile:
            self.method.network.compile_backbone()
        views, place = self._views()
        self.reporter.say(
            f"{len(self.source.rows)} source images in {len(self.source.classes)} classes, "
            f"{len(self.target.rows)} target images; {config.method_name} on {self.info.name}, {self.device}; {place}"
        )
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
        with self.stop_signal.deferred():
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

    def _views(self) -> tuple[Batches, str]:
        """What training sees of both domains, and where it lies: images, or the features of a frozen backbone."""
        data = self.config.data
        if self.config.model.train == "head":
            found = [self._features(domain) for domain in (self.source, self.target)]
            source, target = (FeatureStore(f, rows, self.device, data.device_share / 2) for f, rows in found)
            return FeatureViews(source, target), f"features of {source.views} views"
        if isinstance(self.source, SourceFeatures) or isinstance(self.target, TargetFeatures):
            raise AssertionError("files of features are trained on with model.train head")
        stores = [PixelStore(d.pixels, d.rows, self.device, data.device_share / 2) for d in (self.source, self.target)]
        return Views(
            stores[0], stores[1], self.info, self.config.augment
        ), f"decoded images on {stores[0].place}/{stores[1].place}"

    def _features(
        self, domain: SourceImages | TargetImages | TargetFeatures
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        if isinstance(domain, TargetFeatures):
            return domain.features, domain.rows
        config, started = self.config, time.monotonic()
        found = extract_features(
            self.method.network.backbone,
            self.info,
            domain,
            config.data.views,
            config.augment,
            config.data,
            self.device,
            config.training.precision == "bf16",
            self.reporter,
        )
        self.run.note_time({"phase": "extract", "images": len(domain), "seconds": time.monotonic() - started})
        return found

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
        outputs = trainer.predict(TARGET, everything, statistics, exact=True)
        self.reporter.advance(len(everything))
        self.reporter.finish()
        return outputs

    def _metrics(self, trainer: Trainer, adapted: Outputs, delivery: Delivery) -> dict[str, Any] | None:
        """The one place where a run looks at target labels: after training, where all folders are named like source classes."""
        if isinstance(self.target, TargetFeatures):
            true_N = known_labels(str(self.config.data.target), self.target.rows, self.source.classes)
        else:
            true_N = folder_labels(self.target.paths, self.source.classes)
        if true_N is None:
            return None
        load_into(self.method, read_tensors(self.run.pretrained), self.run.pretrained.name)
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


def evaluate(
    run: str | Path, data: str | Path, device: str = "auto", reporter: Reporter | None = None
) -> dict[str, Any]:
    """Figures of the pretrained and the delivered model on a labelled folder."""
    reporter = reporter or Silent()
    model = load(run, device)
    if is_feature_file(data):
        views, true_N = _feature_views_to_evaluate(model, data)
    else:
        views, true_N = _image_views_to_evaluate(model, data, reporter)
    found: dict[str, Any] = {}
    for name, statistics in (("source_only", SOURCE), ("adapted", TARGET)):
        model = load(run, device, "pretrained" if name == "source_only" else "model")
        batches = views.test_batches(TARGET, np.arange(len(views.target)), 256)
        found[name] = figures(run_batches(model.method, batches, statistics).labels_N, true_N, model.classes)
    return {"run": str(run), "data": str(data), **found}


def _image_views_to_evaluate(model: Model, data: str | Path, reporter: Reporter) -> tuple[Batches, NDArray[np.int64]]:
    if features_dim(model.info.name) is not None:
        raise UserError(f"the run's model takes features; give a .npz file of them instead of {data}")
    config = model.config
    images = open_target(str(data), cache_size(model.info.image_size), config.data, reporter)
    if images.failures:
        path, reason = images.failures[0]
        reporter.warn(f"{len(images.failures)} unreadable images were left out, such as {path} ({reason})")
    true_N = folder_labels(images.paths, model.classes)
    if true_N is None:
        stray = next(path for path in sorted(images.paths) if folder_labels([path], model.classes) is None)
        raise UserError(
            f"{data} does not tell all labels: {printable(stray)} lies in no folder named like one of the run's "
            f"{len(model.classes)} classes, such as {model.classes[0]}/; `certvol predict` needs no labels"
        )
    store = PixelStore(images.pixels, images.rows, model.device, config.data.device_share)
    return Views(store, store, model.info, config.augment), true_N


def _feature_views_to_evaluate(model: Model, data: str | Path) -> tuple[Batches, NDArray[np.int64]]:
    features = open_target_features(data)
    model.check_features(features.dim, str(data))
    true_N = known_labels(data, features.rows, model.classes)
    if true_N is None:
        raise UserError(
            f"{data} does not tell all labels: its array `labels` should name one of the run's {len(model.classes)} classes "
            f"for every row, such as {model.classes[0]}; `certvol predict` needs no labels"
        )
    store = FeatureStore(features.features, features.rows, model.device)
    return FeatureViews(store, store), true_N


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
    if Path(out).suffix.lower() != SUFFIX:
        raise UserError(f"features are written as a .npz file, found {printable(str(out))}")
    if features_dim(backbone) is not None or views < 1:
        raise UserError("expected a backbone for images and one view or more")
    data, augment, place = DataConfig(), AugmentConfig(), pick_device(device)
    if not Path(folder).is_dir():
        scan(folder)
    module, info = create_backbone(backbone, weights, image_size)
    norm.install(
        module, norm.Domains(mode="frozen")
    )  # as a run with model.train head has it, so that both share the cache
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
