"""Measure adaptation if classes are missing, rare, unknown or have few images.

    for DOMAIN in amazon dslr webcam; do
        certvol extract $DATA/office-31/$DOMAIN --backbone inception_v3 --weights W.safetensors \
            --data.image_size 224 --out features/inc_$DOMAIN.npz
    done    # office-caltech: inc_oc_amazon, inc_caltech, inc_oc_dslr, inc_oc_webcam;
            # resnet50_v1: rn_*
    python benchmarks/robustness.py --features features --out robustness --seeds 0,1,2 --jobs 2
    python benchmarks/robustness.py --out robustness --only 'digits/*/partial/*'
    python benchmarks/robustness.py --features features --out robustness \
        --variant lame=training.pseudo_labels=lame,training.cycles=6
    python benchmarks/robustness.py --features features --out robustness \
        --variant right-prior=data.target_prior=right    # the true share of each class, as a CSV

Digits need no data: `certvol` makes them, and `small_cnn` is trained. Everything else is frozen
features, BACKBONE_DOMAIN.npz. Domains whose files are missing are left out.

Each run is a line of OUT/results.jsonl. A command that is repeated after a stop does only what is
missing, and prints all. A gain is the delivered model's accuracy minus that of the run's own model
before adaptation, in points. Labels of the target are used only to choose its images and to
measure; if it has unknown classes, only images of known ones are measured.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from evidence_files import evidence_file, recording
from robustness_data import CONDITIONS, Labels, Task, digit_tasks, feature_tasks

# What `certvol adapt` did before it compared target images with each other.
BEFORE: dict[str, Any] = {
    "training.pseudo_labels": "argmax",
    "training.head_rate": 1.0,
    "training.batches": "auto",
    "training.settled": 0.0,
    "training.class_power": 0.0,
    "model.feature_dims": 0,
    "model.adapter": None,
    "guard.action": "back",
    "data.target_prior": "unknown",
}
RIGHT = "right"  # stands for a CSV of the target's true shares
VARIANTS: dict[str, dict[str, Any]] = {
    "source_only": {"method.name": "source_only"},
    "basic": {"method.name": "basic", **BEFORE},
    "cvp-before": BEFORE,
    "default": {},
}


@dataclass(frozen=True)
class Cell:
    """One run."""

    task: Task
    condition: str
    variant: str
    seed: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        parts = (self.task.data, self.task.name, self.condition, self.variant, str(self.seed))
        return "/".join(parts)


def parse_variant(text: str) -> tuple[str, dict[str, Any]]:
    """Read `name=setting=value,setting=value`."""
    name, _, rest = text.partition("=")
    pairs = [pair.partition("=") for pair in rest.split(",") if pair]
    if not name or not all(sign and "." in setting for setting, sign, _ in pairs):
        raise argparse.ArgumentTypeError(f"{text} is not name=section.field=value,...")
    return name, {setting: yaml.safe_load(value) for setting, _, value in pairs}


def plan(
    tasks: Iterable[Task],
    variants: Mapping[str, Mapping[str, Any]],
    seeds: Sequence[int],
    only: Sequence[str],
) -> list[Cell]:
    cells = [
        Cell(task, condition, name, seed, settings)
        for seed in seeds
        for condition in CONDITIONS
        for task in tasks
        for name, settings in variants.items()
    ]
    return [cell for cell in cells if not only or any(fnmatch(cell.key, word) for word in only)]


def run_cell(cell: Cell, work: Path, out: Path) -> dict[str, Any]:
    """Train on a part of the task, keep the evidence, and return the line of results."""
    import certvol

    part = cell.task.part(cell.condition, cell.seed)
    line: dict[str, Any] = {"key": cell.key, "settings": dict(cell.settings)}
    with tempfile.TemporaryDirectory(dir=work) as folder, recording() as recorded:
        place = Path(folder)
        source = cell.task.source.write(part.source, place / "source")
        target = cell.task.target.write(part.target, place / "target")
        preset, given = settings_of(cell)
        if given.get("data.target_prior") == RIGHT:
            shares = place / "shares.csv"
            write_shares(cell.task.target.labels()[part.target], shares)
            given = {**given, "data.target_prior": str(shares)}
        started = time.process_time()
        run = certvol.adapt(source, target, out=place / "run", preset=preset, **given)
        line["cpu_seconds"] = round(time.process_time() - started, 2)
        recorded.write(evidence_file(out, cell.key), cell.task.target.truth(part.target))
        figures = run.metrics
        if figures is None:  # some images are of unknown classes
            known = cell.task.target.write(part.scored, place / "known")
            figures = certvol.evaluate(run.path, known)
        line |= {
            "images": [len(part.source), len(part.target), len(part.scored)],
            "source_only": figures["source_only"]["accuracy"],
            "adapted": figures["adapted"]["accuracy"],
            "delivered": run.delivery.model,
            "why": run.delivery.why,
            "scores": first_and_last_scores(run.path),
        }
    return line


def first_and_last_scores(run: Path) -> list[dict[str, Any]]:
    """Return the label-free scores of the pretrained model and of the last cycle."""
    place = run / "cycles" / "scores.jsonl"
    lines = place.read_text().splitlines() if place.exists() else []
    return [json.loads(lines[0]), json.loads(lines[-1])] if lines else []


def write_shares(labels: Labels, path: Path) -> None:
    """Write how often each class occurs, as `data.target_prior` reads it."""
    names, counts = np.unique(labels, return_counts=True)
    rows = [f"{name},{count}" for name, count in zip(names, counts, strict=True)]
    path.write_text("\n".join(["class,share", *rows]) + "\n")


def settings_of(cell: Cell) -> tuple[str, dict[str, Any]]:
    """Return the preset of a run and its settings, without those that this version lacks."""
    from certvol import methods
    from certvol.benchmark.suites import find_suite
    from certvol.settings import list_settings
    from certvol.training import pseudo_labels

    preset, given = "default", {"training.seed": cell.seed, "training.device": "cpu"}
    if cell.task.data == "digits":
        suite = find_suite("digits")
        preset, given = suite.preset, {**suite.settings, **given}
    own = list_settings(methods.config_classes(), pseudo_labels.config_classes())
    known = {name for name, *_ in own}
    old = {
        name: value for name, value in cell.settings.items() if name in known or name not in BEFORE
    }
    return preset, {**given, **old}


def read_lines(path: Path) -> dict[str, dict[str, Any]]:
    """Return the results by key; the last line of a killed command may be cut off."""
    found = {}
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        found[line["key"]] = line
    return found


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    with path.open("a+b") as file:
        if file.tell() and not _ends_a_line(file):
            file.write(b"\n")
        file.write((json.dumps(line) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def _ends_a_line(file: Any) -> bool:
    file.seek(-1, os.SEEK_END)
    return bool(file.read(1) == b"\n")


def table(lines: Iterable[Mapping[str, Any]]) -> str:
    """Return Markdown: a table for each data set, a row for each condition and variant."""
    groups: dict[str, dict[tuple[str, str], list[Mapping[str, Any]]]] = {}
    for line in lines:
        data, _, condition, variant, _ = line["key"].split("/")
        groups.setdefault(data, {}).setdefault((condition, variant), []).append(line)
    parts = []
    for data, rows in groups.items():
        head = (
            "| condition | variant | runs | before | after | gain | worst task | kept pretrained "
            "| CPU s |"
        )
        parts += [f"### {data}", "", head, "|---|---|--:|--:|--:|--:|---|--:|--:|"]
        order = list(CONDITIONS)
        for (condition, variant), found in sorted(
            rows.items(), key=lambda row: order.index(row[0][0])
        ):
            parts.append(f"| {condition} | {variant} | {' | '.join(_row(found))} |")
        parts.append("")
    return "\n".join(parts)


def _row(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Average over the runs; the worst task has the least gain in the mean over seeds."""
    gains: dict[str, list[float]] = {}
    for line in lines:
        task = line["key"].split("/")[1]
        gains.setdefault(task, []).append(100 * (line["adapted"] - line["source_only"]))
    by_task = {task: statistics.fmean(each) for task, each in gains.items()}
    worst = min(by_task, key=by_task.__getitem__)
    mean = {
        name: statistics.fmean(line[name] for line in lines) for name in ("source_only", "adapted")
    }
    kept = statistics.fmean(line["delivered"] == "pretrained" for line in lines)
    return [
        str(len(lines)),
        f"{100 * mean['source_only']:.1f}",
        f"{100 * mean['adapted']:.1f}",
        f"{statistics.fmean(by_task.values()):+.1f}",
        f"{worst} {by_task[worst]:+.1f}",
        f"{100 * kept:.0f} %",
        f"{statistics.fmean(line['cpu_seconds'] for line in lines):.0f}",
    ]


def _options(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for results and work")
    parser.add_argument("--features", type=Path, help="folder of BACKBONE_DOMAIN.npz")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--jobs", type=int, default=1, help="processes, of one thread each")
    parser.add_argument("--variant", type=parse_variant, action="append", default=[])
    parser.add_argument(
        "--only",
        default="",
        help="patterns of DATA/TASK/CONDITION/VARIANT/SEED, separated by commas",
    )
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    options = _options(words)
    os.environ["OMP_NUM_THREADS"] = "1"
    work = options.out.absolute() / "work"
    work.mkdir(parents=True, exist_ok=True)
    tasks = digit_tasks(work) + (
        feature_tasks(options.features.absolute()) if options.features else []
    )
    seeds = [int(seed) for seed in options.seeds.split(",")]
    only = [word for word in options.only.split(",") if word]
    cells = plan(tasks, {**VARIANTS, **dict(options.variant)}, seeds, only)
    place = options.out / "results.jsonl"
    done = read_lines(place)
    missing = [c for c in cells if done.get(c.key, {}).get("settings") != dict(c.settings)]
    failures = 0
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = {
            pool.submit(run_cell, cell, work, options.out.absolute()): cell for cell in missing
        }
        for number, future in enumerate(as_completed(waiting), start=1):
            cell = waiting[future]
            try:
                append_line(place, future.result())
                what = "done"
            except Exception as error:
                failures += 1
                what = f"failed: {type(error).__name__}: {error}"
            print(f"{number}/{len(missing)} {cell.key} {what}", file=sys.stderr, flush=True)
    keys = {cell.key for cell in cells}
    print(table(line for key, line in read_lines(place).items() if key in keys))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
