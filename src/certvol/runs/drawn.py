"""Keep in RUN/drawn.csv how the random images were drawn whose answers a run was given.

They stay out of training and judge the run. A row per image, in the order of the draw: `path`, and
the `stratum` that it was drawn from in the earlier run, with the number of `images` in it. The last
two are empty for an image that does not represent the whole target: it was drawn after other images
had trained a model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from certvol.runs.folder import RunFolder
from certvol.runs.given_labels import trained_on
from certvol.runs.review_labels import Review, clean_path, read_review
from certvol.runs.tables import csv_text, damaged, read_column, write_text
from certvol.settings import Config

COLUMNS = ("path", "stratum", "images")


class Stratum(NamedTuple):
    """A part of an earlier run's target from which random images were drawn."""

    number: int
    images: int


Drawn = dict[str, Stratum | None]


def reviewed_run(config: Config) -> RunFolder | None:
    """Return the run whose images a person labelled: the one of the labels, or of the start."""
    labels, start = config.data.target_labels, config.model.start
    for place in (Path(labels).parent if labels else None, Path(start) if start else None):
        if place is not None and RunFolder(place).holds_a_run and RunFolder(place).finished:
            return RunFolder(place)
    return None


def given_random(run: RunFolder) -> list[Review]:
    """Return the answers about random images that the run was given and did not train on."""
    if not run.labels.exists():
        return []
    trained = trained_on(run)
    found = [each for each in read_review(run.labels) if each.kind == "random"]
    return [each for each in found if each.path not in trained]


def keep_drawn(run: RunFolder, drawn: Mapping[str, Stratum | None]) -> None:
    if not run.writes or run.drawn.exists() or not drawn:
        return
    rows = [
        (path, *(("", "") if stratum is None else map(str, stratum)))
        for path, stratum in drawn.items()
    ]
    write_text(run.drawn, csv_text(COLUMNS, rows))


def read_drawn(run: RunFolder, images: int) -> Drawn:
    """Return the draw of each given random image, in order; of a run without the file, one stratum.

    `images` is the size of the target.
    """
    given = given_random(run)
    if all(each.answer == "unsure" for each in given):
        return {}
    if not run.drawn.exists():
        return {each.path: Stratum(0, images) for each in given}
    columns = [read_column(run.drawn, name) for name in COLUMNS]
    try:
        found: Drawn = {
            clean_path(path): Stratum(int(number), int(size)) if number else None
            for path, number, size in zip(*columns, strict=True)
        }
    except ValueError as error:
        raise damaged(run.drawn, error) from None
    paths = {each.path for each in given}
    return {path: stratum for path, stratum in found.items() if path in paths}
