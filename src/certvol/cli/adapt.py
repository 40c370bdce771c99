"""`certvol adapt`: train a run, or resume one."""

import argparse

from certvol.cli._options import add_settings, given_settings, help_of
from certvol.cli._process import Signals, process_rank
from certvol.progress import Reporter

HELP = "pretrain on the source, adapt to the target, predict"


def add_options(parser: argparse.ArgumentParser) -> None:
    source = f"{help_of('data.source')}. Repeat it for several sources"
    parser.add_argument("--source", metavar="FOLDER", action="append", help=source)
    parser.add_argument("--target", metavar="FOLDER", help=help_of("data.target"))
    parser.add_argument("--out", metavar="RUN", help="new folder for everything the run makes")
    start = "continue from the model and the settings of a complete run, without pretraining"
    parser.add_argument("--from", metavar="RUN", dest="from_run", help=start)
    labels = f"{help_of('data.target_labels')}; short for --data.target_labels"
    parser.add_argument("--labels", metavar="FILE", dest="target_labels", help=labels)
    parser.add_argument("--resume", metavar="RUN", help="continue a run that was stopped")
    accept = (
        "with --resume: continue even if settings in RUN/config.yaml were changed; with --labels: "
        "take labels of a run with another target, by path"
    )
    parser.add_argument("--accept-changes", action="store_true", help=accept)
    shown = ("--method", "--backbone", "--weights", "--seed", "--device", "--select")
    add_settings(parser, *shown, "--target-prior", "--target-classes")


def run(options: argparse.Namespace, reporter: Reporter) -> int:
    from certvol import api
    from certvol.cli._console import ACCURACY_COLUMNS, accuracy_rows, print_table, printable
    from certvol.predict.verdict import describe
    from certvol.report.page import report_on_finished
    from certvol.report.summary import model_in_words

    finished = api.adapt(
        options.source,
        options.target,
        options.out,
        from_run=options.from_run,
        target_labels=options.target_labels,
        resume=options.resume,
        accept_changes=options.accept_changes,
        preset=options.preset,
        config=options.config,
        reporter=reporter,
        stop_signal=Signals(),
        **given_settings(options),
    )
    if process_rank() > 0:
        return 0
    report = report_on_finished(finished.path, reporter)
    if finished.metrics is not None:
        print_table("target accuracy, %", ACCURACY_COLUMNS, accuracy_rows(finished.metrics))
    if finished.verdict is not None:
        for line in describe(finished.verdict):
            print(printable(line))
    used = model_in_words(finished.delivery.model)
    print(f"the run uses the model {used} ({finished.delivery.why})")
    print(
        f"predictions for every target image: {printable(str(finished.path / 'predictions.csv'))}"
    )
    if report is not None:
        print(f"report: {printable(report)}")
    return 0
