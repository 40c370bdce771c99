"""Self-training between two domains as it is usually written, for comparison in `speed.py`.

Every use of an image opens and decodes its file again. A DataLoader with one worker per core makes
the views with torchvision's transforms. Steps are eager. Every cycle labels the whole target.
Networks, losses, class-balanced batches, learning rates, precision and memory format are certvol's,
so that only the way of working differs.
"""

import importlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from certvol.data.augment import cache_size
from certvol.data.batches import CyclePlan, batch_shape, by_class, class_visits, plan_mixed_cycle
from certvol.data.decode_pool import cores
from certvol.methods._base import AdaptationMethod, Batch
from certvol.nn.backbones import BackboneInfo
from certvol.nn.norm import TARGET
from certvol.nn.torchvision_repair import import_timm
from certvol.predict.forward import mixed_precision, run_batches
from certvol.settings import Config
from certvol.training.planner import adaptation_rate

import_timm()  # repairs the import of torchvision beside a CPU-only torch
T: Any = importlib.import_module("torchvision.transforms")

Indices = NDArray[np.int64]


class ImageFiles(Dataset[Tensor]):
    def __init__(self, files: Sequence[Path], transform: Any) -> None:
        self.files, self.transform = files, transform

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Tensor:
        with Image.open(self.files[index]) as image:
            view: Tensor = self.transform(image.convert("RGB"))
        return view


def training_transform(config: Config, info: BackboneInfo) -> Any:
    """Return the authors' random view, step by step; certvol makes it as a single warp."""
    a, side = config.augment, cache_size(info.image_size)
    return T.Compose(
        [
            T.RandomResizedCrop(side, (a.crop_area, 1.0), (1 / a.crop_aspect, a.crop_aspect)),
            T.RandomHorizontalFlip(),
            T.RandomAffine(a.rotate, (a.shift, a.shift), (1 - a.scale, 1 + a.scale), a.shear),
            T.RandomCrop(info.image_size),
            T.RandomChoice(
                [T.Grayscale(3), T.ColorJitter(*[a.jitter] * 4)], p=[a.grey, 1 - a.grey]
            ),
            T.ToTensor(),
            T.Normalize(info.mean, info.std),
        ]
    )


def test_transform(info: BackboneInfo) -> Any:
    side = cache_size(info.image_size)
    return T.Compose(
        [
            T.Resize((side, side)),
            T.CenterCrop(info.image_size),
            T.ToTensor(),
            T.Normalize(info.mean, info.std),
        ]
    )


class ConventionalLoop:
    """The conventional run. `target` may repeat files, to simulate a larger target."""

    def __init__(
        self,
        labelled_source: tuple[Sequence[Path], Indices],
        target: Sequence[Path],
        method: AdaptationMethod,
        config: Config,
        bf16: bool,
    ) -> None:
        source, source_labels = labelled_source
        self.source, self.target = list(source), list(target)
        self.method, self.config, self.bf16 = method, config, bf16
        self.device = next(method.parameters()).device
        self.info = method.network.info
        self.num_classes = method.network.num_classes
        self.shape = batch_shape(config.training.batch_size, self.num_classes)
        self.source_pools = by_class(source_labels, self.num_classes)
        self.workers = cores()
        t = config.training
        self.optimizer = torch.optim.SGD(
            method.parameters(),
            t.learning_rate,
            t.momentum,
            weight_decay=t.weight_decay,
            nesterov=t.momentum > 0,
        )

    def cycle(self, steps: int) -> tuple[float, float]:
        """Label the whole target, plan, train; return seconds and images labelled per second."""
        started = time.perf_counter()
        labels_N, labelled_per_second = self.label()
        self.train(self.plan(labels_N, steps))
        return time.perf_counter() - started, labelled_per_second

    def label(self, batch_size: int = 256) -> tuple[Indices, float]:
        """Label the whole target; return images per second once every worker is busy."""
        loader = self._loader(self.target, test_transform(self.info), batch_size=batch_size)
        skip = min(self.workers, len(loader) // 2)
        clock = [time.perf_counter()]

        def batches() -> Iterator[Tensor]:
            for number, images in enumerate(loader):
                yield self._on_device(images)
                if number + 1 == skip:
                    self._wait()
                    clock[0] = time.perf_counter()

        labels_N = run_batches(self.method, batches(), TARGET, self.bf16).labels_N
        return labels_N, (len(self.target) - skip * batch_size) / (time.perf_counter() - clock[0])

    def plan(self, labels_N: Indices, steps: int) -> CyclePlan:
        visits_SK = class_visits(
            self.num_classes, self.shape.classes, 0, steps, seed=0, stream="conventional"
        )
        pools = by_class(labels_N, self.num_classes)
        return plan_mixed_cycle(
            self.source_pools, pools, visits_SK, self.shape, np.random.default_rng(0)
        )

    def train(self, plan: CyclePlan, skip: int = 0) -> float:
        """Train on a plan; return images per second of the steps after the first `skip`."""
        rows = [
            [*images_N[:num_source].tolist(), *(images_N[num_source:] + len(self.source)).tolist()]
            for images_N, num_source in zip(plan.images_SN, plan.num_source_S, strict=True)
        ]
        loader = self._loader(
            self.source + self.target,
            training_transform(self.config, self.info),
            batch_sampler=rows,
        )
        self.method.train()
        started = time.perf_counter()
        for index, images in enumerate(loader):
            self.step(images, plan, index)
            if index + 1 == skip:
                self._wait()
                started = time.perf_counter()
        self._wait()
        return (plan.steps - skip) * self.shape.size / (time.perf_counter() - started)

    def step(self, images_NCHW: Tensor, plan: CyclePlan, index: int) -> None:
        progress = index / plan.steps
        for group in self.optimizer.param_groups:
            group["lr"] = adaptation_rate(self.config.training, progress)
        num_source = int(plan.num_source_S[index])
        batch = Batch(
            inputs=self._on_device(images_NCHW),
            labels_N=torch.from_numpy(plan.labels_SN[index]).to(self.device, non_blocking=True),
            num_source=num_source,
            rows=torch.arange(len(images_NCHW)),
            total=len(images_NCHW),
            generator=torch.Generator(self.device).manual_seed(index),
            progress=torch.full((), progress, device=self.device),
            adapting=True,
        )
        with (
            self.method.network.rows_of(num_source=num_source),
            mixed_precision(self.device, self.bf16),
        ):
            loss = torch.stack(list(self.method.loss_terms(batch).values())).sum()
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def _loader(self, files: Sequence[Path], transform: Any, **how: Any) -> DataLoader[Tensor]:
        pinned = self.device.type == "cuda"
        return DataLoader(
            ImageFiles(files, transform), num_workers=self.workers, pin_memory=pinned, **how
        )

    def _on_device(self, images_NCHW: Tensor) -> Tensor:
        moved = images_NCHW.to(self.device, non_blocking=True)
        return moved.to(memory_format=torch.channels_last) if self.device.type == "cuda" else moved

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
