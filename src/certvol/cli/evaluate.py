"""`certvol evaluate`: measure a run on labelled images."""

import argparse
from collections.abc import Iterator
from typing import Any

from certvol.cli._options import help_of
from certvol.progress import Reporter, percent

Rows = list[list[str]]
WEAK_AREA = 0.6  # an AUROC of 0.5 is guessing
HELP = "measure accuracy and certainty of a run on a labelled folder"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN")
    labelled = "images in folders named like the classes, or a .npz of features with labels"
    parser.add_argument("--data", required=True, metavar="FOLDER", help=labelled)
    parser.add_argument("--json", metavar="FILE", help="write the same figures as JSON")
    unknown = "images of other classes: how well does certainty separate them from --data?"
    parser.add_argument("--unknown", metavar="FOLDER", help=unknown)
    oscillation = "count how often the predicted class changes on the way between two features"
    parser.add_argument("--oscillation", action="store_true", help=oscillation)
    device = help_of("training.device")
    parser.add_argument("--device", metavar="VALUE", default="auto", help=device)


def run(options: argparse.Namespace, reporter: Reporter) -> int:
    from certvol import api
    from certvol.cli._console import ACCURACY_COLUMNS, accuracy_rows, print_table
    from certvol.runs.outputs import check_output, write_output
    from certvol.runs.tables import json_text

    if options.json is not None:
        inputs = [options.data, *([options.unknown] if options.unknown else [])]
        check_output(options.json, "--json", inputs)
    further = {"unknown": options.unknown, "oscillation": options.oscillation}
    found = api.evaluate(options.run, options.data, options.device, reporter, **further)
    if options.json is not None:  # before printing, which fails if the reader of a pipe has gone
        write_output(options.json, json_text(found, indent=2))
    title = f"accuracy on {options.data}, %, {found['adapted']['images']} images"
    print_table(title, ACCURACY_COLUMNS, accuracy_rows(found))
    before, after = found["source_only"]["per_class"], found["adapted"]["per_class"]
    rows = [[name, percent(before[name]), percent(after[name])] for name in after]
    print_table("accuracy per class, %", ["class", "before", "after"], rows)
    for title, columns, rows, explanation in certainty_tables(found):
        print_table(title, columns, rows)
        print(explanation)
    for line in recommendations(found):
        print(line)
    return 0


def recommendations(found: dict[str, Any]) -> Iterator[str]:
    """Say which measure to use for images like these."""
    for kind, part in (("errors", found), ("unknown classes", found.get("unknown"))):
        if part is not None:
            name = part["recommended"]
            area = part["auroc"][name]
            if area is None:
                yield f"there were no {kind} to find, so no --measure can be recommended"
                continue
            weak = ", hardly better than guessing" if area < WEAK_AREA else ""
            yield f"to find {kind}, use --measure {name} (AUROC {_text(area)}{weak})"


def certainty_tables(found: dict[str, Any]) -> Iterator[tuple[str, list[str], Rows, str]]:
    """Yield (title, columns, rows, how to read it) for every certainty result."""
    auroc, kept = found["auroc"], found["accuracy_at_coverage"]
    titles = {name: f"{name}: {measure['title']}" for name, measure in found["measures"].items()}
    shares = list(next(iter(kept.values())))
    yield (
        "certainty: how well each measure finds errors",
        ["measure", "AUROC", "AURC", *(f"{percent(float(share), 0)} % kept" for share in shares)],
        [
            [titles[name], _text(auroc[name]), _text(found["aurc"][name])]
            + [percent(kept[name][share]) for share in shares]
            for name in auroc
        ],
        "AUROC: how well the measure separates correct from wrong predictions; 0.5 is chance, 1 is "
        "best.\nAURC: the mean error over all rejection rates; 0 is best, "
        f"{_text(1 - found['accuracy'])} is chance.\nLast columns: accuracy, %, of the most "
        f"certain images. Calibration error (ECE) of the probability: {_text(found['ece'])}.",
    )
    if found["correlations"] is not None:
        pearson, spearman = (found["correlations"][kind] for kind in ("pearson", "spearman"))
        yield (
            "correlation of sigma with other measures",
            ["measure", "Pearson", "Spearman"],
            [[titles[name], _text(pearson[name]), _text(spearman[name])] for name in pearson],
            "Signs are set so that more is more certain: at 1, a measure agrees with sigma.",
        )
    if "unknown" in found:
        separation, passing = found["unknown"]["auroc"], found["unknown"]["fpr_at_95_tpr"]
        yield (
            f"known images against {found['unknown']['images']} unknown ones",
            ["measure", "AUROC", "FPR at 95 % TPR, %"],
            [[titles[name], _text(separation[name]), percent(passing[name])] for name in auroc],
            "AUROC: 0.5 is chance, 1 is best. FPR: share of the unknown images that pass a "
            "threshold that 95 % of the known ones pass.",
        )
    if "oscillation" in found:
        changes = found["oscillation"]
        yield (
            "oscillation of the decision boundary",
            ["images", "oscillation", "least possible"],
            [[str(changes["images"]), _text(changes["total"]), _text(changes["floor"])]],
            "Changes of the predicted class on the way between two images, divided by "
            f"{changes['points']} and summed over all pairs.\nLess is smoother; compare methods on "
            "the same images.",
        )


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
