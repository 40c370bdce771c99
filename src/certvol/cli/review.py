"""`certvol review`: label target images on a page of this machine, or by files."""

import argparse

from certvol.cli._options import help_of
from certvol.errors import UserError
from certvol.progress import Reporter

HELP = "label some target images, to measure how good a run is and to improve it"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN")
    labels = "random images to label, then as many chosen to help training (default: 100)"
    parser.add_argument("--labels", type=int, metavar="N", default=100, help=labels)
    error = "share of accepted images that may be wrong, for the threshold shown (default: 0.05)"
    parser.add_argument("--max-error", type=float, metavar="SHARE", default=0.05, help=error)
    images = "where the target images are now, if they were moved"
    parser.add_argument("--images", metavar="FOLDER", help=images)
    port = "port of the page (default: the first free one from 8765)"
    parser.add_argument("--port", type=int, metavar="N", help=port)
    browser = "print the page's address without opening a browser"
    parser.add_argument("--no-browser", action="store_true", help=browser)
    out = "write the list of images to label (.json for Label Studio, or .csv) and exit"
    parser.add_argument("--export", metavar="FILE", help=out)
    answers = "read labels from Label Studio (JSON, CSV) or a table path,label, and exit"
    parser.add_argument("--import", metavar="FILE", dest="answers", help=answers)
    device = help_of("training.device")
    parser.add_argument("--device", metavar="VALUE", default="auto", help=device)


def run(options: argparse.Namespace, reporter: Reporter) -> int:
    from certvol.review import commands

    if options.labels < 1:
        raise UserError(f"--labels must be 1 or more, found {options.labels}")
    if not 0 < options.max_error < 1:
        raise UserError(f"--max-error must lie between 0 and 1, found {options.max_error}")
    if options.export is not None and options.answers is not None:
        raise UserError("--export and --import are two steps; give one of them")
    if options.export is not None:
        lines = commands.export_tasks(options.run, options.labels, options.export)
    elif options.answers is not None:
        lines = commands.import_answers(options.run, options.answers, options.max_error)
    else:
        given = commands.ReviewOptions(
            options.run, options.labels, options.max_error, options.images, options.device
        )
        lines = commands.label(given, options.port, not options.no_browser, reporter)
    for line in lines:
        print(line, flush=True)
    return 0
