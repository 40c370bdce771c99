"""`adapt` joins the parts into a run; `evaluate` measures one."""

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError

from certvol import analysis, methods
from certvol.acceleration import prepare, uses_bf16
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
from certvol.kept_warnings import KeptWarnings
from certvol.metrics import accuracy, mean_class_accuracy
from certvol.model import Model, create_method, load
from certvol.nn import norm
from certvol.nn.backbones import create_backbone, features_dim
from certvol.nn.network import seeded_backbone
from certvol.nn.norm import SOURCE, TARGET
from certvol.nn.teacher import Teacher
from certvol.reporting import Reporter, Silent
from certvol.stopping import StopSignal
from certvol.tables import figures, predictions_csv, read_metrics, write_text
from certvol.training.checkpoint import load_into, read_about, read_tensors, write_tensors
from certvol.training.distributed import Team, join_team
from certvol.training.feature_views import FeatureStore, FeatureViews
from certvol.training.memory import largest_batch
from certvol.training.position import Delivery
from certvol.training.run_folder import RunFolder
from certvol.training.schedule import steps_per_cycle
from certvol.training.tensorboard import TensorBoard
from certvol.training.trainer import Trainer
from certvol.training.views import Batches, Views

WEIGHTS_FORMAT = "certvol/1"
Indices = NDArray[np.int64]


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
        self.reporter, self.stop_signal = KeptWarnings(reporter if team.main else Silent(), run), stop_signal
        if config.training.tensorboard and team.main:
            run.journal.follower = TensorBoard(run.journal.history, run.path / "tensorboard")
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
        if config.training.teacher > 0 and self.method.teacher is None:
            self.method.teacher = Teacher(self.method, self.method.network, config.training.teacher)
        self._check_choice()

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

    def _check_choice(self) -> None:
        """Before training: a score that this run will not have cannot choose."""
        select = self.config.guard.select
        if select == "source_accuracy" and self.config.data.holdout == 0:
            raise UserError("`guard.select source_accuracy` needs held-out source images: set `data.holdout` above 0")
        if select == "sigma" and self.method.sigma(torch.zeros(1, self.info.dim)) is None:
            raise UserError(
                f"`guard.select sigma` needs a method with a sigma, which {self.config.method_name} has not"
            )

    def run_to_end(self) -> Run:
        try:
            return self._run_to_end()
        except torch.OutOfMemoryError:
            training = self.config.training
        fits = largest_batch(self.method, uses_bf16(training, self.device), self.device)
        about = "not even a few images fit beside the model" if fits is None else f"about {fits} would fit"
        raise RunFailed(
            f"the GPU ran out of memory with `training.batch_size {training.batch_size}`: {about}; set `--training.batch_size`, "
            f"or a lower `data.device_share` (now {self.config.data.device_share:g}) so that images stay in RAM"
        )

    def _run_to_end(self) -> Run:
        started = time.monotonic()
        self.reporter.flush()
        config = self.config
        steps = config.training.pretrain_steps
        if self.method.adapts:
            steps += config.training.cycles * steps_per_cycle(config.training, len(self.source.classes))
        prepare(self.method, config.training, self.device, steps)
        self.method.network.domains.synchronised = config.model.sync_norm and self.team.size > 1
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
        if self.run.journal.follower is not None:
            self.run.journal.follower.close()
        outputs = self._predict(trainer, TARGET, "predicting the target")
        weights = {name: tensor.clone() for name, tensor in self.method.state_dict().items()}
        # Training has ended: the one place where a run looks at target labels, where all folders are named like source classes.
        true_N = self._true_labels()
        seen = self._measure(trainer, outputs, true_N)
        if self.team.main or true_N is not None:
            load_into(self.method, read_tensors(self.run.pretrained), self.run.pretrained.name)
        metrics = self._metrics(trainer, outputs, delivery, true_N)
        pretrained_KD = self._pretrained_features(trainer, seen.shown_K)
        if self.team.main:
            paths, classes, run = self.target.paths, self.source.classes, self.run
            write_text(run.predictions, predictions_csv(paths, classes, outputs))
            if metrics is not None:
                run.write_json(run.metrics, metrics)
            analysis.write_measures(run.measures, paths, classes, seen.measured, true_N)
            analysis.write_evaluation(
                run.evaluation, analysis.figures(seen.measured, classes, true_N, seen.oscillation)
            )
            analysis.write_features(run.features, paths, seen.shown_K, pretrained_KD, seen.shown_KD)
            self.run.note_time({"phase": "all", "seconds": time.monotonic() - started})
            about = {**self._about(delivery.mode), "delivered": delivery.model, "why": delivery.why}
            write_tensors(self.run.model, weights, about)
        self.team.part()
        return Run(self.run.path, metrics, delivery)

    def _true_labels(self) -> Indices | None:
        if isinstance(self.target, TargetFeatures):
            return known_labels(str(self.config.data.target), self.target.rows, self.source.classes)
        return folder_labels(self.target.paths, self.source.classes)

    def _views(self) -> tuple[Batches, str]:
        """What training sees of both domains, and where it lies: images, or the features of a frozen backbone."""
        data, source, target = self.config.data, self.source, self.target
        if self.config.model.train == "head":
            stores = [FeatureStore(*self._features(d), self.device, data.device_share / 2) for d in (source, target)]
            return FeatureViews(*stores), f"features of {stores[0].views} views"
        if isinstance(source, SourceFeatures) or isinstance(target, TargetFeatures):
            raise AssertionError("files of features are trained on with model.train head")
        pixels = [PixelStore(d.pixels, d.rows, self.device, data.device_share / 2) for d in (source, target)]
        fused = self.method.network.compiled
        views = Views(pixels[0], pixels[1], self.info, self.config.augment, fused)
        return views, f"decoded images on {pixels[0].place}/{pixels[1].place}"

    def _features(self, domain: SourceImages | TargetImages | TargetFeatures) -> tuple[NDArray[np.float32], Indices]:
        if isinstance(domain, TargetFeatures):
            return domain.features, domain.rows
        config, started = self.config, time.monotonic()
        bf16, backbone = config.training.precision == "bf16", self.method.network.backbone
        found = extract_features(
            backbone,
            self.info,
            domain,
            config.data.views,
            config.augment,
            config.data,
            self.device,
            bf16,
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

    def _measure(self, trainer: Trainer, outputs: Outputs, true_N: Indices | None) -> "_Seen":
        """One more pass over the target, for what the predictions do not hold."""
        count, seed = len(self.target.rows), self.config.training.seed
        shown_K = analysis.feature_images(count, seed)
        picked_K = np.empty(0, np.int64) if true_N is None else analysis.oscillation_images(true_N, seed)
        classifier = self.method.network.classifier
        if not analysis.oscillation_is_cheap(len(picked_K), classifier):
            picked_K = picked_K[:0]
        kept_K = np.union1d(shown_K, picked_K)
        share = self.team.share(count)
        mine_K = kept_K[(kept_K >= share.start) & (kept_K < share.stop)] - share.start
        batches = trainer.views.test_batches(TARGET, np.arange(count)[share], trainer.eval_batch)
        self.reporter.start("measuring certainty", count)
        found = analysis.measure(
            self.method, batches, TARGET, self.config.training, None if true_N is None else true_N[share], mine_K
        )
        measured = analysis.agreeing(analysis.gathered(found, self.team), outputs)
        features_KD = measured.features_KD
        picked_KD = features_KD[np.searchsorted(kept_K, picked_K)]
        oscillation = analysis.oscillation(picked_KD, classifier) if len(picked_K) and self.team.main else None
        self.reporter.advance(count)
        self.reporter.finish()
        return _Seen(measured, shown_K, features_KD[np.searchsorted(kept_K, shown_K)], oscillation)

    def _pretrained_features(self, trainer: Trainer, images_K: Indices) -> NDArray[np.float32]:
        """Where `method` holds the pretrained model."""
        batches = trainer.views.test_batches(TARGET, images_K, trainer.eval_batch)
        return analysis.features(self.method, batches, SOURCE) if self.team.main else np.empty((0, 0), np.float32)

    def _metrics(
        self, trainer: Trainer, adapted: Outputs, delivery: Delivery, true_N: Indices | None
    ) -> dict[str, Any] | None:
        """Where `method` holds the pretrained model; None without labels."""
        if true_N is None:
            return None
        source_only = self._predict(trainer, SOURCE, "predicting with the pretrained model")
        return {
            "source_only": figures(source_only.labels_N, true_N, self.source.classes),
            "adapted": figures(adapted.labels_N, true_N, self.source.classes),
            "delivered": {"model": delivery.model, "why": delivery.why, "norm": delivery.mode},
            "watched": self._watched_figures(true_N[trainer.watched]) if self.team.main else None,
        }

    def _watched_figures(self, true_N: NDArray[np.int64]) -> dict[str, Any]:
        """Of every cycle, on the images whose predictions were kept: what a choice of checkpoint is judged by."""
        num_classes = len(self.source.classes)
        kept = [(cycle, probabilities.argmax(axis=1)) for cycle, _, probabilities in self.run.journal.read_cycles()]
        return {
            "images": len(true_N),
            "cycles": [cycle for cycle, _ in kept],
            "accuracy": [accuracy(labels, true_N) for _, labels in kept],
            "mean_class_accuracy": [mean_class_accuracy(labels, true_N, num_classes) for _, labels in kept],
        }


@dataclass(frozen=True)
class _Seen:
    """What a last look at the target gives beside the predictions."""

    measured: analysis.Measured
    shown_K: Indices
    """Images that show their features, `shown_KD`."""
    shown_KD: NDArray[np.float32]
    oscillation: dict[str, Any] | None


def evaluate(
    run: str | Path,
    data: str | Path,
    device: str = "auto",
    reporter: Reporter | None = None,
    *,
    unknown: str | Path | None = None,
    oscillation: bool = False,
) -> dict[str, Any]:
    """Figures of the pretrained and the delivered model on a labelled folder, and of the delivered one's certainty, as
    `analysis` lists them. `unknown`: images of other classes, to be told from these. `oscillation`: of the decision boundary."""
    reporter = reporter or Silent()
    model = load(run, device)
    config = model.config
    views, true_N = _labelled_views(data, model, reporter)
    strangers = None if unknown is None else _open(unknown, model, reporter)[0]
    pretrained = load(run, device, "pretrained")
    before = run_batches(pretrained.method, _test_batches(views), SOURCE)
    seed, method = config.training.seed, model.method
    picked_K = analysis.oscillation_images(true_N, seed) if oscillation else None
    measured = analysis.measure(method, _test_batches(views), TARGET, config.training, true_N, picked_K)
    classifier = method.network.classifier
    wavering = analysis.oscillation(measured.features_KD, classifier) if oscillation else None
    found = {
        "run": str(run),
        "data": str(data),
        "source_only": figures(before.labels_N, true_N, model.classes),
        "adapted": figures(measured.predicted_N, true_N, model.classes),
        **analysis.figures(measured, model.classes, true_N, wavering),
    }
    if strangers is not None:
        others = analysis.measure(method, _test_batches(strangers), TARGET, config.training)
        found["unknown"] = {"data": str(unknown), **analysis.open_set(measured, others)}
    return found


def _labelled_views(data: str | Path, model: Model, reporter: Reporter) -> tuple[Batches, Indices]:
    views, opened = _open(data, model, reporter)
    if isinstance(opened, TargetFeatures):
        true_N = known_labels(data, opened.rows, model.classes)
        if true_N is None:
            raise UserError(
                f"{data} does not tell all labels: its array `labels` should name one of the run's {len(model.classes)} "
                f"classes for every row, such as {model.classes[0]}; `certvol predict` needs no labels"
            )
        return views, true_N
    true_N = folder_labels(opened.paths, model.classes)
    if true_N is None:
        stray = next(path for path in sorted(opened.paths) if folder_labels([path], model.classes) is None)
        raise UserError(
            f"{data} does not tell all labels: {printable(stray)} lies in no folder named like one of the run's "
            f"{len(model.classes)} classes, such as {model.classes[0]}/; `certvol predict` needs no labels"
        )
    return views, true_N


def _open(place: str | Path, model: Model, reporter: Reporter) -> tuple[Batches, TargetImages | TargetFeatures]:
    """Images of a folder, or features of a file, on the model's device."""
    if is_feature_file(place):
        features = open_target_features(place)
        model.check_features(features.dim, str(place))
        store = FeatureStore(features.features, features.rows, model.device)
        return FeatureViews(store, store), features
    model.check_images()
    config = model.config
    images = open_target(str(place), cache_size(model.info.image_size), config.data, reporter)
    if images.failures:
        path, reason = images.failures[0]
        reporter.warn(f"{len(images.failures)} unreadable images were left out, such as {printable(path)} ({reason})")
    pixels = PixelStore(images.pixels, images.rows, model.device, config.data.device_share)
    return Views(pixels, pixels, model.info, config.augment), images


def _test_batches(views: Batches) -> Iterator[torch.Tensor]:
    return views.test_batches(TARGET, np.arange(len(views.target)), 256)


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
