"""Simulate how many target images a cycle forwards when it labels on demand."""

import statistics
from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np
from bench import Bench, Figures
from numpy.typing import NDArray

from certvol.cli._console import print_table
from certvol.data.batches import batch_shape, class_visits, images_needed
from certvol.training.pseudo_labels._pools import fill_pools

TARGET_SIZES = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 72_000)
TARGET_CLASSES, TARGET_BATCH, TARGET_STEPS = 12, 128, (50, 5)
RAREST = {
    "balanced": 1 / TARGET_CLASSES,
    "8 %": 0.08,
    "5 %": 0.05,
    "2 %": 0.02,
    "1 %": 0.01,
    "absent": 0.0,
}


def labelling(bench: Bench) -> Figures:
    """Count the images forwarded until every class has what it needs; no network runs."""
    shape = batch_shape(TARGET_BATCH, TARGET_CLASSES)
    # A batch of 12 classes may hold slightly fewer than 64 target images; count as if it held 64.
    fill = max(1.0, TARGET_BATCH / 2 / (shape.classes * shape.per_domain))
    curve: list[Figures] = []
    for steps, target, (rarest, share) in product(TARGET_STEPS, TARGET_SIZES, RAREST.items()):
        label_chunk = partial(_label_chunk, _labels(target, share))
        walked: list[int] = []
        for walk in range(bench.sizes.walks):
            order, begin = np.random.default_rng(walk).permutation(target), walk * steps
            visits_SK = class_visits(TARGET_CLASSES, shape.classes, begin, steps, 0, "benchmark")
            needed_C = np.ceil(fill * images_needed(visits_SK, TARGET_CLASSES, shape))
            pools = fill_pools(label_chunk, order, needed_C.astype(np.int64), bench.eval_batch)
            walked.append(pools.labelled)
        mean, most = statistics.mean(walked), max(walked)
        point = {"steps": steps, "target": target, "rarest": rarest}
        point |= {"forwarded": mean, "most": most}
        curve.append(point | {"share": mean / target, "most_share": most / target})
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
        title = (
            f"images forwarded per cycle of {steps} steps, {TARGET_CLASSES} classes, "
            f"chunks of {bench.eval_batch} (simulated)"
        )
        print_table(title, ["target \\ rarest class", *RAREST], rows)
    return {
        "chunk": bench.eval_batch,
        "walks": bench.sizes.walks,
        "classes": TARGET_CLASSES,
        "curve": curve,
    }


def _labels(target: int, rarest: float) -> NDArray[np.int64]:
    """Give class 0 this share, and the others equal parts of the rest."""
    few = round(rarest * target)
    return np.concatenate(
        [np.zeros(few, np.int64), np.arange(target - few) % (TARGET_CLASSES - 1) + 1]
    )


def _label_chunk(
    labels_N: NDArray[np.int64], images: NDArray[np.int64], number: int
) -> Callable[[], NDArray[np.int64]]:
    return lambda: labels_N[images]
