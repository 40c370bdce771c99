"""`certvol extract`: write features of images, for adapting without a GPU."""

import argparse

from certvol.cli._options import add_settings, given_settings
from certvol.errors import UserError
from certvol.progress import Reporter

HELP = "write features of a folder's images, for adapting without a GPU"
USED = ("data.", "augment.", "model.", "training.device")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", metavar="FOLDER", help="images; with a sub-folder per class, labels are kept too"
    )
    parser.add_argument("--out", required=True, metavar="FILE", help="the .npz file to write")
    add_settings(parser, "--backbone", "--weights", "--image-size", "--views", "--device")


def run(options: argparse.Namespace, reporter: Reporter) -> int:
    from certvol import api
    from certvol.cli._console import printable

    settings = given_settings(options)
    for name in settings:
        if not name.startswith(USED):
            raise UserError(
                f"`certvol extract` does not use `--{name}`; it takes the settings of data, "
                "augment and model, and training.device"
            )
    given = {"preset": options.preset, "config": options.config, **settings}
    count = api.extract(options.folder, options.out, reporter=reporter, **given)
    print(f"features of {count} images: {printable(options.out)}")
    return 0
