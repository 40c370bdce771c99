"""`certvol demo`: adapt synthetic digits to real ones."""

import argparse
import sys
from pathlib import Path

from certvol.cli._options import SETTINGS_HELP, words_of
from certvol.cli._process import Signals
from certvol.progress import Reporter, percent

HELP = "adapt synthetic digits to real ones, to see what certvol does"


def add_options(parser: argparse.ArgumentParser) -> None:
    out = "folder for the runs and summary.json"
    parser.add_argument("--out", required=True, metavar="RUNS", help=out)
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: %(default)s")
    names = "see `certvol list methods` (default: %(default)s)"
    parser.add_argument("--methods", default="source_only,basic,cvp", metavar="NAMES", help=names)
    parser.set_defaults(takes_settings=True)
    parser.epilog = SETTINGS_HELP


def run(options: argparse.Namespace, reporter: Reporter) -> int:
    from certvol import demo
    from certvol.cli._console import print_table, printable
    from certvol.report.page import report_on_finished, write_comparison

    methods, out = words_of(options.methods, "--methods"), Path(options.out)
    accuracies = demo.run(out, options.seed, methods, reporter, Signals(), options.settings)
    rows = [[name, percent(value)] for name, value in accuracies.items()]
    print_table("synthetic digits to real ones: target accuracy, %", ["method", "accuracy"], rows)
    reports = [report_on_finished(out / method, reporter) for method in accuracies]
    reports.append(write_comparison([out / method for method in accuracies], out / "report.html"))
    for report in reports:
        if report is not None:
            print(f"report: {printable(report)}")
    called = Path(sys.argv[0])
    program = sys.argv[0] if called.name == "certvol" else f"{sys.executable} -m certvol"
    print(f"predictions for every image: {printable(out)}/<method>/predictions.csv")
    print(
        f"Now your own images: {printable(program)} adapt --source LABELLED --target UNLABELLED "
        "--out RUN"
    )
    return 0
