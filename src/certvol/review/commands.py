"""The three uses of `certvol review`: serve the page, export images to label, import labels."""

import secrets
import webbrowser
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from certvol.data.folders import printable
from certvol.errors import UserError
from certvol.progress import Reporter
from certvol.review.estimates import Estimates, estimate, sentences
from certvol.review.exchange import export, read_answers
from certvol.review.guesses import make_guesses, stored_guesses
from certvol.review.labels_file import LabelsFile, opened
from certvol.review.session import Session
from certvol.review.target import (
    ReviewTarget,
    are_of_the_run,
    changed_since,
    find_images,
    newer_images,
    open_target,
)
from certvol.runs.folder import RunFolder
from certvol.runs.review_labels import Review


@dataclass(frozen=True)
class ReviewOptions:
    """The options of `certvol review`, to label on the page."""

    run: str
    labels: int
    max_error: float
    images: str | None
    device: str


def label(
    options: ReviewOptions, port: int | None, opens_browser: bool, reporter: Reporter
) -> Iterator[str]:
    """Serve the page until Ctrl-C; yield the lines to print."""
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise UserError(
            f"the page needs {' and '.join(missing)}: `pip install 'certvol[review]'`; or label in "
            "another tool with --export and --import"
        )
    from certvol.review import server

    target = open_target(options.run)
    files = find_images(target, options.images)
    items = target.queue(options.labels)
    gone = sum(files[item.row] is None for item in items)
    if gone:
        reporter.warn(f"{gone} of the {len(items)} images to label are gone")
    asked = [files[item.row] for item in items]
    are_others = _warn_of_other_images(target, asked, files, options, reporter)
    with opened(target.run, target.classes) as labels:
        rows = [item.row for item in items]
        rows += [target.row_of[each.path] for each in labels.reviews if each.path in target.row_of]
        # Guesses are kept in the run, so they must be about its own images.
        known = [] if are_others else rows
        guesses = make_guesses(target, known, files, options.device, reporter)
        session = Session(target, items, files, guesses, labels, options.max_error)
        token = secrets.token_urlsafe(16)
        with server.listen(port) as listener:
            address = f"http://{server.HOST}:{listener.getsockname()[1]}/{token}/"
            yield f"label here: {address}"
            yield "answers are saved at once; press Ctrl-C to end"
            if opens_browser:
                webbrowser.open(address)
            server.serve(session, listener, token)
        yield from summary(target.run, session.estimates())


def _warn_of_other_images(
    target: ReviewTarget,
    asked: Sequence[str | None],
    files: Sequence[str | None],
    options: ReviewOptions,
    reporter: Reporter,
) -> bool:
    """Warn if the images that the page would show may not be those that the run predicted.

    Return whether some are not.
    """
    if newer := newer_images(target, asked):
        reporter.warn(
            f"{len(newer)} of the images to label are newer than the run, such as "
            f"{printable(newer[0])}; if they changed, make a new run, because its predictions are "
            "about the images before"
        )
        return True
    is_doubtful = options.images is not None or changed_since(target, asked)
    if is_doubtful and are_of_the_run(target, files, reporter) is False:
        where = options.images or str(target.record.target)
        reporter.warn(
            f"some images in {printable(where)} are not those of the run, although they have the "
            "same names. Labels would go to the wrong predictions: give the images of the run, or "
            "make a new run"
        )
        return True
    return False


def export_tasks(run: str, labels: int, out: str) -> Iterator[str]:
    target = open_target(run)
    items = target.queue(labels)
    places = [printable(place) for place in export(target, items, out)]
    yield f"{len(items)} images to label: {places[0]}"
    if len(places) > 1:
        yield f"labelling interface for Label Studio: {places[1]}"
    yield f"then: certvol review {printable(run)} --import LABELS"


def import_answers(run: str, file: str, max_error: float) -> Iterator[str]:
    target = open_target(run)
    answers = read_answers(file, target)
    reviews = answers.reviews
    with opened(target.run, target.classes) as labels:
        if not answers.has_kinds:
            reviews = [_with_earlier_kind(each, labels) for each in reviews]
        new = [each for each in reviews if labels.answer_of(each.path) != each]
        changed = sum(labels.answer_of(each.path) is not None for each in new)
        if new:
            labels.add(*new)
        before_N = stored_guesses(target).before_N(target)
        found = estimate(target, labels.reviews, max_error, before_N)
    kinds = [each.kind for each in new]
    yield (
        f"{len(new)} new labels ({kinds.count('random')} random, {kinds.count('chosen')} chosen)"
        + (f", of which {changed} replace earlier ones" if changed else "")
    )
    if answers.skipped:
        yield f"{answers.skipped} skipped tasks count as not sure"
    if "random" not in [each.kind for each in reviews]:
        yield (
            "none of these labels is of a random image, so they train the next run but do not "
            "measure this one (is the column `kind` missing?)"
        )
    yield from summary(target.run, found)


def _with_earlier_kind(review: Review, labels: LabelsFile) -> Review:
    earlier = labels.answer_of(review.path)
    return review if earlier is None else replace(review, kind=earlier.kind)


def summary(run: RunFolder, found: Estimates) -> Iterator[str]:
    words = sentences(found)
    yield f"{found.random} random and {found.chosen} chosen images labelled: {run.review}"
    if found.random:
        yield f"accuracy: {words['accuracy']}"
        if words["before"]:
            yield f"before adaptation: {words['before']}"
        yield words["threshold"]
        for name in ("more", "about"):
            if words[name]:
                yield words[name]
