"""Measure how fast certvol is, and how much faster than the conventional way.

    python benchmarks/speed.py --images FOLDER --out benchmarks/H200.json    # ResNet-50 on a GPU
    python benchmarks/speed.py --small                                       # anywhere, in a minute

It prints tables and writes all figures as JSON. A part that fails is reported, and the others run.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import speed_parts
import torch
from bench import SMALL, Bench, Figures, Sizes
from labelling_cost import labelling

from certvol.cli._console import print_table
from certvol.data.decode_pool import cores
from certvol.device import pick_device
from certvol.errors import CertvolError
from certvol.runs.environment import describe_environment

PARTS: dict[str, Callable[[Bench], Figures]] = {
    "steps": speed_parts.steps,
    "end_to_end": speed_parts.end_to_end,
    "inference": speed_parts.inference,
    "labelling": labelling,
    "cache": speed_parts.cache,
    "oscillation": speed_parts.oscillation,
    "conventional": speed_parts.conventional,
    "whole_run": speed_parts.whole_run,
}
# The targets for an H200: name, path to the figure, at least or at most, target.
BARS: list[tuple[str, str, str, float]] = [
    ("ceiling, basic, images/s", "steps/basic/images_per_second", ">=", 5000),
    ("cvp M=64 step, x basic", "steps/cvp M=64/step_time_to_basic", "<=", 1.05),
    ("cvp M=256 step, x basic", "steps/cvp M=256/step_time_to_basic", "<=", 1.15),
    (
        "training less labelling, x ceiling",
        "end_to_end/cvp M=64/to_ceiling_without_labelling",
        ">=",
        0.9,
    ),
    ("training, x ceiling", "end_to_end/cvp M=64/to_ceiling", ">=", 0.8),
    ("inference, images/s", "inference/images_per_second", ">=", 20_000),
    ("forwarded, 72k, rarest 2 %, 50 steps", "labelling/50 steps", "<=", 0.25),
    ("forwarded, 72k, rarest 2 %, 5 steps", "labelling/5 steps", "<=", 0.05),
    ("oscillation, s", "oscillation/seconds", "<=", 30),
    (
        "training less labelling, x conventional",
        "conventional/cvp M=64/ours_less_labelling_to_this",
        ">=",
        3,
    ),
    (
        "a cycle, 20k target, rarest 2 %, x faster",
        "conventional/cvp M=64/our_cycle_to_this",
        ">=",
        3,
    ),
    ("whole run, rarest 2 %, x conventional", "whole_run/2 %/to_conventional", "<=", 0.2),
]


def main() -> int:
    options = _options()
    try:
        device = pick_device(options.device)
    except CertvolError as error:
        print(f"speed.py: {error}", file=sys.stderr)
        return 2
    sizes = SMALL if options.small else Sizes()
    sizes = replace(
        sizes,
        backbone=options.backbone or sizes.backbone,
        image_size=options.image_size or sizes.image_size,
    )
    settings = dict(options.set)
    result = _about(device, options.commit)
    result |= {"small": options.small, "settings": settings, "sizes": asdict(sizes)}
    result |= {"parts": {}, "failed": {}}
    with tempfile.TemporaryDirectory(prefix="certvol-speed-") as temporary:
        folder, seconds = Path(temporary), options.seconds or (0.5 if options.small else 5.0)
        bench = Bench(sizes, device, seconds, folder, options.images, settings)
        for name in options.only:
            _measure(name, bench, result)
            if options.out:
                options.out.write_text(json.dumps(result, indent=2) + "\n")
    _print_bars(result)
    for name, reason in result["failed"].items():
        print(f"failed: {name}: {reason}")
    return 1 if result["failed"] else 0


def _about(device: torch.device, commit: str | None) -> Figures:
    about = describe_environment(device)
    machine = {
        "device": about["device"],
        "cores": cores(),
        "torch": torch.__version__,
        "python": about["versions"]["python"],
    }
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"machine": machine, "commit": commit or about["commit"], "date": date}


def _measure(name: str, bench: Bench, result: Figures) -> None:
    print(f"{name} ...", file=sys.stderr, flush=True)
    started = time.perf_counter()
    try:
        bench.parts[name] = PARTS[name](bench)
        bench.parts[name]["part_took_seconds"] = round(time.perf_counter() - started, 1)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        result["failed"][name] = f"{type(error).__name__}: {reason}"
        print(f"{name} failed: {result['failed'][name]}", file=sys.stderr)
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    result |= {"parts": bench.parts, "bars": _against_bars(bench.parts)}


def _against_bars(parts: Figures) -> list[Figures]:
    """Compare each figure that was measured; for the simulated walks, the longest."""
    shares = {
        f"{p['steps']} steps": p["most_share"]
        for p in parts.get("labelling", {}).get("curve", [])
        if (p["target"], p["rarest"]) == (72_000, "2 %")
    }
    found = []
    for name, path, sign, bar in BARS:
        value: Any = {**parts, "labelling": shares}
        for key in path.split("/"):
            value = value.get(key, {})
        if isinstance(value, float):
            met = value >= bar if sign == ">=" else value <= bar
            found.append({"name": name, "value": value, "bar": f"{sign} {bar:g}", "met": met})
    return found


def _print_bars(result: Figures) -> None:
    small, machine = result["small"], result["machine"]
    rows = []
    for bar in result["bars"]:
        value = f"{bar['value']:,.{0 if bar['value'] > 100 else 3}f}"
        rows.append([bar["name"], bar["bar"], value, "yes" if bar["met"] else "NO"])
    met = "met (means nothing with --small)" if small else "met"
    print_table("targets", ["", "target", "found", met], rows)
    about = f"{machine['device']['name']}, {machine['cores']} cores, torch {machine['torch']}"
    print(f"{about}; commit {result['commit']}")


def _part_names(text: str) -> list[str]:
    for name in text.split(","):
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"no part {name}; the parts are {', '.join(PARTS)}")
    return [name for name in PARTS if name in text.split(",")]


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"expected section.field=value, found {text}")
    return name, value


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    add = parser.add_argument
    add("--images", type=Path, help="JPEGs in class folders (default: synthetic ones)")
    add("--out", type=Path, help="JSON file for all figures")
    add("--small", action="store_true", help="small_cnn on 32 px")
    add("--device", default="auto")
    add("--only", type=_part_names, default=list(PARTS), help=f"some of {','.join(PARTS)}")
    add("--backbone", help="default: resnet50, with --small small_cnn; weights are random")
    add("--image-size", type=int)
    add("--seconds", type=float, help="approximate duration of a timed loop")
    add("--set", type=_setting, action="append", default=[], help="section.field=value")
    add("--commit", help="needed if the code is not in a git checkout")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
