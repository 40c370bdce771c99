"""What a run is given: images of both domains or files of their features, and the backbone that goes with them."""

import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from certvol.config import Config
from certvol.data.augment import cache_size
from certvol.data.domains import SourceImages, TargetImages, open_source, open_target
from certvol.data.feature_files import (
    SourceFeatures,
    TargetFeatures,
    check_alike,
    is_feature_file,
    open_source_features,
    open_target_features,
    other_is_no_file,
)
from certvol.data.folders import printable, scan
from certvol.data.store import PixelStore
from certvol.errors import UserError
from certvol.extraction import extract_features
from certvol.fixed_features import settled
from certvol.nn.backbones import BackboneInfo, features_dim
from certvol.nn.network import Network, seeded_backbone
from certvol.reporting import Reporter
from certvol.training.feature_views import FeatureStore, FeatureViews
from certvol.training.run_folder import RunFolder
from certvol.training.views import Batches, Views

Domain = SourceImages | TargetImages | TargetFeatures
PLACES = {"gpu": "on the GPU", "pinned": "in RAM", "file": "on disk"}


@dataclass(frozen=True, eq=False)
class Inputs:
    config: Config
    """As given, but for what follows from the inputs and the method: a frozen backbone for features."""
    source: SourceImages | SourceFeatures
    target: TargetImages | TargetFeatures
    backbone: nn.Module
    info: BackboneInfo

    @property
    def fingerprints(self) -> dict[str, str]:
        return {"source": self.source.fingerprint, "target": self.target.fingerprint}


def open_inputs(config: Config, reporter: Reporter) -> Inputs:
    given_features = _given_features(config)
    if given_features:
        features = open_source_features(str(config.data.source))
        target = open_target_features(str(config.data.target))
        check_alike(features, target)
        model = replace(config.model, backbone=f"features-{features.dim}", weights=None, train="head")
        backbone, info = seeded_backbone(model, None, config.training.seed)
        return Inputs(settled(replace(config, model=model)), features, target, backbone, info)
    given, config = config, settled(config)
    if config.model.train != given.model.train:
        reporter.say(f"{config.method_name} works on fixed features: `model.train` is set to {config.model.train}")
    backbone, info = seeded_backbone(config.model, config.data.image_size, config.training.seed)
    return Inputs(config, *_open_folders(config, cache_size(info.image_size), reporter), backbone, info)


def _given_features(config: Config) -> bool:
    """Whether both domains are files of features; says what is wrong with a place that is neither that nor a folder."""
    places = [str(config.data.source), str(config.data.target)]
    files = [place for place in places if is_feature_file(place)]
    if (problem := other_is_no_file(places)) is not None:
        raise UserError(problem)
    for folder in places:
        if not files and not Path(folder).is_dir():
            scan(folder)  # says what is wrong with it, before weights are fetched and images decoded
    if not files and features_dim(config.model.backbone) is not None:
        raise UserError(f"the backbone `{config.model.backbone}` is for files of features; name one for images")
    return bool(files)


def _open_folders(config: Config, size: int, reporter: Reporter) -> tuple[SourceImages, TargetImages]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        source = open_source(str(config.data.source), size, config.data, reporter)
        target = open_target(str(config.data.target), size, config.data, reporter)
    for warning in caught:
        reporter.warn(str(warning.message))
    for name, failures in (("source", source.failures), ("target", target.failures)):
        if failures:
            reporter.warn(
                f"{len(failures)} unreadable {name} images were skipped, such as {printable(failures[0][0])} "
                f"({failures[0][1]}); `certvol check --json FILE` lists them"
            )
    return source, target


def open_views(
    inputs: Inputs, network: Network, device: torch.device, run: RunFolder, reporter: Reporter
) -> tuple[Batches, str]:
    """What training sees of both domains, and in words where it lies: images, or the features of a frozen backbone.

    `network` lies on the device already."""
    config, source, target = inputs.config, inputs.source, inputs.target
    share = config.data.device_share / 2
    if config.model.train == "head":
        stores = [
            FeatureStore(*_features(domain, inputs, network, device, run, reporter), device, share)
            for domain in (source, target)
        ]
        return FeatureViews(*stores), f"features of {stores[0].views} views"
    if isinstance(source, TargetFeatures) or isinstance(target, TargetFeatures):
        raise AssertionError("files of features are trained on with model.train head")
    images = [PixelStore(domain.pixels, domain.rows, device, share) for domain in (source, target)]
    views = Views(images[0], images[1], inputs.info, config.augment, fused=network.compiled)
    places = dict.fromkeys(PLACES[store.place] for store in images)
    return views, f"decoded images {' and '.join(places)}"


def _features(
    domain: Domain, inputs: Inputs, network: Network, device: torch.device, run: RunFolder, reporter: Reporter
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    if isinstance(domain, TargetFeatures):
        return domain.features, domain.rows
    config, started = inputs.config, time.monotonic()
    # Once for all steps, so in full precision where the settings leave it open: predictions of new images are.
    bf16 = config.training.precision == "bf16"
    found = extract_features(
        network.backbone, inputs.info, domain, config.data.views, config.augment, config.data, device, bf16, reporter
    )
    run.note_time({"phase": "extract", "images": len(domain), "seconds": time.monotonic() - started})
    return found
