"""How fast certvol is, and how much faster than the conventional way: one command, tables on stdout, all figures as JSON.

    python benchmarks/speed.py --images FOLDER --out benchmarks/H200.json    # a GPU: ResNet-50, 224 px, batches of 128
    python benchmarks/speed.py --small                                       # any machine, well below a minute

Each part is a function of its own; one that fails is reported with its reason, and the others go on.
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bars import against_bars
from bench import SMALL, TRAINED, VARIANTS, Bench, Figures, ResidentViews, Sizes
from labelling_cost import TARGET_STEPS, labelling
from torch import Tensor

import certvol
from certvol import metrics
from certvol.config import Config, DataConfig, TrainingConfig
from certvol.console import percent, print_table
from certvol.data.augment import cache_size
from certvol.data.batches import CyclePlan, batch_shape
from certvol.data.cache import open_cache
from certvol.data.folders import labels_of, no_images_in, scan
from certvol.environment import describe_environment, pick_device
from certvol.errors import CertvolError, UserError
from certvol.inference import run_batches
from certvol.methods.protocol import AdaptationMethod
from certvol.nn.norm import TARGET
from certvol.training.distributed import Team
from certvol.training.stepper import Stepper


def steps(bench: Bench) -> Figures:
    """Step time with a resident batch: the ceiling of training."""
    batch, classes = bench.sizes.batch, bench.sizes.classes
    rng = np.random.default_rng(0)
    plan = CyclePlan(
        np.arange(batch)[None], rng.integers(0, classes, (1, batch)), np.array([batch // 2], dtype=np.int64)
    )
    found: Figures = {}
    for name in VARIANTS:
        config = bench.config(name)
        method = bench.method(config, classes).train()
        stepper = Stepper(
            method, ResidentViews(bench.random_images(batch)), config.training, Team(), bench.bf16(config, method)
        )
        seconds = bench.median_seconds(partial(_step, stepper, plan, count()), gpu_calls=10)
        basic = found.get("basic", {}).get("step_seconds", seconds)
        found[name] = {
            "step_seconds": seconds,
            "images_per_second": batch / seconds,
            "step_time_to_basic": seconds / basic,
        }
    rows = [
        [
            name,
            f"{1000 * f['step_seconds']:.2f}",
            f"{f['images_per_second']:,.0f}",
            f"{f['step_time_to_basic']:.3f}",
        ]
        for name, f in found.items()
    ]
    title = f"steps with a resident batch of {batch}: {bench.sizes.backbone}, {bench.sizes.image_size} px"
    print_table(title, ["method", "ms per step", "images/s", "x basic"], rows)
    return found


def _step(stepper: Stepper, plan: CyclePlan, places: Iterator[int]) -> None:
    stepper.step(plan, 0, next(places), progress=0.5, adapting=True, learning_rate=1e-4)


def end_to_end(bench: Bench) -> Figures:
    """Real training, as `certvol.adapt` does it, with the images as source and target."""
    found: Figures = {}
    classes, _ = labels_of(scan(bench.images))
    trained = bench.sizes.cycle_steps * batch_shape(bench.sizes.batch, len(classes)).size  # images per cycle
    for name in TRAINED:
        run = bench.temporary / f"run {name}"
        certvol.adapt(bench.images, bench.images, out=run, **_sections(bench.config(name)))
        lines = [json.loads(line) for line in (run / "timing.jsonl").read_text().splitlines()]
        labelling = {line["cycle"]: line for line in lines if "labelled" in line and line["cycle"] > 0}
        ended = {line["cycle"]: line for line in lines if "looking" in line and line["cycle"] > 0}
        cycles = {cycle: line["seconds"] for cycle, line in ended.items()}
        with_labelling = trained / statistics.median(cycles.values())
        without = trained / statistics.median(cycles[c] - labelling[c]["seconds"] for c in cycles)
        labelled, took = (sum(line[key] for line in labelling.values()) for key in ("labelled", "seconds"))
        found[name] = {
            "images_per_second": with_labelling,
            "images_per_second_without_labelling": without,
            "looking_seconds_per_cycle": statistics.median(line["looking"] for line in ended.values()),
            "training_seconds_per_cycle": statistics.median(line["training"] for line in ended.values()),
            "labelled_per_cycle": labelled / len(labelling),
            "labelled_per_second": labelled / took,
            "target_images": len(scan(bench.images).paths),
            "cycles_timed": len(cycles),
            "trained_per_cycle": trained,
        }
        if "steps" in bench.parts:
            ceiling = bench.parts["steps"][name]["images_per_second"]
            found[name] |= {"to_ceiling": with_labelling / ceiling, "to_ceiling_without_labelling": without / ceiling}
    rows = [
        [
            name,
            f"{f['images_per_second_without_labelling']:,.0f}",
            percent(f.get("to_ceiling_without_labelling")),
            f"{f['images_per_second']:,.0f}",
            percent(f.get("to_ceiling")),
            f"{f['labelled_per_cycle']:,.0f} of {f['target_images']:,}",
            f"{f['labelled_per_second']:,.0f}",
            f"{1000 * f['looking_seconds_per_cycle']:,.0f}",
        ]
        for name, f in found.items()
    ]
    print_table(
        f"real training, median over {bench.sizes.cycles - 1} cycles of {bench.sizes.cycle_steps} steps",
        [
            "method",
            "images/s less labelling",
            "% of ceiling",
            "images/s",
            "% of ceiling",
            "labelled",
            "labelled/s",
            "look, ms",
        ],
        rows,
    )
    return found


def _sections(config: Config) -> dict[str, Any]:
    sections = config.as_dict()
    return {**sections, "data": {k: v for k, v in sections["data"].items() if k not in ("source", "target")}}


def inference(bench: Bench) -> Figures:
    """Of images that lie on the device, with results on the host."""
    config = bench.config("cvp M=64")
    method = bench.method(config, bench.sizes.classes)
    images, repeats = bench.random_images(bench.eval_batch), 8
    found: Figures = {"batch": len(images)}
    for name, bf16 in (("images_per_second", bench.bf16(config, method)), ("images_per_second_exact", False)):
        seconds = bench.median_seconds(partial(_infer, method, [images] * repeats, bf16))
        found[name] = repeats * len(images) / seconds
    rows = [
        ["as labelling does it", f"{found['images_per_second']:,.0f}"],
        ["in full precision, as for predictions.csv", f"{found['images_per_second_exact']:,.0f}"],
    ]
    print_table(f"inference: labels and sigma, batches of {len(images)} on the device", ["", "images/s"], rows)
    return found


def _infer(method: AdaptationMethod, batches: list[Tensor], bf16: bool) -> None:
    run_batches(method, iter(batches), TARGET, bf16)


def cache(bench: Bench) -> Figures:
    """Decoding files that the operating system has in memory into the cache, written to disk."""
    listing = scan(bench.images)
    if not listing.paths:
        raise UserError(no_images_in(listing))
    side = cache_size(bench.sizes.image_size)
    for path in listing.paths:
        (listing.root / path).read_bytes()
    found: Figures = {"side": side}
    for name, workers, images in (
        ("all_cores", 0, bench.sizes.cache_images),
        ("one_core", 1, bench.sizes.cache_images // 8),
    ):
        chosen = np.arange(images) % len(listing.paths)  # the files as often as it takes
        some = replace(
            listing,
            paths=[listing.paths[i] for i in chosen],
            sizes=listing.sizes[chosen],
            mtimes_ns=listing.mtimes_ns[chosen],
        )
        folder = bench.temporary / f"cache {name}"
        started = time.perf_counter()
        open_cache(some, side, DataConfig(cache_dir=str(folder), workers=workers))
        found[name] = {"images": images, "images_per_second": images / (time.perf_counter() - started)}
        shutil.rmtree(folder, ignore_errors=True)
    rows = [
        [name.replace("_", " "), f"{found[name]['images']:,}", f"{found[name]['images_per_second']:,.0f}"]
        for name in ("all_cores", "one_core")
    ]
    print_table(f"building the cache, {side} px, start of the processes included", ["", "images", "images/s"], rows)
    return found


def oscillation(bench: Bench) -> Figures:
    features, points, dim, classes = bench.sizes.oscillation
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(bench.device)

    layers = [(normal(dim, dim) / dim**0.5, normal(dim)), (normal(classes, dim) / dim**0.5, normal(classes))]
    features_ND = normal(features, dim)
    metrics.oscillation(features_ND[:3], layers, num_points=points)  # warms up
    bench.wait()
    started = time.perf_counter()
    total = metrics.oscillation(features_ND, layers, num_points=points).total
    seconds = time.perf_counter() - started
    pairs = features * (features - 1) // 2
    title = f"oscillation: {features} features of {dim}, {pairs:,} pairs, K = {points}, {classes} classes, two layers"
    print_table(title, ["", "seconds"], [["all pairs", f"{seconds:.2f}"]])
    return {"features": features, "pairs": pairs, "points": points, "seconds": seconds, "total": total}


def conventional(bench: Bench) -> Figures:
    """PIL for every use, a DataLoader with every core a worker, torchvision's transforms, eager steps, full labelling."""
    from conventional import ConventionalLoop

    listing = scan(bench.images)
    classes, labels_N = labels_of(listing)
    files = [listing.root / path for path, label in zip(listing.paths, labels_N, strict=True) if label >= 0]
    target = [files[i % len(files)] for i in range(bench.sizes.conventional_target)]
    found: Figures = {"target_images": len(target), "cycle_steps": bench.sizes.cycle_steps}
    for name in TRAINED:
        config = bench.config(name, **{"training.compile": "never"})
        method = bench.method(config, len(classes))
        loop = ConventionalLoop(
            files, labels_N[labels_N >= 0], target, method, config, bench.device, bench.bf16(config, method)
        )
        guess_N = np.arange(len(target)) % len(classes)
        loop.train(loop.plan(guess_N, 3))  # warms up
        skip = 2 * loop.workers  # by then what the workers had made in advance is used up
        figures: Figures = {"images_per_second": loop.train(loop.plan(guess_N, skip + max(20, 4 * loop.workers)), skip)}
        if name != "basic":
            figures["cycle_seconds"], figures["labelled_per_second"] = loop.cycle(bench.sizes.cycle_steps)
        if "end_to_end" in bench.parts:
            ours = bench.parts["end_to_end"][name]
            rate = figures["images_per_second"]
            figures["ours_less_labelling_to_this"] = ours["images_per_second_without_labelling"] / rate
            figures["ours_to_this"] = ours["images_per_second"] / rate
            if "cycle_seconds" in figures and "labelling" in bench.parts:
                figures |= _same_cycle(bench, ours, len(target), figures["cycle_seconds"])
        found |= {name: figures, "workers": loop.workers}
    rows = [
        [
            name,
            f"{found[name]['images_per_second']:,.0f}",
            *(
                f"{found[name][key]:,.{digits}f}" if key in found[name] else ""
                for key, digits in (
                    ("labelled_per_second", 0),
                    ("cycle_seconds", 1),
                    ("ours_less_labelling_to_this", 2),
                    ("ours_to_this", 2),
                    ("our_cycle_to_this", 2),
                )
            ),
        ]
        for name in TRAINED
    ]
    print_table(
        f"the conventional way: {found['workers']} workers; a cycle labels {len(target):,} images and trains "
        f"{bench.sizes.cycle_steps} steps",
        [
            "method",
            "training images/s",
            "labelled/s",
            "cycle, s",
            "ours less labelling, x",
            "ours with labelling, x",
            "our cycle, x",
        ],
        rows,
    )
    return found


def _same_cycle(bench: Bench, ours: Figures, target: int, conventional_seconds: float) -> Figures:
    """A cycle of either way on the same target, whose rarest class has 2 %: of ours, by its rates and the simulated walk."""
    walk = next(
        p
        for p in bench.parts["labelling"]["curve"]
        if (p["steps"], p["target"], p["rarest"]) == (TARGET_STEPS[0], target, "2 %")
    )
    trained = ours["trained_per_cycle"] / ours["images_per_second_without_labelling"]
    seconds = trained + walk["forwarded"] / ours["labelled_per_second"]
    return {"our_cycle_seconds": seconds, "our_cycle_to_this": conventional_seconds / seconds}


def whole_run(bench: Bench) -> Figures:
    """EXTRAPOLATED from rates that the other parts measured: a run of the default length, 50,000 images in either domain."""
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
    usual = trained / their_training + (t.cycles + 1) * images / their_labels  # the last time to predict
    found: Figures = {"extrapolated_from_images_per_second": rates, "conventional_seconds": usual}
    rows = [["conventional", f"{images:,}", f"{usual:,.1f}", "1"]]
    # Both domains are decoded; the pretrained and the adapted model predict.
    once = 2 * images / decoding + trained / training + 2 * images / predicting
    for point in parts["labelling"]["curve"]:
        if (point["steps"], point["target"]) == (50, images):
            rarest, forwarded = point["rarest"], point["forwarded"]
            seconds = once + t.cycles * forwarded / labels
            found[rarest] = {"seconds": seconds, "to_conventional": seconds / usual}
            rows.append([f"certvol, rarest class: {rarest}", f"{forwarded:,.0f}", f"{seconds:,.1f}"])
            rows[-1].append(f"{seconds / usual:.3f}")
    title = f"whole run: {images:,} target images, {t.pretrain_steps} + {t.cycles} x 50 steps of {t.batch_size}"
    print_table(f"{title}. EXTRAPOLATED, not run", ["", "labelled per cycle", "seconds", "x conventional"], rows)
    print_table(
        "... from these measured rates", ["", "images/s"], [[key, f"{rate:,.0f}"] for key, rate in rates.items()]
    )
    return found


PARTS: dict[str, Callable[[Bench], Figures]] = {
    part.__name__: part
    for part in (steps, end_to_end, inference, labelling, cache, oscillation, conventional, whole_run)
}


def main() -> int:
    options = _options()
    try:
        device = pick_device(options.device)
    except CertvolError as error:
        print(f"speed.py: {error}", file=sys.stderr)
        return 2
    given = {name: value for name in ("backbone", "image_size") if (value := getattr(options, name)) is not None}
    sizes = replace(SMALL if options.small else Sizes(), **given)
    about = describe_environment(device)
    result: Figures = {
        "machine": {
            "device": about["device"],
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "torch": torch.__version__,
            "python": about["versions"]["python"],
        },
        "commit": options.commit or about["commit"],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "small": options.small,
        "settings": dict(options.set),
        "sizes": asdict(sizes),
        "parts": {},
        "failed": {},
    }
    with tempfile.TemporaryDirectory(prefix="certvol-speed-") as temporary:
        bench = Bench(sizes, device, options.seconds, Path(temporary), options.images, dict(options.set))
        for name in options.only:
            print(f"{name} ...", file=sys.stderr, flush=True)
            started = time.perf_counter()
            try:
                bench.parts[name] = PARTS[name](bench)
                bench.parts[name]["part_took_seconds"] = round(time.perf_counter() - started, 1)
            except Exception as error:  # a part may fail in any way: it is told, and the others go on
                reason = (str(error).strip().splitlines() or [""])[0]
                result["failed"][name] = f"{type(error).__name__}: {reason}"
                print(f"{name} failed: {result['failed'][name]}", file=sys.stderr)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            result |= {"parts": bench.parts, "bars": against_bars(bench.parts)}
            if options.out:
                options.out.write_text(json.dumps(result, indent=2) + "\n")
    met = "small: says nothing" if options.small else "met"
    rows = [
        [
            b["name"],
            b["bar"],
            f"{b['value']:,.{0 if b['value'] > 100 else 3}f}",
            "" if options.small else "yes" if b["met"] else "NO",
        ]
        for b in result["bars"]
    ]
    print_table("asked for, and found", ["", "asked", "found", met], rows)
    machine = result["machine"]
    print(f"{machine['device']['name']}, {machine['cores']} cores, torch {machine['torch']}; commit {result['commit']}")
    for name, reason in result["failed"].items():
        print(f"failed: {name}: {reason}")
    return 1 if result["failed"] else 0


def _options() -> argparse.Namespace:
    def part_names(text: str) -> list[str]:
        unknown = [name for name in text.split(",") if name not in PARTS]
        if unknown:
            raise argparse.ArgumentTypeError(f"no part {unknown[0]}; there are {', '.join(PARTS)}")
        return [name for name in PARTS if name in text.split(",")]

    def setting(text: str) -> tuple[str, str]:
        name, equals, value = text.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"expected section.field=value, found {text}")
        return name, value

    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--images", type=Path, help="JPEGs in class folders; without: synthetic ones")
    parser.add_argument("--out", type=Path, help="JSON file for all figures")
    parser.add_argument("--small", action="store_true", help="small_cnn on 32 px")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", type=part_names, default=list(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--backbone", help="instead of resnet50, or of small_cnn with --small; weights are random")
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--seconds", type=float, default=None, help="about as long a timed loop goes on")
    parser.add_argument("--set", type=setting, action="append", default=[], help="section.field=value, as for certvol")
    parser.add_argument("--commit", help="where the code lies in no git checkout")
    options = parser.parse_args()
    options.seconds = options.seconds if options.seconds is not None else (0.5 if options.small else 5.0)
    return options


if __name__ == "__main__":
    sys.exit(main())
