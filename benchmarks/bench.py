"""Code that the benchmarks share: sizes, settings, models as in training, a clock, tables."""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from certvol.api import resolve_settings
from certvol.cli._console import print_table
from certvol.data.batches import CyclePlan
from certvol.data.views import ImageViews
from certvol.device import evaluation_batch
from certvol.methods._base import AdaptationMethod
from certvol.nn import acceleration
from certvol.nn.network import seeded_backbone
from certvol.predict.model import create_method
from certvol.settings import Config

Figures = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    backbone: str = "resnet50"
    image_size: int = 224
    batch: int = 128
    classes: int = 31
    cycle_steps: int = 50
    cycles: int = 6  # the first warms up and is not counted
    conventional_target: int = 20_000  # images; files of --images are repeated
    cache_images: int = 24_000  # files of --images are repeated
    jpegs_per_class: int = 100  # written if --images is not given
    jpeg_side: int = 300
    # Features, K, length of a feature, classes: as for Adaptiope.
    oscillation: tuple[int, int, int, int] = (615, 1000, 2048, 123)
    walks: int = 10


SMALL = Sizes(
    backbone="small_cnn",
    image_size=32,
    batch=32,
    classes=4,
    cycle_steps=10,
    cycles=4,
    conventional_target=1000,
    cache_images=400,
    jpegs_per_class=50,
    jpeg_side=64,
    oscillation=(40, 100, 64, 10),
    walks=3,
)

CVP_64 = {"method.name": "cvp", "method.num_samples": 64}
CVP_256 = {"method.name": "cvp", "method.num_samples": 256}
BASIC = {"method.name": "basic"}
VARIANTS: dict[str, dict[str, Any]] = {
    "basic": BASIC,
    "cvp M=64": CVP_64,
    "cvp M=256": CVP_256,
    "basic, statistics per domain": {**BASIC, "model.norm": "per_domain"},
    "cvp M=64, statistics per domain": {**CVP_64, "model.norm": "per_domain"},
}
TRAINED = ("basic", "cvp M=64")  # variants that are trained by certvol and conventionally


@dataclass
class Bench:
    sizes: Sizes
    device: torch.device
    seconds: float
    """Approximate duration of a timed loop."""
    temporary: Path
    given_images: Path | None
    settings: dict[str, Any]
    """Settings of the user, which override those of the benchmark."""
    parts: Figures = field(default_factory=dict)

    def config(self, variant: str, **changed: Any) -> Config:
        s = self.sizes
        ours = {
            "model.backbone": s.backbone,
            "model.weights": "none",
            "model.norm": "mixed",
            "data.image_size": s.image_size,
            "data.cache_dir": str(self.temporary / "cache"),
            "training.batch_size": s.batch,
            "training.device": str(self.device),
            "training.cycles": s.cycles,
            "training.cycle_steps": s.cycle_steps,
            "training.pretrain_steps": s.cycle_steps,
            # `auto` would not compile for so few steps.
            "training.compile": "always" if self.device.type == "cuda" else "never",
            "guard.action": "warn",  # a run from random weights may collapse
        }
        return resolve_settings(settings={**ours, **VARIANTS[variant], **self.settings, **changed})

    def method(self, config: Config, num_classes: int) -> AdaptationMethod:
        """Create a method on the device, laid out and compiled as by `certvol.adapt`."""
        backbone, info = seeded_backbone(config.model, config.data.image_size, config.training.seed)
        method = create_method(config, backbone, info, num_classes)
        acceleration.prepare(method, method.network, config.training, self.device, steps=0)
        return method

    def bf16(self, config: Config, method: AdaptationMethod) -> bool:
        return acceleration.uses_bf16(config.training, method.network, self.device)

    @property
    def eval_batch(self) -> int:
        return evaluation_batch(self.device)

    @cached_property
    def images(self) -> Path:
        """Return the given folder, or write one of synthetic JPEGs: smooth colours and noise."""
        if self.given_images is not None:
            return self.given_images
        rng, s, root = np.random.default_rng(0), self.sizes, self.temporary / "images"
        for label in range(s.classes):
            (root / f"class{label:02d}").mkdir(parents=True)
            for number in range(s.jpegs_per_class):
                coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
                pixels = np.asarray(
                    coarse.resize((s.jpeg_side, s.jpeg_side), Image.Resampling.BICUBIC),
                    dtype=np.int16,
                )
                noisy = (pixels + rng.integers(-12, 13, pixels.shape)).clip(0, 255).astype(np.uint8)
                Image.fromarray(noisy).save(
                    root / f"class{label:02d}" / f"{number}.jpg", quality=90
                )
        return root

    def random_images(self, count: int) -> Tensor:
        side = self.sizes.image_size
        return torch.randn(count, 3, side, side, device=self.device)

    def need(self, *parts: str) -> None:
        missing = [name for name in parts if name not in self.parts]
        if missing:
            raise LookupError(f"needs the figures of {', '.join(missing)}; run them too")

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def median_seconds(self, call: Callable[[], Any], gpu_calls: int = 1) -> float:
        """Return the median time of a call.

        On a GPU each measurement makes `gpu_calls` calls, which hides the wait for the device.
        """
        calls = gpu_calls if self.device.type == "cuda" else 1
        for _ in range(calls):
            call()
        self.wait()
        taken: list[float] = []
        until = time.perf_counter() + self.seconds
        while len(taken) < 3 or (time.perf_counter() < until and len(taken) < 100):
            started = time.perf_counter()
            for _ in range(calls):
                call()
            self.wait()
            taken.append((time.perf_counter() - started) / calls)
        return statistics.median(taken)


class ResidentViews(ImageViews):
    """Give every step the same finished batch: no input work."""

    def __init__(self, images_NCHW: Tensor) -> None:
        self.images_NCHW, self.device = images_NCHW, images_NCHW.device

    def training_batch(self, *_: Any) -> Tensor:
        return self.images_NCHW


def random_plan(rows: int, classes: int) -> CyclePlan:
    """Plan one batch with random labels, half of it source images."""
    labels_SN = np.random.default_rng(0).integers(0, classes, (1, rows))
    return CyclePlan(np.arange(rows)[None], labels_SN, np.array([rows // 2], dtype=np.int64))


Columns = Mapping[str, tuple[str, str]]  # head -> key of the figure, format


def print_figures(title: str, found: Figures, columns: Columns, first: str = "method") -> None:
    """Print one row per entry of `found`; a missing figure leaves its cell empty."""
    rows = [
        [name, *(format(f[key], spec) if key in f else "" for key, spec in columns.values())]
        for name, f in found.items()
    ]
    print_table(title, [first, *columns], rows)
