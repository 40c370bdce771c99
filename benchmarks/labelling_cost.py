"""What labels on demand cost, simulated without a network: how many target images a cycle forwards."""

import statistics
from collections.abc import Callable
from functools import partial

import numpy as np
from bench import Bench, Figures
from numpy.typing import NDArray

from certvol.console import print_table
from certvol.data.batches import batch_shape, class_visits, images_needed
from certvol.training.pseudo_labels import file_by_label

TARGET_SIZES = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 72_000)
TARGET_CLASSES, TARGET_BATCH, TARGET_STEPS = 12, 128, (50, 5)
RAREST = {"balanced": 1 / TARGET_CLASSES, "8 %": 0.08, "5 %": 0.05, "2 %": 0.02, "1 %": 0.01, "absent": 0.0}


def labelling(bench: Bench) -> Figures:
    """Simulated, without a network: how many target images a cycle forwards until every class has what it needs."""
    shape = batch_shape(TARGET_BATCH, TARGET_CLASSES)
    # A batch of 12 classes may hold a few images less than 64 of the target; what is asked for is 64.
    fill = max(1.0, TARGET_BATCH / 2 / (shape.classes * shape.per_domain))
    curve: list[Figures] = []
    for steps in TARGET_STEPS:
        for target in TARGET_SIZES:
            for rarest, share in RAREST.items():
                label_chunk = partial(_label_chunk, _labels(target, share))
                walked: list[int] = []
                for walk in range(bench.sizes.walks):
                    order = np.random.default_rng(walk).permutation(target)
                    visits_SK = class_visits(TARGET_CLASSES, shape.classes, walk * steps, steps, 0, "benchmark")
                    needed_C = np.ceil(fill * images_needed(visits_SK, TARGET_CLASSES, shape)).astype(np.int64)
                    walked.append(file_by_label(label_chunk, order, needed_C, bench.eval_batch).walked)
                mean = statistics.mean(walked)
                curve.append(
                    {"steps": steps, "target": target, "rarest": rarest, "forwarded": mean, "most": max(walked)}
                    | {"share": mean / target, "most_share": max(walked) / target}
                )
    for steps in TARGET_STEPS:
        rows = [
            [f"{target:,}"]
            + [
                f"{p['forwarded']:,.0f} ({100 * p['share']:.0f} %)"
                for p in curve
                if (p["steps"], p["target"]) == (steps, target)
            ]
            for target in TARGET_SIZES
        ]
        title = f"images forwarded per cycle of {steps} steps, {TARGET_CLASSES} classes, chunks of {bench.eval_batch} (simulated)"
        print_table(title, ["target \\ rarest class", *RAREST], rows)
    return {"chunk": bench.eval_batch, "walks": bench.sizes.walks, "classes": TARGET_CLASSES, "curve": curve}


def _labels(target: int, rarest: float) -> NDArray[np.int64]:
    """Class 0 has the given share, the others as much as each other."""
    few = round(rarest * target)
    return np.concatenate([np.zeros(few, np.int64), np.arange(target - few) % (TARGET_CLASSES - 1) + 1])


def _label_chunk(
    labels_N: NDArray[np.int64], images: NDArray[np.int64], number: int
) -> Callable[[], NDArray[np.int64]]:
    return lambda: labels_N[images]
