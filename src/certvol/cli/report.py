"""`certvol report`: write one page about a run, or about several side by side."""

import argparse
from pathlib import Path

from certvol.errors import UserError
from certvol.progress import Reporter

HELP = "write a page about a run, or one that compares several; works offline"


DOMAINS = ("source", "target")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN")
    out = "the page to write; RUN/report.html by default, required for several runs"
    parser.add_argument("--out", metavar="FILE", help=out)
    figures = "write each figure as PNG and SVG too, in figures/ beside the page"
    parser.add_argument("--figures", action="store_true", help=figures)
    target = "where the target images are now, if they were moved"
    parser.add_argument("--target", metavar="FOLDER", help=target)


def run(options: argparse.Namespace, reporter: Reporter) -> int:
    from certvol.cli._console import printable
    from certvol.data.sources import split_places
    from certvol.report import page
    from certvol.report import paper_figures as papers
    from certvol.report.records import read_record
    from certvol.runs.outputs import check_output, check_outside

    several = len(options.runs) > 1
    if several and options.out is None:
        raise UserError(
            "several runs need a file to write; add --out FILE, such as --out compared.html"
        )
    if several and options.target is not None:
        raise UserError("--target works for the report of one run only; leave it out")
    if options.out is not None:
        check_output(options.out)
    records = [read_record(run) for run in options.runs]
    if options.figures:
        page_folder = records[0].path if options.out is None else Path(options.out).parent
        images = [each.settings.get(f"data.{name}") for each in records for name in DOMAINS]
        more = [each.settings.get("data.more_sources") for each in records]
        images += [place for each in more if isinstance(each, str) for place in split_places(each)]
        places = [options.target, *(each for each in images if isinstance(each, str))]
        check_outside(page_folder / "figures", places)
    if several:
        place = page.write_comparison(records, options.out)
    else:
        place = page.write_report(records[0], reporter, options.target, options.out)
    print(f"report: {printable(place)}")
    if options.figures:
        folder = place.parent / "figures"
        written = (
            papers.write_comparison_figures(records, folder)
            if several
            else papers.write_run_figures(records[0], folder)
        )
        print(f"{len(written)} figures for papers: {printable(folder)}")
    return 0
