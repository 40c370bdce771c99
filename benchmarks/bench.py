"""What the parts of `speed.py` share: sizes, settings, the model as training has it, a clock."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from certvol import acceleration
from certvol.api import resolve_settings
from certvol.config import Config
from certvol.methods.protocol import AdaptationMethod
from certvol.model import create_method
from certvol.nn.network import seeded_backbone
from certvol.training.views import Views

Figures = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    backbone: str = "resnet50"
    image_size: int = 224
    batch: int = 128
    classes: int = 31
    cycle_steps: int = 50
    cycles: int = 6  # the first warms up and is not counted
    conventional_target: int = 20_000  # images; the files of --images as often as it takes
    cache_images: int = 24_000  # the files of --images as often as it takes
    jpegs_per_class: int = 100  # of those written where no --images are given
    jpeg_side: int = 300
    oscillation: tuple[int, int, int, int] = (615, 1000, 2048, 123)  # features, K, their length, classes: Adaptiope
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

CVP_64, CVP_256 = {"method.name": "cvp", "method.num_samples": 64}, {"method.name": "cvp", "method.num_samples": 256}
BASIC = {"method.name": "basic"}
VARIANTS: dict[str, dict[str, Any]] = {
    "basic": BASIC,
    "cvp M=64": CVP_64,
    "cvp M=256": CVP_256,
    "basic, statistics per domain": {**BASIC, "model.norm": "per_domain"},
    "cvp M=64, statistics per domain": {**CVP_64, "model.norm": "per_domain"},
}
TRAINED = ("basic", "cvp M=64")  # the variants that are trained from end to end, in either way


@dataclass
class Bench:
    sizes: Sizes
    device: torch.device
    seconds: float
    """About as long a timed loop goes on."""
    temporary: Path
    given_images: Path | None
    settings: dict[str, Any]
    """Of the user, over those of the benchmark."""
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
            "training.compile": "always" if self.device.type == "cuda" else "never",  # auto does not for so few steps
            "guard.action": "warn",  # from random weights a run may well collapse, and is to go on
        }
        return resolve_settings(settings={**ours, **VARIANTS[variant], **self.settings, **changed})

    def method(self, config: Config, num_classes: int) -> AdaptationMethod:
        """On the device, laid out and compiled as `certvol.adapt` does it."""
        backbone, info = seeded_backbone(config.model, config.data.image_size, config.training.seed)
        method = create_method(config, backbone, info, num_classes)
        return acceleration.prepare(method, config.training, self.device, steps=0)

    def bf16(self, config: Config, method: AdaptationMethod) -> bool:
        return acceleration.uses_bf16(config.training, method.network, self.device)

    @property
    def eval_batch(self) -> int:
        return acceleration.evaluation_batch(self.device)

    @cached_property
    def images(self) -> Path:
        """The folder given, else one of synthetic JPEGs: smooth colours and some noise."""
        if self.given_images is not None:
            return self.given_images
        rng, s, root = np.random.default_rng(0), self.sizes, self.temporary / "images"
        for label in range(s.classes):
            (root / f"class{label:02d}").mkdir(parents=True)
            for number in range(s.jpegs_per_class):
                coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
                pixels = np.asarray(coarse.resize((s.jpeg_side, s.jpeg_side), Image.Resampling.BICUBIC), dtype=np.int16)
                noisy = (pixels + rng.integers(-12, 13, pixels.shape)).clip(0, 255).astype(np.uint8)
                Image.fromarray(noisy).save(root / f"class{label:02d}" / f"{number}.jpg", quality=90)
        return root

    def random_images(self, count: int) -> Tensor:
        return torch.randn(count, 3, self.sizes.image_size, self.sizes.image_size, device=self.device)

    def need(self, *parts: str) -> None:
        missing = [name for name in parts if name not in self.parts]
        if missing:
            raise LookupError(f"works with the figures of {', '.join(missing)}, which there are none of")

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def median_seconds(self, call: Callable[[], Any], gpu_calls: int = 1) -> float:
        """Of one call: the median over repeats, on a GPU each of `gpu_calls`, as many as hide the waiting for it."""
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


class ResidentViews(Views):
    """The same finished batch at every step: no input work."""

    def __init__(self, images_NCHW: Tensor) -> None:
        self.images_NCHW, self.device = images_NCHW, images_NCHW.device

    def training_batch(self, *_: Any) -> Tensor:
        return self.images_NCHW
