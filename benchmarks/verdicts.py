"""Measure what a run can say about itself without labels: verdict, estimates, probabilities.

    python benchmarks/verdicts.py --features features --out verdicts --seeds 0,1 --minutes 40
    python benchmarks/verdicts.py --out verdicts --tables

Many short runs, by the data and conditions of `robustness.py`, and on the grey values of digits,
which are features that do badly. Some runs fail on purpose:
pretraining that does not learn, self-training on its own guesses, an adversary where the target
lacks classes. Each run is a line of OUT/runs.jsonl, and leaves in OUT/evidence what the verdict is
made from. A command that is repeated after a stop does only what is missing. The order is shuffled,
so that any number of runs is a fair sample. `--tables` judges all evidence with the present code
and prints the tables of docs/results/verdict.md, without training. It takes the folder of
`robustness.py` too, whose runs leave the same evidence.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from evidence_files import evidence_file, recording
from robustness import Cell, append_line, read_lines, settings_of
from robustness_data import digit_tasks, feature_tasks, pixel_tasks
from verdict_tables import tables

CONDITIONS = ("full", "partial", "one-class", "long-tailed", "unknown", "few-source", "few-target")
# Schedules that are just long enough for a trained network, and for a head on frozen features.
DIGITS = {"training.pretrain_steps": 300, "training.cycles": 5}
FEATURES = {"training.pretrain_steps": 120, "training.cycles": 3, "training.cycle_steps": 40}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "argmax": {"training.pseudo_labels": "argmax", "guard.action": "warn"},
    "dann": {"method.name": "dann", "guard.action": "warn"},
    "source_only": {"method.name": "source_only"},
    "unlearnt": {"training.pretrain_steps": 3},
    "no-holdout": {"data.holdout": 0.0},
}


def plan(tasks: Sequence[Any], seeds: Sequence[int]) -> list[Cell]:
    cells = [
        Cell(task, condition, name, seed, (DIGITS if task.data == "digits" else FEATURES) | own)
        for seed in seeds
        for task in tasks
        for condition in CONDITIONS
        for name, own in VARIANTS.items()
    ]
    order = np.random.default_rng(0).permutation(len(cells))
    return [cells[i] for i in order]


def run_cell(cell: Cell, work: Path, out: Path) -> dict[str, Any]:
    """Train on a part of the task, keep the evidence, and return the line of results."""
    import certvol

    part = cell.task.part(cell.condition, cell.seed)
    with tempfile.TemporaryDirectory(dir=work) as folder, recording() as recorded:
        place = Path(folder)
        source = cell.task.source.write(part.source, place / "source")
        target = cell.task.target.write(part.target, place / "target")
        preset, given = settings_of(cell)
        started = time.process_time()
        run = certvol.adapt(source, target, out=place / "run", preset=preset, **given)
        seconds = round(time.process_time() - started, 2)
        recorded.write(evidence_file(out, cell.key), cell.task.target.truth(part.target))
    return {
        "key": cell.key,
        "settings": dict(cell.settings),
        "cpu_seconds": seconds,
        "delivered": run.delivery.model,
        "why": run.delivery.why,
    }


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for results and work")
    parser.add_argument("--features", type=Path, help="folder of BACKBONE_DOMAIN.npz")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no run after this long")
    parser.add_argument("--only", default="", help="data sets, such as digits,office-31-inc")
    parser.add_argument("--tables", action="store_true", help="judge and print, without training")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    options = _options(words)
    place, failures, started = options.out / "runs.jsonl", 0, time.monotonic()
    if not options.tables:
        work = options.out.absolute() / "work"
        work.mkdir(parents=True, exist_ok=True)
        tasks = digit_tasks(work)
        tasks += pixel_tasks(tasks, work)
        tasks += feature_tasks(options.features.absolute()) if options.features else []
        wanted = options.only.split(",") if options.only else {task.data for task in tasks}
        cells = plan(
            [t for t in tasks if t.data in wanted], list(map(int, options.seeds.split(",")))
        )
        done = read_lines(place)
        missing = [cell for cell in cells if cell.key not in done]
        for number, cell in enumerate(missing, start=1):
            if time.monotonic() - started > 60 * options.minutes:
                break
            try:
                line = run_cell(cell, work, options.out)
                append_line(place, line)
                what = f"{line['cpu_seconds']} s"
            except Exception as error:
                failures += 1
                what = f"failed: {type(error).__name__}: {error}"
            print(f"{number}/{len(missing)} {cell.key} {what}", file=sys.stderr, flush=True)
    found = read_lines(options.out / "results.jsonl") | read_lines(place)
    kept = [(key, line, evidence_file(options.out, key)) for key, line in found.items()]
    print(tables([each for each in kept if each[2].exists()]))
    return 1 if failures else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
