"""`certvol check`: say what the folders hold and what is wrong with them."""

import argparse
import dataclasses

from certvol.cli._options import help_of
from certvol.progress import Reporter

HELP = "say what the folders hold and what is wrong with them"
LISTED_FILES = 20


def add_options(parser: argparse.ArgumentParser) -> None:
    source, target = (
        f"{help_of('data.source')}. Repeat it for several sources",
        help_of("data.target"),
    )
    parser.add_argument("--source", required=True, metavar="FOLDER", action="append", help=source)
    parser.add_argument("--target", required=True, metavar="FOLDER", help=target)
    parser.add_argument("--json", metavar="FILE", help="write all findings, with every file's name")


def run(options: argparse.Namespace, reporter: Reporter) -> int:
    from certvol.cli._console import print_table
    from certvol.data.check import check
    from certvol.data.feature_files import is_feature_file
    from certvol.data.sources import expand_domains
    from certvol.runs.outputs import check_output, write_output
    from certvol.runs.tables import json_text
    from certvol.settings import DataConfig

    if options.json is not None:
        check_output(options.json, "--json", [*options.source, options.target])
    sources, said = expand_domains(options.source, options.target)
    for sentence in said:
        print(sentence)
    of_features = any(map(is_feature_file, [*sources, options.target]))
    what = "rows" if of_features else "images"
    report = check(sources, options.target, DataConfig(), reporter)
    counts = report.source_counts
    rows = [[name, str(count)] for name, count in counts.items()]
    rows.append([f"all {len(counts)} classes", str(sum(counts.values()))])
    print_table("source", ["class", what], rows)
    print_table("target", ["", what], [["all", str(report.target_count)]])
    if report.findings:
        findings = [[finding.level, finding.text] for finding in report.findings]
        print_table("findings", ["", "finding"], findings, text_columns=2)
    files = [
        [domain, path, reason]
        for domain, unreadable, empty in (
            ("source", report.source_unreadable, report.source_empty),
            ("target", report.target_unreadable, report.target_empty),
        )
        for path, reason in [*unreadable, *((path, "empty") for path in empty)]
    ]
    if files:
        print_table("files that are left out", ["", "file", "reason"], files[:LISTED_FILES], 3)
    if len(files) > LISTED_FILES:
        print(f"and {len(files) - LISTED_FILES} more: --json FILE lists all")
    if options.json is not None:
        write_output(options.json, json_text(dataclasses.asdict(report), indent=2))
    if not report.can_adapt:
        print("adaptation cannot start: fix the errors above")
        return 2
    print("adaptation can start")
    return 0
