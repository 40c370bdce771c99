"""Measure what `certvol adapt` costs on frozen features: processor time, time and peak memory.

    python benchmarks/frozen_runs.py --source inc_webcam.npz --target inc_amazon.npz \
        --before OLD_CLONE/src
    python benchmarks/frozen_runs.py --rows 70000    # made-up features: cost only

Each run is a process of its own, with one thread and default settings. `--before` runs the
certvol of another source tree too, so that both are measured in one command. Labels of the target
are used only to print accuracies.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import certvol

SOURCE_ROWS, DIMS, CLASSES = 10_000, 2048, 12
BLOCK = 5_000  # rows made at once


def make_features(path: Path, rows: int, shift: float, seed: int) -> Path:
    """Write made-up features: a Gaussian per class, with the same means in every file."""
    rng = np.random.default_rng(seed)
    means_CD = np.random.default_rng(0).normal(size=(CLASSES, DIMS)).astype(np.float32)
    labels_N = rng.integers(CLASSES, size=rows)
    rows_ND = np.empty((rows, DIMS), dtype=np.float32)
    for first in range(0, rows, BLOCK):
        part = slice(first, first + BLOCK)
        noise_ND = rng.standard_normal((len(labels_N[part]), DIMS), dtype=np.float32)
        rows_ND[part] = np.maximum(0.15 * means_CD[labels_N[part]] + noise_ND + shift, 0)
    np.savez(path, features=rows_ND, labels=labels_N)
    return path


def measure(tree: Path, source: Path, target: Path, out: Path, words: Sequence[str]) -> list[str]:
    """Run `certvol adapt` from a source tree, and return the cells of a row of the table."""
    command = [sys.executable, "-m", "certvol", "adapt", "--source", str(source)]
    command += ["--target", str(target), "--out", str(out), "--device", "cpu", *words]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    with (out.parent / f"{out.name}.log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        _, status, used = os.wait4(process.pid, 0)
    seconds = time.monotonic() - started
    if status:
        sys.exit((out.parent / f"{out.name}.log").read_text())
    metrics = json.loads((out / "metrics.json").read_text())
    return [
        f"{used.ru_utime + used.ru_stime:.0f}",
        f"{seconds:.0f}",
        f"{used.ru_maxrss / 1024:.0f}",
        f"{100 * metrics['source_only']['accuracy']:.1f}",
        f"{100 * metrics['adapted']['accuracy']:.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, help="a .npz file with labels")
    parser.add_argument("--target", type=Path, help="a .npz file with labels")
    parser.add_argument("--rows", type=int, help="instead of files: made-up target rows")
    parser.add_argument("--before", type=Path, help="`src` of another commit, measured first")
    parser.add_argument("settings", nargs="*", help="for `certvol adapt`, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        if options.rows:
            options.source = make_features(place / "source.npz", SOURCE_ROWS, 0.0, 1)
            options.target = make_features(place / "target.npz", options.rows, 0.1, 2)
        elif not (options.source and options.target):
            parser.error("give --source and --target, or --rows")
        trees = {"now": Path(certvol.__file__).resolve().parents[1]}
        if options.before:
            trees = {"before": options.before.resolve(), **trees}
        print("| tree | CPU s | s | peak MB | before adaptation, % | adapted, % |")
        print("|---|--:|--:|--:|--:|--:|")
        for name, tree in trees.items():
            cells = measure(tree, options.source, options.target, place / name, options.settings)
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
