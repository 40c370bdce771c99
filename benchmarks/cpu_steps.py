"""Measure layout and precision of a backbone on a CPU: processor time of training and prediction.

    OMP_NUM_THREADS=1 python benchmarks/cpu_steps.py --backbone resnet50 --image-size 224 --batch 32

The four combinations take turns in one process, so that other load affects all of them equally.
Weights and images are random.
"""

import argparse
import itertools
import statistics
import time

import torch
from torch import Tensor, nn

from certvol.cli._console import print_table
from certvol.device import cpu_has_bf16
from certvol.nn.backbones import create_backbone
from certvol.predict.forward import mixed_precision

CPU = torch.device("cpu")
LAYOUTS = {"channels first": torch.contiguous_format, "channels last": torch.channels_last}


def step_seconds(backbone: nn.Module, images_NCHW: Tensor, bf16: bool, training: bool) -> float:
    backbone.train(training)
    started = time.process_time()
    with torch.set_grad_enabled(training):
        with mixed_precision(CPU, bf16):
            features_ND = backbone(images_NCHW)
        if training:
            features_ND.float().square().mean().backward()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backbone", default="resnet50")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    images_NCHW = torch.randn(options.batch, 3, options.image_size, options.image_size)
    backbones, images = {}, {}
    for layout, memory_format in LAYOUTS.items():
        backbone, _ = create_backbone(options.backbone, "none", options.image_size)
        backbones[layout] = backbone.to(memory_format=memory_format)
        images[layout] = images_NCHW.contiguous(memory_format=memory_format)
    kinds = list(itertools.product((False, True), LAYOUTS, (True, False)))
    taken: dict[tuple[bool, str, bool], list[float]] = {kind: [] for kind in kinds}
    for repeat in range(options.repeats + 1):
        for bf16, layout, training in kinds:
            seconds = step_seconds(backbones[layout], images[layout], bf16, training)
            if repeat > 0:  # the first round warms up
                taken[bf16, layout, training].append(seconds)
    medians = {kind: statistics.median(seconds) for kind, seconds in taken.items()}
    rows = []
    for bf16, layout in itertools.product((False, True), LAYOUTS):
        row = ["bf16" if bf16 else "fp32", layout]
        for training in (True, False):
            seconds = medians[bf16, layout, training]
            first = medians[False, "channels first", training]
            row += [f"{options.batch / seconds:.1f}", f"{first / seconds:.2f}"]
        rows.append(row)
    print_table(
        f"{options.backbone}, {options.image_size} px, batches of {options.batch}, "
        f"torch {torch.__version__}, bf16 in "
        f"hardware: {'yes' if cpu_has_bf16() else 'no'}",
        ["precision", "layout", "trained/s", "factor", "predicted/s", "factor"],
        rows,
        text_columns=2,
    )


if __name__ == "__main__":
    main()
