"""`certvol benchmark`: run every task of a suite by several methods and seeds."""

import argparse
import sys
from pathlib import Path

from certvol.cli._options import add_settings, given_settings, words_of
from certvol.cli._process import Signals
from certvol.errors import UserError
from certvol.progress import Reporter

HELP = "run every task of a benchmark by several methods and seeds; write tables"
AS_GIVEN = ("suite", "variant", "preset", "vary", "baseline", "workers", "ray", "gpu_share")


def add_options(parser: argparse.ArgumentParser) -> None:
    suite = "see `certvol list suites`; digits needs no data"
    parser.add_argument("suite", metavar="SUITE", help=suite)
    parser.add_argument("--data", metavar="ROOT", help="folder that holds the suite's domains")
    out = "folder for runs and tables; give the same one to continue"
    parser.add_argument("--out", required=True, metavar="DIR", help=out)
    names = "such as basic,cvp,cvp@method.samples_weight=0 (default: %(default)s)"
    parser.add_argument("--methods", default="source_only,basic,cvp", metavar="NAMES", help=names)
    parser.add_argument("--tasks", metavar="TASKS", help="such as A-W,W-A (default: all)")
    variant = "a group of its tasks, such as partial (see `certvol list suites`)"
    parser.add_argument("--variant", "--split", metavar="NAME", help=variant)
    parser.add_argument("--seeds", default="0", metavar="NUMBERS", help="such as 0,1,2")
    vary = "SETTING=VALUES: add a row per value and a figure; repeatable"
    parser.add_argument("--vary", action="append", default=[], metavar="VALUES", help=vary)
    baseline = "method that gains are tested against (default: basic)"
    parser.add_argument("--baseline", metavar="NAME", help=baseline)
    select = (
        "validator that chooses a cycle for the column `chosen by validator` (default: %(default)s)"
    )
    parser.add_argument("--select", default="mutual_information", metavar="NAME", help=select)
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="runs at a time")
    ray = "run on a Ray cluster; `local` starts one here"
    parser.add_argument("--ray", metavar="ADDRESS", help=ray)
    share = "with --ray: GPUs per run"
    parser.add_argument("--gpu-share", type=float, default=1.0, metavar="SHARE", help=share)
    add_settings(parser, "--backbone", "--weights", "--device")


def run(options: argparse.Namespace, reporter: Reporter) -> int:
    from certvol.benchmark import runner
    from certvol.benchmark.plan import BenchmarkOptions
    from certvol.cli._benchmark_tables import show_tables
    from certvol.cli._console import printable

    given = BenchmarkOptions(
        out=Path(options.out),
        data=None if options.data is None else Path(options.data),
        methods=words_of(options.methods, "--methods"),
        tasks=None if options.tasks is None else words_of(options.tasks, "--tasks"),
        seeds=_seeds(options.seeds),
        config=None if options.config is None else Path(options.config),
        settings=given_settings(options),
        validator=options.select,
        **{name: getattr(options, name) for name in AS_GIVEN},
    )
    summary = runner.run(given, reporter, Signals())
    show_tables(summary.tables)
    for name, reason in summary.failures:
        print(f"failed: {name}: {printable(reason)}", file=sys.stderr)
    shown = printable(options.out)
    print(f"tables: {shown}/table.md, .tex, .csv; runs: {shown}/results.csv")
    return 1 if summary.failures else 0


def _seeds(text: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(word) for word in words_of(text, "--seeds")))
    except ValueError:
        raise UserError(f"--seeds should be whole numbers, such as 0,1,2; found `{text}`") from None
