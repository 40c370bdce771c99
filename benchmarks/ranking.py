"""Rank methods over the tasks of several benchmarks, with the critical difference and the cost.

    python benchmarks/ranking.py DIR DIR=@rate --out ranking.md --csv ranking.csv

Each DIR is a folder of `certvol benchmark`, or a copy of its results.csv and settings/. A task
counts once per suite and backbone. `DIR=SUFFIX` appends SUFFIX to the names of its methods, to rank
the same methods with other settings beside the first. The CSV holds what the ranking was made of:
task, method, seeds, accuracy (mean over seeds) and CPU seconds of a run.
"""

import argparse
import csv
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from certvol.benchmark import ranking
from certvol.benchmark.results import DONE, read_cpu_seconds
from certvol.benchmark.suites import SUITES
from certvol.benchmark.table_formats import markdown
from certvol.errors import UserError
from certvol.settings import read_settings_file


@dataclass
class Runs:
    """The runs of one method on one task."""

    accuracies: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)


Found = dict[tuple[str, str], Runs]
"""(method, task) -> its runs."""


def read_folder(folder: Path, suffix: str, column: str, found: Found) -> None:
    """Add the finished runs of a benchmark's folder."""
    suite, earlier = suite_of(folder), set(found)
    with (folder / "results.csv").open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            if line["status"] != DONE or not line[column]:
                continue
            settings = read_settings_file(folder / "settings" / f"{line['method']}.yaml")
            task = f"{suite} {settings['model.backbone']} {line['task']}"
            key = line["method"] + suffix, task
            if key in earlier:
                raise UserError(
                    f"{folder} and an earlier folder both hold {' on '.join(key)}; name one as "
                    "DIR=SUFFIX"
                )
            runs = found.setdefault(key, Runs())
            runs.accuracies.append(float(line[column]))
            spent = read_cpu_seconds(folder / line["run"] / "timing.jsonl")
            runs.cpu_seconds += [] if spent is None else [spent]


def suite_of(folder: Path) -> str:
    """Return the suite in benchmark.json, else the one that the folder's name starts with."""
    try:
        about = json.loads((folder / "benchmark.json").read_text(encoding="utf-8"))
        return str(about["suite"])
    except FileNotFoundError:
        names = [name for name in SUITES if folder.resolve().name.startswith(name)]
        return max(names, key=len, default=folder.resolve().name)


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folders", nargs="+", metavar="DIR[=SUFFIX]")
    parser.add_argument("--methods", help="names separated by commas; default: all")
    parser.add_argument("--column", choices=["last", "selected", "oracle"], default="last")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table as Markdown")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write what was ranked")
    options = parser.parse_args()
    found: Found = {}
    try:
        for word in options.folders:
            folder, _, suffix = word.partition("=")
            read_folder(Path(folder), suffix, options.column, found)
    except (OSError, UserError) as error:
        print(f"ranking: {error}", file=sys.stderr)
        return 2
    if options.methods is not None:
        kept = options.methods.split(",")
        found = {key: runs for key, runs in found.items() if key[0] in kept}
    accuracies = {key: runs.accuracies for key, runs in found.items()}
    ranked = ranking.rank(ranking.mean_by_task(accuracies))
    if ranked is None:
        print("ranking: needs three methods with the same two tasks or more", file=sys.stderr)
        return 2
    seconds: dict[str, list[float]] = {}
    for (method, _), runs in found.items():
        seconds.setdefault(method, []).extend(runs.cpu_seconds)
    means = {method: fmean(own) for method, own in seconds.items() if own}
    text = markdown([ranking.ranking_table(ranked, means)])
    print(text)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    if options.csv is not None:
        write_csv(options.csv, found)
    return 0


def write_csv(path: Path, found: Found) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["task", "method", "seeds", "accuracy", "cpu_seconds"])
        for (method, task), runs in found.items():
            spent = f"{fmean(runs.cpu_seconds):.1f}" if runs.cpu_seconds else ""
            accuracy = f"{fmean(runs.accuracies):.6f}"
            writer.writerow([task, method, len(runs.accuracies), accuracy, spent])


if __name__ == "__main__":
    sys.exit(main())
