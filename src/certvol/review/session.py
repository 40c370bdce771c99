"""The state of a review: the queue, the answers so far and the figures they give."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from certvol.data.decoding import UnreadableImage, decode, read_file
from certvol.data.folders import printable
from certvol.predict.random_sample import STRATA
from certvol.review.estimates import Estimates, estimate
from certvol.review.guesses import Guesses
from certvol.review.labels_file import LabelsFile
from certvol.review.sampling import Item
from certvol.review.target import ReviewTarget
from certvol.runs.review_labels import ANSWERS, Review
from certvol.settings import DataConfig

LARGEST_SIDE = 1200  # of an image that is sent to the page
QUALITY = 88


class BadAnswer(ValueError):
    """Raised for an answer that does not fit the queue or the classes."""


@dataclass(frozen=True, eq=False)
class Session:
    """The state of one review; `files` has the file of each row of the target."""

    target: ReviewTarget
    items: Sequence[Item]
    files: Sequence[str | None]
    guesses: Guesses
    labels: LabelsFile
    max_error: float

    def estimates(self) -> Estimates:
        before_N = self.guesses.before_N(self.target)
        return estimate(self.target, self.labels.reviews, self.max_error, before_N)

    def page_data(self) -> dict[str, Any]:
        """Return what the page shows: classes, images in order, answers, figures."""
        likeliest = self.guesses.likeliest(self.target)
        first = [[int(label)] for label in self.target.predicted_N]
        return {
            "run": self.target.record.name,
            "path": printable(self.target.run.path),
            "classes": [printable(name) for name in self.target.classes],
            "images": len(self.target.paths),
            "items": [
                {
                    "kind": item.kind,
                    "name": printable(Path(self.target.paths[item.row]).name),
                    "likeliest": likeliest.get(item.row, first[item.row]),
                    "answer": self._answer(item),
                }
                for item in self.items
            ],
            "estimates": self.estimates().data(),
        }

    def _answer(self, item: Item) -> dict[str, Any] | None:
        review = self.labels.answer_of(self.target.paths[item.row])
        if review is None:
            return None
        label = None if review.label is None else self.target.classes.index(review.label)
        return {"answer": review.answer, "label": label}

    def item(self, number: Any) -> Item:
        if type(number) is not int or not 0 <= number < len(self.items):
            raise BadAnswer("there is no such image")
        return self.items[number]

    def give(self, number: Any, answer: Any, label: Any) -> None:
        """Store an answer about an image of the queue; `label` is the number of a class."""
        item = self.item(number)
        if not isinstance(answer, str) or answer not in ANSWERS:
            raise BadAnswer("there is no such answer")
        name = None
        if answer == "class":
            if type(label) is not int or not 0 <= label < len(self.target.classes):
                raise BadAnswer("there is no such class")
            name = self.target.classes[label]
        self.labels.add(Review(self.target.paths[item.row], name, item.kind, ANSWERS[answer]))
        self._count_drawn()

    def _count_drawn(self) -> None:
        """Count answers about chosen images as random once their turn in the random order is over.

        The turn of an image is over when everything before it is answered, and all of its round.
        An answer that counted earlier than those of its neighbours would bias the sample, because
        chosen images are mostly difficult.
        """
        drawn = [self.target.paths[item.row] for item in self.items if item.kind == "random"]
        answers = list(takewhile(bool, map(self.labels.answer_of, drawn)))
        if len(answers) < len(drawn):
            answers = answers[: len(answers) // STRATA * STRATA]
        early = [each for each in answers if each is not None and each.kind == "chosen"]
        if early:
            # The last answer is undone first, so it stays the last.
            last = self.labels.reviews[-1]
            changed = [replace(each, kind="random") for each in early]
            self.labels.add(*changed, *([last] if last not in early else []))

    def undo(self) -> int | None:
        """Take back the last answer to an image of the queue; return the image's number."""
        numbers = {self.target.paths[item.row]: i for i, item in enumerate(self.items)}
        last = next((each for each in reversed(self.labels.reviews) if each.path in numbers), None)
        if last is None:
            return None
        self.labels.undo(last.path)
        return numbers[last.path]

    def picture(self, number: int) -> bytes | None:
        """Return an image of the queue as WebP, small enough for a page; None if unreadable."""
        file = self.files[self.item(number).row]
        default = DataConfig.max_megapixels
        most = self.target.record.settings.get("data.max_megapixels", default)
        return None if file is None else _encoded(file, float(most))


@lru_cache(maxsize=32)
def _encoded(file: str, max_megapixels: float) -> bytes | None:
    try:
        pixels_HWC = decode(read_file(Path(file), max_megapixels)[0], None, max_megapixels)
    except UnreadableImage:
        return None
    image = Image.fromarray(np.ascontiguousarray(pixels_HWC))
    small = max(image.size) <= 64
    image.thumbnail((LARGEST_SIDE, LARGEST_SIDE), Image.Resampling.BICUBIC, reducing_gap=2.0)
    data = io.BytesIO()
    image.save(data, "WEBP", lossless=small, quality=QUALITY, method=2)
    return data.getvalue()
