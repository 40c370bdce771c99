"""Compare time and memory of an adaptation step of every method that trains with `basic`.

    OMP_NUM_THREADS=1 python benchmarks/method_steps.py  # small_cnn, 60 images of 16 px, one core
    python benchmarks/method_steps.py --device cuda      # inception_v3, 128 images of 224 px, bf16
    python benchmarks/method_steps.py --large --only-memory  # the same on a CPU, in fp32

A step is the trainer's, on a finished batch: drawing batches, labelling and scoring between cycles
are not counted. On a CPU it is processor time, with the methods in turn, so that other load
affects all of them equally; on a GPU each method has the device to itself. Memory is the most that
tensors hold at a time: weights, momentum, a method's networks and all that a step needs. On a CPU
it is counted from the allocations, so that it is the same on any machine.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from bench import ResidentViews, print_figures, random_plan

from certvol.api import resolve_settings
from certvol.distributed import Team
from certvol.methods import discover
from certvol.methods._base import Survey
from certvol.nn.acceleration import prepare, uses_bf16
from certvol.nn.network import seeded_backbone
from certvol.predict.model import create_method
from certvol.training.step import Stepper

ROUNDS, WARM_UP = 25, 6  # steps; the first on a GPU choose convolutions and are recorded
SMALL = {"model.backbone": "small_cnn", "data.image_size": 16, "training.batch_size": 60}
SMALL_CLASSES, LARGE_CLASSES = 10, 31
LARGE = {"model.backbone": "inception_v3", "data.image_size": 224, "training.batch_size": 128}
ON_DIGITS = {"cvp": {"method.num_samples": 16}}  # as in recipes/digits.yaml


class Trainee:
    """Trains a method on one random batch."""

    def __init__(self, name: str, device: torch.device, large: bool) -> None:
        classes = LARGE_CLASSES if large else SMALL_CLASSES
        own = {
            "method.name": name,
            "model.weights": "none",
            "model.norm": "mixed",
            "training.device": str(device),
        }
        sizes = LARGE if large else SMALL | ON_DIGITS.get(name, {})
        config = resolve_settings(settings={**own, **sizes})
        training, size, rows = config.training, config.data.image_size, config.training.batch_size
        backbone, info = seeded_backbone(config.model, size, training.seed)
        self.device, self.place = device, 0
        self.method = create_method(config, backbone, info, classes)
        prepare(self.method, self.method.network, training, device, steps=0)
        self.method.train()
        torch.manual_seed(0)
        images_NCHW = torch.randn(rows, 3, size, size, device=device)
        self.plan = random_plan(rows, classes)
        bf16 = uses_bf16(training, self.method.network, device)
        self.stepper = Stepper(self.method, ResidentViews(images_NCHW), training, Team(), bf16)
        if self.method.labels_whole_target:
            self.stepper.tables = self._tables(rows, info.dim, classes)
        if self.method.teacher is not None:
            self.method.teacher.start()
        self.method.train()

    def _tables(self, images: int, dim: int, classes: int) -> dict[str, torch.Tensor]:
        features_ND = torch.randn(images, dim, device=self.device).relu()
        has_centres = self.method.surveys_source
        centres_CD = torch.rand(classes, dim, device=self.device) if has_centres else None
        generator = torch.Generator(self.device).manual_seed(0)
        with torch.no_grad():
            probabilities_NC = self.method.eval().logits(features_ND).softmax(dim=1)
            survey = Survey(features_ND, probabilities_NC, centres_CD, 1, generator)
            return self.method.label_target(survey).tables

    def seconds(self) -> float:
        """Take one step."""
        clock = time.process_time if self.device.type == "cpu" else time.perf_counter
        self._wait()
        began = clock()
        self.stepper.step(self.plan, 0, self.place, 0.5, True, 1e-4)
        self._wait()
        self.place += 1
        return clock() - began

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def times_on_cpu(names: list[str], large: bool) -> dict[str, float]:
    trainees = {name: Trainee(name, torch.device("cpu"), large) for name in names}
    for trainee in trainees.values():
        trainee.seconds()
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(ROUNDS):
        for name, trainee in trainees.items():
            times[name].append(trainee.seconds())
    return {name: statistics.median(found) for name, found in times.items()}


def most_held(work: Callable[[], object]) -> int:
    """Return the most bytes of CPU memory that tensors made by `work` hold at a time."""
    gc.collect()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        made = work()
    del made
    events = profile.profiler.kineto_results.events()
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    return max(accumulate((change for _, change in changes), initial=0))


def two_steps(name: str, large: bool) -> Trainee:
    """Create a method and take two steps; the first one creates the momentum."""
    trainee = Trainee(name, torch.device("cpu"), large)
    for _ in range(2):
        trainee.seconds()
    return trainee


def on_cpu(names: list[str], large: bool, only_memory: bool) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        found[name] = {"bytes": most_held(partial(two_steps, name, large))}
        print(name, found[name], flush=True)
    if not only_memory:
        torch.set_num_threads(1)
        for name, seconds in times_on_cpu(names, large).items():
            found[name]["seconds"] = seconds
    return found


def on_gpu(names: list[str], device: torch.device) -> dict[str, dict[str, Any]]:
    found = {}
    for name in names:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)  # cuBLAS's workspace, shared by all
        trainee = Trainee(name, device, large=True)
        for _ in range(WARM_UP):
            trainee.seconds()
        seconds = statistics.median(trainee.seconds() for _ in range(ROUNDS))
        found[name] = {
            "seconds": seconds,
            "recorded": len(trainee.stepper.recorder.recordings) > 0,
            "bytes": torch.cuda.max_memory_allocated(device) - before,
        }
        print(name, found[name], flush=True)
        del trainee
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--out", help="every figure, as JSON")
    parser.add_argument("--methods", help="comma-separated names (default: all that train)")
    large = "on a CPU as on a GPU: inception_v3, 128 images of 224 px"
    parser.add_argument("--large", action="store_true", help=large)
    parser.add_argument("--only-memory", action="store_true", help="on a CPU, no times")
    options = parser.parse_args()
    device = torch.device(options.device)
    asked = [name for name, each in discover().items() if each.adapts and not each.closed_form]
    if options.methods:
        asked = options.methods.split(",")
    names = list(dict.fromkeys(["basic", *asked]))
    if device.type == "cuda":
        found = on_gpu(names, device)
    else:
        found = on_cpu(names, options.large, options.only_memory)
    base = dict(found["basic"])
    for figures in found.values():
        measured = [key for key in ("seconds", "bytes") if key in figures]
        figures |= {f"{key}_to_basic": figures[key] / base[key] for key in measured}
    took = f" and {1000 * base['seconds']:.1f} ms" if "seconds" in base else ""
    title = f"a step, compared with basic ({base['bytes'] / 2**30:.3f} GiB{took})"
    by_cost = sorted(found, key=lambda name: found[name].get("seconds", found[name]["bytes"]))
    columns = {"memory": ("bytes_to_basic", ".2f"), "time": ("seconds_to_basic", ".2f")}
    print_figures(title, {name: found[name] for name in by_cost}, columns)
    if options.out:
        Path(options.out).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
