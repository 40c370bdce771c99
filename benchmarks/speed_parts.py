"""The parts of `speed.py`: each measures one stage, prints a table and returns its figures."""

import json
import shutil
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch
from bench import TRAINED, VARIANTS, Bench, Figures, ResidentViews, print_figures, random_plan
from labelling_cost import TARGET_STEPS
from torch import Tensor

import certvol
from certvol.cli._console import print_table
from certvol.data.augment import cache_size
from certvol.data.batches import CyclePlan, batch_shape
from certvol.data.cache import open_cache
from certvol.data.folders import labels_of, no_images_in, scan
from certvol.distributed import Team
from certvol.errors import UserError
from certvol.methods._base import AdaptationMethod
from certvol.nn.norm import TARGET
from certvol.predict.forward import run_batches
from certvol.scores.oscillation import oscillation_between
from certvol.settings import Config, DataConfig, TrainingConfig
from certvol.training.step import Stepper


def steps(bench: Bench) -> Figures:
    """Measure a step on a resident batch: the ceiling of training."""
    batch, classes = bench.sizes.batch, bench.sizes.classes
    plan = random_plan(batch, classes)
    found: Figures = {}
    for name in VARIANTS:
        config = bench.config(name)
        method = bench.method(config, classes).train()
        views = ResidentViews(bench.random_images(batch))
        stepper = Stepper(method, views, config.training, Team(), bench.bf16(config, method))
        seconds = bench.median_seconds(partial(_step, stepper, plan, count()), gpu_calls=10)
        basic = found.get("basic", {}).get("step_seconds", seconds)
        found[name] = {
            "step_seconds": seconds,
            "images_per_second": batch / seconds,
            "step_time_to_basic": seconds / basic,
        }
    sizes = f"{bench.sizes.backbone}, {bench.sizes.image_size} px"
    columns = {
        "seconds per step": ("step_seconds", ".5f"),
        "images/s": ("images_per_second", ",.0f"),
        "x basic": ("step_time_to_basic", ".3f"),
    }
    print_figures(f"steps with a resident batch of {batch}: {sizes}", found, columns)
    return found


def _step(stepper: Stepper, plan: CyclePlan, places: Iterator[int]) -> None:
    stepper.step(plan, 0, next(places), progress=0.5, adapting=True, learning_rate=1e-4)


def end_to_end(bench: Bench) -> Figures:
    """Measure `certvol.adapt` itself, with the images as source and target."""
    found: Figures = {}
    listing = scan(bench.images)
    classes, _ = labels_of(listing)
    trained = bench.sizes.cycle_steps * batch_shape(bench.sizes.batch, len(classes)).size
    for name in TRAINED:
        run = bench.temporary / f"run {name}"
        certvol.adapt(bench.images, bench.images, out=run, **_sections(bench.config(name)))
        lines = [json.loads(line) for line in (run / "timing.jsonl").read_text().splitlines()]
        lines = [line for line in lines if line.get("cycle", 0) > 0]
        labelling = {line["cycle"]: line for line in lines if "labelled" in line}
        cycles = {line["cycle"]: line for line in lines if "looking" in line}
        less_labelling = [
            line["seconds"] - labelling[cycle]["seconds"] for cycle, line in cycles.items()
        ]
        labelled = sum(line["labelled"] for line in labelling.values())
        figures = {
            "images_per_second": trained / _median(cycles, "seconds"),
            "images_per_second_without_labelling": trained / statistics.median(less_labelling),
            "looking_seconds_per_cycle": _median(cycles, "looking"),
            "training_seconds_per_cycle": _median(cycles, "training"),
            "labelled_per_cycle": labelled / len(labelling),
            "labelled_per_second": labelled / sum(line["seconds"] for line in labelling.values()),
            "target_images": len(listing.paths),
            "cycles_timed": len(cycles),
            "trained_per_cycle": trained,
        }
        if "steps" in bench.parts:
            ceiling = bench.parts["steps"][name]["images_per_second"]
            for suffix in ("", "_without_labelling"):
                figures[f"to_ceiling{suffix}"] = figures[f"images_per_second{suffix}"] / ceiling
        found[name] = figures
    columns = {
        "images/s less labelling": ("images_per_second_without_labelling", ",.0f"),
        "of ceiling": ("to_ceiling_without_labelling", ".1%"),
        "images/s": ("images_per_second", ",.0f"),
        "of ceiling ": ("to_ceiling", ".1%"),
        "labelled": ("labelled_per_cycle", ",.0f"),
        "of": ("target_images", ","),
        "labelled/s": ("labelled_per_second", ",.0f"),
        "look, s": ("looking_seconds_per_cycle", ".3f"),
    }
    cycles_timed = f"{bench.sizes.cycles - 1} cycles of {bench.sizes.cycle_steps} steps"
    print_figures(f"real training, median over {cycles_timed}", found, columns)
    return found


def _median(lines: dict[int, Figures], key: str) -> float:
    return statistics.median(line[key] for line in lines.values())


def _sections(config: Config) -> dict[str, Any]:
    sections = config.as_dict()
    for name in ("source", "target"):
        del sections["data"][name]
    return sections


def inference(bench: Bench) -> Figures:
    """Measure prediction of images on the device, with results on the host."""
    config = bench.config("cvp M=64")
    method = bench.method(config, bench.sizes.classes)
    images, repeats = bench.random_images(bench.eval_batch), 8
    found: Figures = {"batch": len(images)}
    bf16 = {"images_per_second": bench.bf16(config, method), "images_per_second_exact": False}
    for name, low_precision in bf16.items():
        seconds = bench.median_seconds(partial(_infer, method, [images] * repeats, low_precision))
        found[name] = repeats * len(images) / seconds
    rows = {"as for labelling": "images_per_second"}
    rows |= {"in full precision, as for predictions.csv": "images_per_second_exact"}
    title = f"inference: labels and sigma, batches of {len(images)} on the device"
    table = [[words, f"{found[name]:,.0f}"] for words, name in rows.items()]
    print_table(title, ["", "images/s"], table)
    return found


def _infer(method: AdaptationMethod, batches: list[Tensor], bf16: bool) -> None:
    run_batches(method, iter(batches), TARGET, bf16)


def cache(bench: Bench) -> Figures:
    """Measure decoding into the cache on disk, of files that the system has in memory."""
    listing = scan(bench.images)
    if not listing.paths:
        raise UserError(no_images_in(listing))
    side = cache_size(bench.sizes.image_size)
    for path in listing.paths:
        (listing.root / path).read_bytes()
    found: Figures = {}
    sizes = {"all_cores": (0, bench.sizes.cache_images)}
    sizes |= {"one_core": (1, bench.sizes.cache_images // 8)}
    for name, (workers, images) in sizes.items():
        chosen = np.arange(images) % len(listing.paths)
        repeated = replace(
            listing,
            paths=[listing.paths[i] for i in chosen],
            status_N3=listing.status_N3[chosen],
        )
        folder = bench.temporary / f"cache {name}"
        started = time.perf_counter()
        open_cache(repeated, side, DataConfig(cache_dir=str(folder), workers=workers))
        rate = images / (time.perf_counter() - started)
        found[name] = {"images": images, "images_per_second": rate}
        shutil.rmtree(folder, ignore_errors=True)
    title = f"building the cache, {side} px, including the start of the processes"
    columns = {"images": ("images", ","), "images/s": ("images_per_second", ",.0f")}
    print_figures(title, found, columns, first="")
    return {"side": side, **found}


def oscillation(bench: Bench) -> Figures:
    """Measure the oscillation of a two-layer classifier."""
    features, points, dim, classes = bench.sizes.oscillation
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(bench.device)

    hidden = normal(dim, dim) / dim**0.5, normal(dim)
    layers = [hidden, (normal(classes, dim) / dim**0.5, normal(classes))]
    features_ND = normal(features, dim)
    oscillation_between(features_ND[:3], layers, num_points=points)  # warms up
    bench.wait()
    started = time.perf_counter()
    total = oscillation_between(features_ND, layers, num_points=points).total
    seconds = time.perf_counter() - started
    pairs = features * (features - 1) // 2
    shape = f"{features} features of {dim}, {pairs:,} pairs, K = {points}, {classes} classes"
    print_table(f"oscillation: {shape}", ["", "seconds"], [["all pairs", f"{seconds:.2f}"]])
    found = {"features": features, "pairs": pairs, "points": points}
    return {**found, "seconds": seconds, "total": total}


def conventional(bench: Bench) -> Figures:
    """Measure the conventional way: PIL, DataLoader workers, eager steps, full labelling."""
    from conventional import ConventionalLoop

    listing = scan(bench.images)
    classes, labels_N = labels_of(listing)
    labelled = zip(listing.paths, labels_N, strict=True)
    files = [listing.root / path for path, label in labelled if label >= 0]
    target = [files[i % len(files)] for i in range(bench.sizes.conventional_target)]
    found: Figures = {}
    for name in TRAINED:
        config = bench.config(name, **{"training.compile": "never"})
        method = bench.method(config, len(classes))
        loop = ConventionalLoop(
            (files, labels_N[labels_N >= 0]), target, method, config, bench.bf16(config, method)
        )
        guess_N = np.arange(len(target)) % len(classes)
        loop.train(loop.plan(guess_N, 3))  # warms up
        skip = 2 * loop.workers  # by then all that the workers had prepared is used up
        plan = loop.plan(guess_N, skip + max(20, 4 * loop.workers))
        figures: Figures = {"images_per_second": loop.train(plan, skip)}
        if name != "basic":
            seconds, labelled_per_second = loop.cycle(bench.sizes.cycle_steps)
            figures |= {"cycle_seconds": seconds, "labelled_per_second": labelled_per_second}
        if "end_to_end" in bench.parts:
            ours, rate = bench.parts["end_to_end"][name], figures["images_per_second"]
            without_labelling = ours["images_per_second_without_labelling"]
            figures["ours_less_labelling_to_this"] = without_labelling / rate
            figures["ours_to_this"] = ours["images_per_second"] / rate
            if "cycle_seconds" in figures and "labelling" in bench.parts:
                figures |= _same_cycle(bench, ours, len(target), figures["cycle_seconds"])
        found[name] = figures
    columns = {
        "training images/s": ("images_per_second", ",.0f"),
        "labelled/s": ("labelled_per_second", ",.0f"),
        "cycle, s": ("cycle_seconds", ",.1f"),
        "ours less labelling, x": ("ours_less_labelling_to_this", ",.2f"),
        "ours with labelling, x": ("ours_to_this", ",.2f"),
        "our cycle, x": ("our_cycle_to_this", ",.2f"),
    }
    cycle = f"{len(target):,} images labelled and {bench.sizes.cycle_steps} steps per cycle"
    print_figures(f"the conventional way: {loop.workers} workers; {cycle}", found, columns)
    about = {"target_images": len(target), "cycle_steps": bench.sizes.cycle_steps}
    return {**about, "workers": loop.workers, **found}


def _same_cycle(bench: Bench, ours: Figures, target: int, conventional_seconds: float) -> Figures:
    """Compare cycles on one target, whose rarest class has 2 %.

    Ours is computed from its measured rates and the simulated walk.
    """
    walk = next(
        p
        for p in bench.parts["labelling"]["curve"]
        if (p["steps"], p["target"], p["rarest"]) == (TARGET_STEPS[0], target, "2 %")
    )
    trained = ours["trained_per_cycle"] / ours["images_per_second_without_labelling"]
    seconds = trained + walk["forwarded"] / ours["labelled_per_second"]
    return {"our_cycle_seconds": seconds, "our_cycle_to_this": conventional_seconds / seconds}


def whole_run(bench: Bench) -> Figures:
    """EXTRAPOLATE a default run with 50,000 images per domain from the other parts' rates."""
    bench.need("end_to_end", "inference", "labelling", "cache", "conventional")
    parts, name, t, images = bench.parts, "cvp M=64", TrainingConfig(), 50_000
    ours, theirs = parts["end_to_end"][name], parts["conventional"][name]
    rates = {
        "certvol, decoding": parts["cache"]["all_cores"]["images_per_second"],
        "certvol, training less labelling": ours["images_per_second_without_labelling"],
        "certvol, labelling": ours["labelled_per_second"],
        "certvol, predicting": parts["inference"]["images_per_second_exact"],
        "conventional, training": theirs["images_per_second"],
        "conventional, labelling": theirs["labelled_per_second"],
    }
    decoding, training, labels, predicting, their_training, their_labels = rates.values()
    trained = (t.pretrain_steps + t.cycles * 50) * t.batch_size
    # It labels the target once per cycle and predicts it at the end.
    usual = trained / their_training + (t.cycles + 1) * images / their_labels
    # Both domains are decoded; the pretrained and the adapted model predict.
    once = 2 * images / decoding + trained / training + 2 * images / predicting
    found: Figures = {}
    rows = [["conventional", f"{images:,}", f"{usual:,.1f}", "1"]]
    for point in parts["labelling"]["curve"]:
        if (point["steps"], point["target"]) == (50, images):
            rarest, forwarded = point["rarest"], point["forwarded"]
            seconds = once + t.cycles * forwarded / labels
            found[rarest] = {"seconds": seconds, "to_conventional": seconds / usual}
            figures = f"{forwarded:,.0f}", f"{seconds:,.1f}", f"{seconds / usual:.3f}"
            rows.append([f"certvol, rarest class: {rarest}", *figures])
    length = f"{t.pretrain_steps} + {t.cycles} x 50 steps of {t.batch_size}"
    title = f"whole run: {images:,} target images, {length}. EXTRAPOLATED, not run"
    print_table(title, ["", "labelled per cycle", "seconds", "x conventional"], rows)
    table = [[key, f"{rate:,.0f}"] for key, rate in rates.items()]
    print_table("... from these measured rates", ["", "images/s"], table)
    about = {"extrapolated_from_images_per_second": rates, "conventional_seconds": usual}
    return {**about, **found}
