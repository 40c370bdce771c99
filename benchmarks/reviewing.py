"""Measure what reviewing is worth: reviewers are simulated, and know every label.

    python benchmarks/reviewing.py --features features --out reviewing --seeds 0,1 --minutes 40
    python benchmarks/reviewing.py --out reviewing --tables

`features` holds BACKBONE_DOMAIN.npz, as for `robustness.py`; the grey values of digits need none.
Per task and seed, a run is made and reviewed, and further runs continue from it: with some number
of labels, of random images, of chosen ones or of half and half. A logistic regression gets the same
labels, with and without the source. Each is a line of OUT/results.jsonl; a command that is repeated
after a stop does only what is missing. `--tables` also draws 1,000 reviews of every run in
OUT/outcomes, and of those that `--evidence` holds. It counts how often the interval holds the true
accuracy, and how often accepted images are wrong more often than promised.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from robustness import append_line, read_lines
from robustness_data import Task, digit_tasks, feature_tasks, pixel_tasks

SHORT = {"pretrain_steps": 120, "cycles": 3, "cycle_steps": 40}
DRAWS = 1000
FEWEST_IMAGES = 250  # of a target that reviews are drawn from
BUDGETS = (25, 50, 100, 200, 400)
RISKS = (0.05, 0.1, 0.2)
POLICIES = ("random", "chosen", "both")
PLAIN = ("target labels alone", "source and target labels")
Flags = NDArray[np.bool_]


def true_labels(place: Path) -> dict[str, str]:
    with np.load(place) as file:
        return dict(zip(file["paths"].tolist(), file["labels"].tolist(), strict=True))


def right_of(target: Any, truth: dict[str, str]) -> Flags:
    """Return which images of the target a run predicts right."""
    predicted = [target.classes[label] for label in target.predicted_N]
    return np.array(
        [truth[path] == name for path, name in zip(target.paths, predicted, strict=True)]
    )


def rows_for(target: Any, policy: str, count: int) -> list[int]:
    """Return the images that a reviewer with so much time labels."""
    if policy == "both":
        return [item.row for item in target.queue(count // 2)]
    return [item.row for item in target.queue(count) if item.kind == policy]


def figures(right_N: Flags, rows: Sequence[int]) -> dict[str, Any]:
    """Return the accuracy on the whole target, and on the images that were not labelled."""
    rest_N = np.ones(len(right_N), np.bool_)
    rest_N[list(rows)] = False
    found = {"accuracy": float(right_N.mean()), "labels": len(rows)}
    return found | ({"rest": float(right_N[rest_N].mean())} if rest_N.any() else {})


def continued(first: Path, target: Any, truth: dict[str, str], rows: Sequence[int]) -> Flags:
    """Return which images a run that continues with these labels predicts right."""
    import certvol
    from certvol.review.target import open_target
    from certvol.runs.review_labels import COLUMNS, Review, review_cells
    from certvol.runs.tables import csv_text

    reviews = [Review(target.paths[row], truth[target.paths[row]]) for row in rows]
    labels, out = first.parent / "labels.csv", first.parent / "second"
    labels.write_text(csv_text(COLUMNS, map(review_cells, reviews)))
    shutil.rmtree(out, ignore_errors=True)
    certvol.adapt(out=out, from_run=first, target_labels=labels)
    return right_of(open_target(out), truth)


def plain(task: Task, target: Any, rows: Sequence[int], with_source: bool) -> Flags:
    """Return which images a logistic regression on the same features predicts right."""
    from sklearn.linear_model import LogisticRegression

    def unit(place: Path) -> tuple[NDArray[np.float32], NDArray[np.str_], list[str]]:
        with np.load(place) as file:
            features = file["features"].reshape(len(file["paths"]), -1, file["features"].shape[-1])
            norms = np.linalg.norm(features[:, 0], axis=1, keepdims=True)
            return features[:, 0] / norms, file["labels"], file["paths"].tolist()

    features_ND, names_N, paths = unit(task.target.place)
    places = [paths.index(target.paths[row]) for row in rows]
    train_MD, train_M = features_ND[places], names_N[places]
    if with_source:
        source_SD, source_S, _ = unit(task.source.place)
        train_MD = np.concatenate([source_SD, train_MD])
        train_M = np.concatenate([source_S, train_M])
    if len(np.unique(train_M)) < 2:
        return np.zeros(len(paths), np.bool_)
    model = LogisticRegression(C=100.0, max_iter=200, tol=1e-3).fit(train_MD, train_M)
    right = dict(zip(paths, model.predict(features_ND) == names_N, strict=True))
    return np.array([right[path] for path in target.paths])


def measured(task: Task, seed: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the missing lines of a task and seed."""
    import certvol
    from certvol.review.target import open_target

    done = read_lines(options.out / "results.jsonl")
    base = f"{task.data}/{task.name}/{seed}"
    keys = [f"{base}/{policy}/{n}" for n in options.labels for policy in (*POLICIES, *PLAIN)]
    if all(key in done for key in (base, *keys)):
        return
    truth = true_labels(task.target.place)
    with tempfile.TemporaryDirectory() as folder:
        first, started = Path(folder) / "first", time.monotonic()
        places = task.source.place, task.target.place
        schedule = SHORT if options.short else {}
        run = certvol.adapt(*places, out=first, training={"seed": seed, **schedule})
        assert run.metrics is not None
        target = open_target(first)
        right_N = right_of(target, truth)
        outcome = options.out / "outcomes" / f"{base.replace('/', '--')}.npz"
        outcome.parent.mkdir(parents=True, exist_ok=True)
        np.savez(outcome, certainty_N=target.certainty_N, right_N=right_N)
        yield {
            "key": base,
            "before": run.metrics["source_only"]["accuracy"],
            "accuracy": float(right_N.mean()),
            "seconds": time.monotonic() - started,
        }
        for count in options.labels:
            for policy in (*POLICIES, *PLAIN):
                key, started = f"{base}/{policy}/{count}", time.monotonic()
                if key in done or count >= len(target.paths):
                    continue
                rows = rows_for(target, policy if policy in POLICIES else "random", count)
                if policy in POLICIES:
                    found_N = continued(first, target, truth, rows)
                else:
                    found_N = plain(task, target, rows, policy == PLAIN[1])
                seconds = time.monotonic() - started
                yield {"key": key, **figures(found_N, rows), "seconds": seconds}


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def accuracies(lines: dict[str, dict[str, Any]]) -> str:
    """Return the accuracy per number of labels and way to use them, over tasks and seeds."""
    runs = {key: line for key, line in lines.items() if "before" in line}
    budgets = sorted({line["labels"] for key, line in lines.items() if key not in runs})
    asked = sorted({int(key.rpartition("/")[2]) for key in lines if key not in runs})
    rows = []
    for task in sorted({key.rpartition("/")[0] for key in runs}):
        seeds = [key for key in runs if key.rpartition("/")[0] == task]
        mean = {
            name: np.mean([runs[key][name] for key in seeds]) for name in ("before", "accuracy")
        }
        for policy in (*POLICIES, *PLAIN):
            cells = []
            for count in asked:
                found = [
                    lines[key]["accuracy"]
                    for seed in seeds
                    if (key := f"{seed}/{policy}/{count}") in lines
                ]
                spread = f" ± {100 * np.std(found):.1f}" if len(found) > 1 else ""
                cells.append(f"{100 * np.mean(found):.1f}{spread}" if found else "")
            start = [f"{100 * mean['before']:.1f}", f"{100 * mean['accuracy']:.1f}"]
            rows.append([f"{task} ({len(seeds)})", policy, *start, *cells])
    assert budgets or not rows
    counts = [f"{count} labels" for count in asked]
    return table(["task (draws)", "labels of", "before", "adapted", *counts], rows)


def draws(certainty_N: NDArray[np.float32], right_N: Flags) -> Iterator[dict[str, Any]]:
    """Yield, per number of labels, what 1,000 reviews of one run's target say."""
    from certvol.predict.max_error import Judged, in_units
    from certvol.predict.random_sample import STRATA, random_order, strata
    from certvol.scores.intervals import stratified

    stratum_N, truth = strata(certainty_N), float(right_N.mean())
    sizes_H = np.bincount(stratum_N, minlength=STRATA)
    orders = [random_order(stratum_N, seed) for seed in range(DRAWS)]
    for count in (n for n in BUDGETS if n < len(right_N)):
        held, widths = 0, []
        proved, exceeded = dict.fromkeys(RISKS, 0), dict.fromkeys(RISKS, 0)
        for order in orders:
            rows = order[:count]
            drawn = stratum_N[rows]
            hits_H = np.bincount(drawn[right_N[rows]], minlength=STRATA)
            found = stratified(hits_H, np.bincount(drawn, minlength=STRATA), sizes_H)
            held += found.low <= truth <= found.high
            widths.append(found.width)
            judged = Judged(rows, ~right_N[rows], np.zeros(count, np.bool_))
            for risk in RISKS:
                rule = in_units("sigma", certainty_N, judged, risk, len(right_N))
                if rule.threshold is not None:
                    proved[risk] += 1
                    exceeded[risk] += (~right_N[certainty_N >= rule.threshold]).mean() > risk
        yield {
            "labels": count,
            "held": held / DRAWS,
            "width": float(np.mean(widths)),
            "proved": {risk: n / DRAWS for risk, n in proved.items()},
            "exceeded": {risk: n / DRAWS for risk, n in exceeded.items()},
        }


def outcomes(own: Path, evidence: Path | None) -> Iterator[tuple[NDArray[np.float32], Flags]]:
    """Yield certainty and rightness of every image, for each run here and in `evidence`."""
    for place in sorted(own.glob("*.npz")):
        with np.load(place) as file:
            yield file["certainty_N"], file["right_N"]
    for place in sorted(evidence.glob("*--default--*.npz")) if evidence else ():
        with np.load(place) as file:
            if len(file["true_N"]) >= FEWEST_IMAGES:
                yield file["measure_sigma"], file["predicted_N"] == file["true_N"]


def coverage(runs: Iterable[tuple[NDArray[np.float32], Flags]]) -> str:
    """Return the coverage of the interval and the excess of the threshold, over all runs."""
    from certvol.scores import intervals

    found: dict[int, list[dict[str, Any]]] = {}
    with mock.patch.object(intervals, "upper_bound", cache(intervals.upper_bound)):
        for certainty_N, right_N in runs:
            for line in draws(certainty_N, right_N):
                found.setdefault(line["labels"], []).append(line)
    rows = []
    for count, lines in sorted(found.items()):
        held = [line["held"] for line in lines]
        cells = [f"{100 * np.mean(held):.1f} ({100 * min(held):.1f})"]
        cells.append(f"± {50 * np.mean([line['width'] for line in lines]):.1f}")
        for risk in RISKS:
            excess = [line["exceeded"][risk] for line in lines]
            given = np.mean([line["proved"][risk] for line in lines])
            cells.append(
                f"{100 * np.mean(excess):.1f} ({100 * max(excess):.1f}) of {100 * given:.0f}"
            )
        rows.append([str(count), str(len(lines)), *cells])
    risks = [f"risk {100 * risk:.0f} %: exceeded (worst run) of proved" for risk in RISKS]
    return table(["labels", "runs", "interval holds (worst run)", "half width", *risks], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--features", type=Path, help="folder of BACKBONE_DOMAIN.npz")
    parser.add_argument("--short", action="store_true", help="train briefly, as verdicts.py does")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="*", help="tasks, such as 'office-31-*/?-A'")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--labels", default=",".join(map(str, BUDGETS)))
    parser.add_argument("--minutes", type=float, default=1e9, help="start nothing after this")
    evidence = "evidence of verdicts.py: draw reviews of its default runs too"
    parser.add_argument("--evidence", type=Path, metavar="FOLDER", help=evidence)
    parser.add_argument("--tables", action="store_true", help="print the tables, without training")
    options = parser.parse_args()
    options.labels = [int(word) for word in options.labels.split(",")]
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "results.jsonl"
    if options.tables:
        runs = outcomes(options.out / "outcomes", options.evidence)
        print(accuracies(read_lines(results)), coverage(runs), sep="\n\n")
        return 0
    tasks = feature_tasks(options.features) if options.features else []
    tasks += pixel_tasks(digit_tasks(options.out / "work"), options.out / "work")
    tasks = [task for task in tasks if fnmatch(f"{task.data}/{task.name}", options.only)]
    if not tasks:
        sys.exit(f"no task has both of its files in {options.features}, and fits {options.only}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    end = time.monotonic() + 60 * options.minutes
    for seed in map(int, options.seeds.split(",")):
        for task in tasks:
            for line in measured(task, seed, options):
                append_line(results, line)
                print(line, flush=True)
                if time.monotonic() > end:
                    return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
