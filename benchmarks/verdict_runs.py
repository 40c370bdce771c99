"""Compare the verdicts of finished runs, such as those of `certvol benchmark`, with the truth.

    python benchmarks/verdict_runs.py DIR/runs

It reads what every run below a folder left: `verdict.json`, `metrics.json` and `evaluation.json`.
The verdicts are those that the runs gave, by the code of their time.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from verdict_tables import BETWEEN, GOOD, POOR, fate, markdown


@dataclass(frozen=True)
class Finished:
    """A run with labels: what it said, and what is true."""

    verdict: dict[str, Any]
    before: float
    after: float
    evaluation: dict[str, Any]


def finished(root: Path) -> Iterator[Finished]:
    for file in sorted(root.rglob("verdict.json")):
        run = file.parent
        places = (file, run / "metrics.json", run / "evaluation.json")
        if (run / "model.safetensors").exists() and all(place.exists() for place in places):
            verdict, metrics, evaluation = (json.loads(place.read_text()) for place in places)
            before, after = (metrics[name]["accuracy"] for name in ("source_only", "adapted"))
            yield Finished(verdict, before, after, evaluation)


def verdict_table(runs: list[Finished]) -> str:
    from certvol.predict.verdict import WORDS

    rows = []
    for word in WORDS:
        own = [run for run in runs if run.verdict["verdict"] == word]
        fates = [fate(run.after, run.before, run.after) for run in own]
        counts = [str(fates.count(each)) for each in (GOOD, BETWEEN, POOR)]
        mean = f"{100 * np.mean([run.after for run in own]):.1f}" if own else "–"
        rows.append([word, *counts, mean])
    return markdown(["verdict", GOOD, BETWEEN, POOR, "mean accuracy, %"], rows)


def estimator_table(runs: list[Finished]) -> str:
    names = list(runs[0].verdict["accuracy"]["estimators"])
    rows = []
    for name in ("as shown", *names):
        pairs = [(_estimate(run, name), run.after) for run in runs]
        errors = [value - true for value, true in pairs if value is not None]
        row = [f"{100 * np.mean(np.abs(errors)):.1f}", f"{100 * np.mean(errors):+.1f}"]
        rows.append([name, *row, str(len(errors))])
    return markdown(["estimator", "mean absolute error", "mean error", "runs"], rows)


def _estimate(run: Finished, name: str) -> float | None:
    accuracy = run.verdict["accuracy"]
    found = accuracy["estimate"] if name == "as shown" else accuracy["estimators"].get(name)
    return None if found is None else float(found)


def measure_table(runs: list[Finished]) -> str:
    with_sigma = [run.evaluation["auroc"] for run in runs if "sigma" in run.evaluation["auroc"]]
    names = list(with_sigma[0]) if with_sigma else []
    rows = []
    for name in names:
        pairs = [(each[name], each["sigma"]) for each in with_sigma]
        pairs = [pair for pair in pairs if None not in pair]
        better = 100 * np.mean([own > sigma for own, sigma in pairs])
        mean = np.mean([own for own, _ in pairs])
        rows.append([name, f"{mean:.3f}", f"{better:.0f}", str(len(pairs))])
    return markdown(["measure", "AUROC for errors", "beats sigma, %", "runs"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("runs", type=Path, nargs="+", help="folders with runs somewhere below")
    runs = [run for root in parser.parse_args().runs for run in finished(root)]
    if not runs:
        print("no finished runs with labels")
        return 1
    print(f"{len(runs)} runs, mean calibration error as delivered", end=" ")
    print(f"{np.mean([run.evaluation['ece'] for run in runs]):.3f}")
    for part in (verdict_table, estimator_table, measure_table):
        print(f"\n{part(runs)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
