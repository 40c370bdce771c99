"""Prepare training: open the inputs, build the network and the method, check the settings."""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from certvol import methods
from certvol.data.augment import cache_size
from certvol.data.batches import LEAST_TO_HOLD_OUT, hold_out
from certvol.data.cells import check_classes, nearly_alike
from certvol.data.domains import SourceImages, TargetImages, open_source, open_target
from certvol.data.feature_files import (
    SourceFeatures,
    TargetFeatures,
    check_comparable,
    is_feature_file,
    only_one_is_a_file,
    open_source_features,
    open_target_features,
)
from certvol.data.folders import printable, scan
from certvol.data.sources import mix_ups, places_of, read_shares
from certvol.data.store import Store
from certvol.data.target_prior import read_prior
from certvol.data.views import FeatureViews, ImageViews, Views
from certvol.distributed import Team
from certvol.errors import RunFailed, UserError, is_out_of_memory
from certvol.nn.acceleration import prepare, uses_bf16
from certvol.nn.backbones import BackboneInfo, features_dim, has_pretrained_weights
from certvol.nn.network import seeded_backbone
from certvol.nn.projection import Features, fit_projection, kept_dimensions
from certvol.nn.teacher import Teacher
from certvol.predict.extract import extract_features
from certvol.predict.model import create_method
from certvol.progress import Reporter, Silent, StopSignal, cpu_seconds
from certvol.randomness import torch_generator
from certvol.runs.checkpoint import read_tensors, write_tensors
from certvol.runs.continued import check_source, start_weights
from certvol.runs.folder import RunFolder
from certvol.runs.given_labels import read_given
from certvol.runs.kept_warnings import KeptWarnings
from certvol.runs.tensorboard import TensorBoard
from certvol.scores.validators import VALIDATORS
from certvol.settings import Config
from certvol.training.keeper import RunKeeper, load_weights
from certvol.training.model_choice import Delivery
from certvol.training.planner import steps_of_run
from certvol.training.trainer import Task, Trainer

PLACES = {"gpu": "on the GPU", "pinned": "in RAM", "file": "on disk"}


@dataclass(frozen=True, eq=False)
class Inputs:
    """The images or feature files of both domains, and the backbone for them."""

    config: Config
    """The settings, including those derived from the inputs and the method."""
    source: SourceImages | SourceFeatures
    target: TargetImages | TargetFeatures
    backbone: nn.Module
    info: BackboneInfo

    def with_feature_dims(self) -> "Inputs":
        """Set `model.feature_dims`, which depends on the backbone and the number of images."""
        closed_form = methods.discover()[self.config.method_name].closed_form
        images = len(self.source) + len(self.target)
        model = self.config.model
        dims = kept_dimensions(model, self.info.dim, images, closed_form)
        return replace(self, config=replace(self.config, model=replace(model, feature_dims=dims)))


class Job:
    """The training of one run. Its constructor writes no files, so wrong settings leave none."""

    def __init__(
        self,
        run: RunFolder,
        config: Config,
        reporter: Reporter,
        stop_signal: StopSignal,
        team: Team,
        device: torch.device,
    ) -> None:
        self.run, self.team, self.device, self.stop_signal = run, team, device, stop_signal
        self.reporter = KeptWarnings(reporter if team.main else Silent(), run)
        if config.training.tensorboard and team.main:
            run.journal.follower = TensorBoard(run.journal.history, run.path / "tensorboard")
        inputs = open_inputs(config, self.reporter).with_feature_dims()
        self.config = config = inputs.config
        self.source, self.target, self.info = inputs.source, inputs.target, inputs.info
        paths, names = self.target.paths, self.source.classes
        check_classes(names)
        for text in mix_ups(places_of(config.data), str(config.data.target)) + nearly_alike(names):
            self.reporter.warn(text)
        self.prior = read_prior(config.data, names, self.source.labels)
        self.origins = read_shares(config.training.source_shares, self.source.origins)
        self.given = read_given(run, config, names, paths, self.reporter)
        if self.given is not None:
            adapts = methods.discover()[config.method_name].adapts
            self.given.check(config.method_name if not adapts else None, self.prior, names)
        self.method = create_method(config, inputs.backbone, self.info, len(names))
        start = start_weights(run, config.model, self.about("mixed"))
        if start is not None:
            load_weights(self.method, read_tensors(start), str(start))
            check_source(str(config.model.start), self.source.fingerprint, self.reporter)
        if config.training.teacher > 0 and self.method.teacher is None:
            self.method.teacher = Teacher(self.method, self.method.network, config.training.teacher)
        elif config.training.teacher > 0:
            self.reporter.warn(
                f"{config.method_name} has its own teacher: `training.teacher` is ignored, "
                "set `method.teacher_decay` instead"
            )
        self.accepts_changes = False
        """Resume also if settings changed since the last checkpoint."""
        self.cpu_extracting = 0.0
        """The processor time of feature extraction, which runs share."""
        self._check_validator()

    @property
    def held_out(self) -> NDArray[np.int64]:
        """The held-out source images of the classes that the target prior allows.

        The model never predicts the other classes, so their images say nothing about it.
        """
        labels, data, seed = self.source.labels, self.config.data, self.config.training.seed
        found = hold_out(labels, len(self.source.classes), data.holdout, seed)[1]
        return np.asarray(found[self.prior.allowed_C[labels[found]]])

    def _check_validator(self) -> None:
        """Refuse a validator that needs what this run does not have."""
        config, select = self.config, self.config.guard.select
        needed = None if select == "last" else VALIDATORS[select].needs
        if needed == "held_out_source":
            needs = f"`guard.select {select}` needs held-out source images"
            if self.method.closed_form:
                raise UserError(
                    f"`guard.select {select}` cannot judge a method that is fitted to the "
                    f"target, such as {config.method_name}; choose another validator"
                )
            if config.data.holdout == 0:
                raise UserError(f"{needs}: set `data.holdout` above 0")
            if len(self.held_out) == 0:
                raise UserError(
                    f"{needs}, but none of the {self.prior.allowed_C.sum()} classes has "
                    f"{LEAST_TO_HOLD_OUT} images; add images, or choose another validator"
                )
        if needed == "sigma" and self.method.sigma(torch.zeros(1, self.method.network.dim)) is None:
            raise UserError(
                f"`guard.select {select}` needs a method with a sigma, and {config.method_name} "
                "has none; choose another validator"
            )

    @contextmanager
    def memory_explained(self) -> Iterator[None]:
        """Name the settings to lower if memory runs out."""
        training, data = self.config.training, self.config.data
        try:
            yield
        except torch.OutOfMemoryError:
            raise RunFailed(
                f"the GPU ran out of memory; lower `training.batch_size` (now {training.batch_size}"
                f") or `data.device_share` (now {data.device_share:g}), which keeps images in RAM"
            ) from None
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise RunFailed(
                f"not enough memory; lower `training.batch_size` (now {training.batch_size}), or "
                "`method.num_samples` if the method has it"
            ) from None

    def train(self) -> Delivery:
        """Train; `method` then holds the delivered model, and `views` its inputs."""
        self.reporter.flush()
        config, method, device = self.config, self.method, self.device
        steps = steps_of_run(config.training, method)
        prepare(method, method.network, config.training, device, steps)
        method.network.domains.synchronised = config.model.sync_norm and self.team.size > 1
        self.views, place = self._open_views()
        bf16 = self._uses_bf16()
        precision = " in bf16" if bf16 else ""
        self.reporter.say(
            f"{len(self.source)} source images in {len(self.source.classes)} classes, "
            f"{len(self.target)} target images; {config.method_name} on {self.info.name}, "
            f"{device}{precision}; {place}"
        )
        fingerprints = {"source": self.source.fingerprint, "target": self.target.fingerprint}
        if self.prior.says_anything:
            fingerprints["prior"] = self.prior.fingerprint
        reviewed = None if self.given is None else self.given.training
        if self.given is not None:
            fingerprints["labels"] = self.given.fingerprint
        if reviewed is not None:
            known, none = len(reviewed.images_R), len(reviewed.none_U)
            rest = f"; {none} show none of the classes and are left out" if none else ""
            self.reporter.say(f"training on {known} reviewed target images{rest}")
        mode = method.network.domains.mode
        keeper = RunKeeper(
            self.run,
            config,
            self.team,
            self.about("mixed" if config.model.start is None else mode),
            fingerprints,
            self.reporter,
        )
        keeper.bf16, keeper.accepts_changes = bf16, self.accepts_changes
        precision_kept: Literal["bf16", "fp32"] = "bf16" if bf16 else "fp32"
        config = replace(config, training=replace(config.training, precision=precision_kept))
        labels, prior, origins = self.source.labels, self.prior, self.origins
        task = Task(
            config, method, self.views, labels, prior, self.team, reviewed=reviewed, origins=origins
        )
        with self.stop_signal.deferred():
            delivery = Trainer(task, keeper, self.reporter, self.stop_signal).fit()
        if self.run.journal.follower is not None:
            self.run.journal.follower.close()
        return delivery

    def _uses_bf16(self) -> bool:
        """Return whether to train in bf16: as this machine does best, or as the run began."""
        network, training = self.method.network, self.config.training
        here = uses_bf16(training, network, self.device)
        began = self.run.checkpoints.newest_facts().get("bf16")
        if training.precision != "auto" or not isinstance(began, bool) or began == here:
            return here
        names = {True: "bf16", False: "fp32"}
        self.reporter.warn(
            f"this run began in {names[began]} and keeps it, although `training.precision auto` "
            f"would be {names[here]} on this machine"
        )
        return began

    def about(self, mode: str) -> dict[str, Any]:
        """Return the header of a weights file, for a model in a norm mode."""
        domains = (self.source, self.target)
        names = [d.about for d in domains if isinstance(d, TargetFeatures) and d.about]
        network = {"method": self.config.method_name, "backbone": self.info.name, "norm": mode}
        features = {"features": names[0]} if names else {}
        return {**network, "classes": self.source.classes, **features}

    def _open_views(self) -> tuple[Views, str]:
        """Return the views of both domains, and a text that says which memory holds them."""
        config, domains, network = self.config, (self.source, self.target), self.method.network
        share = config.data.device_share / 2
        if config.model.train == "head":
            found = [self._features(domain) for domain in domains]
            found = self._project(found)
            stores = [Store(*features, self.device, share) for features in found]
            count = stores[0].views
            return FeatureViews(*stores), f"features of {count} view{'' if count == 1 else 's'}"
        images = [d for d in domains if not isinstance(d, TargetFeatures)]
        source, target = (Store(d.pixels, d.rows, self.device, share) for d in images)
        views = ImageViews(source, target, self.info, config.augment, fused=network.compiled)
        places = dict.fromkeys(PLACES[store.place] for store in (source, target))
        return views, f"decoded images {' and '.join(places)}"

    def _features(self, domain: SourceImages | TargetImages | TargetFeatures) -> Features:
        if isinstance(domain, TargetFeatures):
            return domain.features, domain.rows
        config, started, cpu_before = self.config, time.monotonic(), cpu_seconds()
        backbone = self.method.network.backbone
        found = extract_features(backbone, self.info, domain, config, self.device, self.reporter)
        seconds = time.monotonic() - started
        self.cpu_extracting += cpu_seconds() - cpu_before
        self.run.note_time({"phase": "extract", "images": len(domain), "seconds": seconds})
        return found

    def _project(self, found: list[Features]) -> list[Features]:
        """Set the network's projection, if any, and return the features behind it.

        A resumed run reads the projection that it began with, because another machine may compute
        other axes.
        """
        projection = self.method.network.projection
        if projection is None:
            return found
        if self.team.main:
            place = self.run.projection
            if place.exists():
                tensors = read_tensors(place)
            elif self.config.model.start is not None:
                tensors = projection.state_dict()
            else:
                dims, generator = self.method.network.dim, torch_generator("cpu", 0, "axes")
                tensors = fit_projection(found, dims, generator)
            if not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                write_tensors(place, tensors)
            try:
                projection.load_state_dict(tensors)
            except RuntimeError:
                raise RunFailed(
                    f"{place} does not fit this run's features; start a new run"
                ) from None
        self.team.copy_from_main([projection.mean_D, projection.basis_DR])
        if self.method.teacher is not None:
            self.method.teacher.start()
        return [(projection.project(features), rows) for features, rows in found]


def with_trained_part(config: Config) -> Config:
    """Set `model.train`, which depends on the weights and the method.

    A method in closed form needs fixed features: those of a frozen backbone with pretrained weights
    or, without such weights, of this run's pretraining. It uses neither an adapter nor norm trials.
    """
    model = config.model
    pretrained = has_pretrained_weights(model.backbone, model.weights)
    if model.train == "auto":
        model = replace(model, train="head" if pretrained else "all")
    if methods.discover()[config.method_name].closed_form:
        mode = "mixed" if model.norm == "auto" and not pretrained else model.norm
        train = "head" if pretrained else model.train
        model = replace(model, adapter=False, feature_dims=0, train=train, norm=mode)
    return replace(config, model=model)


def open_inputs(config: Config, reporter: Reporter) -> Inputs:
    seed = config.training.seed
    if _are_feature_files(config):
        source = open_source_features(places_of(config.data))
        target = open_target_features(str(config.data.target))
        check_comparable(source, target)
        name = f"features-{source.dim}"
        model = replace(config.model, backbone=name, weights=None, train="head")
        backbone, info = seeded_backbone(model, None, seed)
        config = with_trained_part(replace(config, model=model))
        return Inputs(config, source, target, backbone, info)
    asked = config.model.train
    config = with_trained_part(config)
    if asked == "auto" and config.model.train == "head":
        reporter.say(
            "the backbone has pretrained weights and is frozen; `--model.train all` trains it too"
        )
    elif asked not in ("auto", config.model.train):
        reporter.say(
            f"{config.method_name} works on fixed features: `model.train` is set to "
            f"{config.model.train}"
        )
    if config.data.view_set == "shifted" and config.model.train != "head":
        raise UserError(
            "`data.view_set shifted` averages features of a frozen backbone; set `model.train head`"
        )
    backbone, info = seeded_backbone(config.model, config.data.image_size, seed)
    size = cache_size(info.image_size, config.data.view_set)
    images = _open_folders(config, size, reporter)
    return Inputs(config, *images, backbone, info)


def _are_feature_files(config: Config) -> bool:
    """Return whether both domains are feature files; UserError if only one is, or they differ."""
    places = [*places_of(config.data), str(config.data.target)]
    files = [place for place in places if is_feature_file(place)]
    if (problem := only_one_is_a_file(places)) is not None:
        raise UserError(problem)
    for folder in places:
        if not files and not Path(folder).is_dir():
            scan(folder)  # raises before weights are downloaded
    if not files and features_dim(config.model.backbone) is not None:
        raise UserError(
            f"the backbone `{config.model.backbone}` is for files of features; name one for images"
        )
    return bool(files)


def _open_folders(
    config: Config, size: int, reporter: Reporter
) -> tuple[SourceImages, TargetImages]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        source = open_source(places_of(config.data), size, config.data, reporter)
        target = open_target(str(config.data.target), size, config.data, reporter)
    for warning in caught:
        reporter.warn(str(warning.message))
    for name, failures in (("source", source.failures), ("target", target.failures)):
        if failures:
            path, reason = failures[0]
            reporter.warn(
                f"{len(failures)} unreadable {name} images were skipped, such as {printable(path)} "
                f"({reason}); `certvol check --json FILE` lists them"
            )
    return source, target
