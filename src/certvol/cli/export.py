"""`certvol export`: write a run's model as one file that needs no certvol."""

import argparse

from certvol.predict.export_formats import FORMATS
from certvol.progress import Reporter

HELP = "write the model as one file that needs no certvol: images to logits and sigma"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN")
    formats = ", or ".join(f"{name} ({each.help})" for name, each in FORMATS.items())
    parser.add_argument("--format", required=True, metavar="FORMAT", help=formats)
    parser.add_argument("--out", required=True, metavar="FILE", help="the file to write")


def run(options: argparse.Namespace, reporter: Reporter) -> int:
    from certvol.cli._console import printable
    from certvol.predict.export import export

    found = export(options.run, options.out, options.format)
    size = found["input_size"]
    print(f"{options.format} model: {printable(options.out)}")
    if found["input"] == "features":
        print(f"input `features`: float32, N x {size}, from the backbone of the run's files")
    else:
        print(
            f"input `images`: uint8, N x {size} x {size} x 3, RGB, squashed to that size; the "
            "model crops and normalises"
        )
    print(f"output: {' and '.join(found['outputs'])}, {len(found['labels'])} classes")
    print(f"largest difference from the run's own model: {found['difference']:.1g}")
    return 0
