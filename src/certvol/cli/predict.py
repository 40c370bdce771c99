"""`certvol predict`: label images and say how certain each label is."""

import argparse

from certvol.cli._options import help_of
from certvol.progress import Reporter, percent

HELP = "write a CSV with the label and certainty of any images"
NAMED_FILES = 5


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN")
    images = "folders, files or quoted globs; or .npz files of features"
    parser.add_argument("images", nargs="+", metavar="IMAGES", help=images)
    parser.add_argument("--out", required=True, metavar="FILE", help="the CSV file to write")
    coverage = "reject images less certain than this share of the run's target, such as 0.9"
    parser.add_argument("--coverage", type=float, metavar="SHARE", help=coverage)
    error = (
        "reject images so that at most this share of the accepted ones is wrong, such as 0.05, "
        "with 95 %% confidence; needs labels from `certvol review`"
    )
    parser.add_argument("--max-error", type=float, metavar="SHARE", help=error)
    least = "reject images below X in the measure's own units (entropy, mcd_sigma: above X)"
    parser.add_argument("--min-certainty", type=float, metavar="X", help=least)
    measure = (
        "measure of certainty: auto (the default: sigma if the backbone is frozen, else "
        "probability), sigma, probability, entropy, logit (the largest), logit_diff (the two "
        "largest), mcd_mu or mcd_sigma (MC-dropout)"
    )
    parser.add_argument("--measure", metavar="NAME", help=measure)
    use = "model to predict with: the one the run delivered, or the one before adaptation"
    parser.add_argument(
        "--use", dest="which", choices=("delivered", "pretrained"), default="delivered", help=use
    )
    rejected = "copy rejected images there, least certain first"
    parser.add_argument("--rejected-dir", metavar="DIR", help=rejected)
    device = help_of("training.device")
    parser.add_argument("--device", metavar="VALUE", default="auto", help=device)


def run(options: argparse.Namespace, reporter: Reporter) -> int:
    from certvol.cli._console import printable
    from certvol.predict.new_images import PredictOptions, predict

    names = ("run", "images", "out", "coverage", "min_certainty", "measure", "rejected_dir")
    given = {name: getattr(options, name) for name in (*names, "max_error", "device", "which")}
    found = predict(PredictOptions(**given), reporter)
    for path, reason in found.skipped[:NAMED_FILES]:
        reporter.warn(f"skipped {printable(path)}: {reason}")
    count = len(found.paths)
    summary = f"{count} {'image' if count == 1 else 'images'} predicted"
    if found.accepted is not None:
        summary += f", {int((~found.accepted).sum())} rejected ({found.rule})"
    if found.skipped:
        summary += f", {len(found.skipped)} unreadable skipped"
    print(f"{summary}: {printable(options.out)}")
    if (rule := found.max_error_rule) is not None and rule.max_error is not None:
        print(
            f"at most {percent(rule.max_error)} % of the accepted images are wrong (with 95 % "
            f"confidence, if they are like the run's target, of which it accepts "
            f"{percent(rule.coverage)} %)"
        )
        if rule.unknown:
            print(
                f"of {rule.unknown} labelled target images of no class, it rejects "
                f"{rule.unknown_rejected}"
            )
    if options.rejected_dir is not None:
        print(f"rejected images, least certain first: {printable(options.rejected_dir)}")
    return 0
