"""Write RUN/review.csv: a line per answer, synced to disk before the next image is shown."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from certvol.data.folders import printable
from certvol.errors import UserError
from certvol.files import held_alone, sync, sync_folder, write_atomically
from certvol.runs.folder import RunFolder
from certvol.runs.review_labels import COLUMNS, UNDONE, Review, read_review, review_cells
from certvol.runs.tables import csv_text, write_text


class LabelsFile:
    """The answers of a run. Open it with `opened`, which keeps others from writing."""

    def __init__(self, path: Path, classes: Sequence[str]) -> None:
        self.path, self.classes = path, classes
        self._answers: dict[str, Review] = {}
        self._content = b""
        """What the file holds, unless another program changes it."""
        if path.exists():
            _repair(path)
            self._content = path.read_bytes()
            self._answers = {
                each.path: each for each in read_review(path, classes, may_be_torn=True)
            }

    @property
    def reviews(self) -> list[Review]:
        return list(self._answers.values())

    def answer_of(self, path: str) -> Review | None:
        return self._answers.get(path)

    def add(self, *reviews: Review) -> None:
        """Append answers, and return when they are on disk."""
        self._append([review_cells(each) for each in reviews])
        for each in reviews:
            # A changed answer moves to the end, because the last answer is undone first.
            self._answers.pop(each.path, None)
            self._answers[each.path] = each

    def undo(self, path: str) -> None:
        """Take back the answer about an image."""
        self._append([(path, "", UNDONE, self._answers[path].kind)])
        del self._answers[path]

    def _append(self, rows: Sequence[Sequence[str]]) -> None:
        header = "" if self._content else csv_text(COLUMNS, ())
        text = header + "".join(csv_text(row, ()) for row in rows)
        data, before = text.encode("utf-8", "surrogateescape"), len(self._content)
        try:
            if (self.path.read_bytes() if self.path.exists() else b"") != self._content:
                raise UserError(self._explain_change())
            with self.path.open("ab", buffering=0) as file:
                _write_all(file, data, before)
            if before == 0:
                sync_folder(self.path.parent)
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"cannot write {printable(str(self.path))}: {reason}") from None
        self._content += data

    def _explain_change(self) -> str:
        """Save the answers so far in a file of their own, because the other program's file wins."""
        text = (
            f"another program changed {printable(str(self.path))} while it was open here, so this "
            "answer is not saved; end the page with Ctrl-C and start it again"
        )
        if self._content:
            name = f"review-{hashlib.blake2b(self._content, digest_size=4).hexdigest()}.csv"
            write_atomically(place := self.path.with_name(name), self._content)
            text += f". The answers before it are in {printable(str(place))}, for --import"
        return text


def _write_all(file: FileIO, data: bytes, before: int) -> None:
    """Append and sync all of the data, or cut the file back to its size before."""
    try:
        if file.write(data) != len(data):
            raise OSError("the disk is full")
        sync(file)
    except BaseException:
        with suppress(OSError):
            file.truncate(before)
        raise


@contextmanager
def opened(run: RunFolder, classes: Sequence[str]) -> Iterator[LabelsFile]:
    """Open RUN/review.csv for writing; refuse if another process does."""
    refusal = (
        f"another process is reviewing the run {printable(run.path)}; end it first, such as "
        "an open page with Ctrl-C"
    )
    with held_alone(run.path / "review.lock", refusal):
        yield LabelsFile(run.review, classes)


def _repair(path: Path) -> None:
    """Bring a file into the usual form, so that lines can be appended to it.

    A killed process may have left it with a torn last line, and a spreadsheet with other columns.
    """
    data, header = path.read_bytes(), ",".join(COLUMNS).encode()
    if data.startswith(header + b"\n") and data.endswith(b"\n") and b"\r" not in data:
        return
    reviews = [] if header.startswith(data) else read_review(path, may_be_torn=True)
    write_text(path, csv_text(COLUMNS, map(review_cells, reviews)))
