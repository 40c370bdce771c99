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
from certvol.config import Config, flatten, read_settings_file, resolve
from certvol.data.augment import cache_size
from certvol.data.domains import SourceImages, TargetImages, open_source, open_target
from certvol.data.folders import folder_labels, printable, scan
from certvol.data.store import PixelStore
from certvol.environment import describe_environment
from certvol.errors import RunFailed, UserError
from certvol.inference import Outputs, run_batches
from certvol.kept_warnings import KeptWarnings
from certvol.metrics import accuracy, mean_class_accuracy
from certvol.model import Model, create_method, load
from certvol.nn.network import seeded_backbone
from certvol.nn.norm import SOURCE, TARGET
from certvol.nn.teacher import Teacher
from certvol.reporting import Reporter, Silent
from certvol.stopping import StopSignal
from certvol.tables import figures, predictions_csv, read_metrics, write_text
from certvol.training.checkpoint import load_into, read_about, read_tensors, write_tensors
from certvol.training.distributed import Team, join_team
from certvol.training.memory import largest_batch
from certvol.training.position import Delivery
from certvol.training.run_folder import RunFolder
from certvol.training.schedule import steps_per_cycle
from certvol.training.tensorboard import TensorBoard
from certvol.training.trainer import Trainer
from certvol.training.views import Views

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
    resolved = _anchored(resolve_settings(preset, config, {**flatten(settings, "settings"), **places}))
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
        write_text(run.config, resolved.to_yaml())
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
        for folder in (str(config.data.source), str(config.data.target)):
            if not Path(folder).is_dir():
                scan(folder)  # says what is wrong with it, before weights are fetched and images decoded
        backbone, self.info = seeded_backbone(config.model, config.data.image_size, config.training.seed)
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
                    f"{len(domain.failures)} unreadable {name} images were skipped, such as {printable(domain.failures[0][0])} "
                    f"({domain.failures[0][1]}); `certvol check` lists them"
                )
        self.method = create_method(config, backbone, self.info, len(self.source.classes))
        if config.training.teacher > 0 and self.method.teacher is None:
            self.method.teacher = Teacher(self.method, self.method.network, config.training.teacher)
        self._check_choice()

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
        stores = [
            PixelStore(domain.pixels, domain.rows, self.device, config.data.device_share / 2)
            for domain in (self.source, self.target)
        ]
        self.reporter.say(
            f"{len(self.source.rows)} source images in {len(self.source.classes)} classes, "
            f"{len(self.target.rows)} target images; "
            f"{config.method_name} on {self.info.name}, {self.device}; decoded images on {stores[0].place}/{stores[1].place}"
        )
        views = Views(stores[0], stores[1], self.info, config.augment, fused=self.method.network.compiled)
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
        true_N = folder_labels(self.target.paths, self.source.classes)
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
    images = _open(data, config, model, reporter)
    true_N = folder_labels(images.paths, model.classes)
    if true_N is None:
        stray = next(path for path in sorted(images.paths) if folder_labels([path], model.classes) is None)
        raise UserError(
            f"{data} does not tell all labels: {printable(stray)} lies in no folder named like one of the run's "
            f"{len(model.classes)} classes, such as {model.classes[0]}/; `certvol predict` needs no labels"
        )
    strangers = None if unknown is None else _open(unknown, config, model, reporter)
    pretrained = load(run, device, "pretrained")
    before = run_batches(pretrained.method, _test_batches(images, pretrained), SOURCE)
    seed, method = config.training.seed, model.method
    picked_K = analysis.oscillation_images(true_N, seed) if oscillation else None
    measured = analysis.measure(method, _test_batches(images, model), TARGET, config.training, true_N, picked_K)
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
        others = analysis.measure(method, _test_batches(strangers, model), TARGET, config.training)
        found["unknown"] = {"data": str(unknown), **analysis.open_set(measured, others)}
    return found


def _open(folder: str | Path, config: Config, model: Model, reporter: Reporter) -> TargetImages:
    images = open_target(str(folder), cache_size(model.info.image_size), config.data, reporter)
    if images.failures:
        path, reason = images.failures[0]
        reporter.warn(f"{len(images.failures)} unreadable images were left out, such as {printable(path)} ({reason})")
    return images


def _test_batches(images: TargetImages, model: Model) -> Iterator[torch.Tensor]:
    store = PixelStore(images.pixels, images.rows, model.device, model.config.data.device_share)
    views = Views(store, store, model.info, model.config.augment)
    return views.test_batches(TARGET, np.arange(len(store)), 256)
