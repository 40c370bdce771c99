"""Runs to review, without training: what both models think of every image is stored already."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from certvol.review import server
from certvol.review.guesses import stored_guesses
from certvol.review.labels_file import LabelsFile, opened
from certvol.review.session import Session
from certvol.review.target import find_images, open_target
from certvol.runs.checkpoint import write_tensors
from certvol.runs.review_labels import Answer, Kind, Review
from support.made_runs import MadeRun, make_run

TOKEN = "a-secret"


def made_for_review(root: Path, count: int = 60, **options: Any) -> MadeRun:
    made = make_run(root, **{"count": count, "features": False, "labelled": False, **options})
    classes, rng = len(made.classes), np.random.default_rng(1)
    probabilities_NC = rng.random((count, classes)).astype(np.float32)
    probabilities_NC[np.arange(count), made.predicted_N] = 1
    tensors = {
        "rows": torch.arange(count),
        "probabilities": torch.from_numpy(probabilities_NC),
        "before": torch.from_numpy(before(made)),
    }
    write_tensors(made.path / "review.safetensors", tensors)
    return made


def before(made: MadeRun) -> NDArray[np.int64]:
    """Return the classes that the model before adaptation predicts: every other one is right."""
    wrong_N = (made.true_N + 1) % len(made.classes)
    return np.where(np.arange(len(wrong_N)) % 2, wrong_N, made.true_N).astype(np.int64)


def review(made: MadeRun, row: int, kind: Kind = "random", answer: Answer = "class") -> Review:
    """Return a review that knows the truth."""
    label = made.classes[made.true_N[row]] if answer == "class" else None
    return Review(made.names[row], label, kind, answer)


@contextmanager
def session_of(made: MadeRun, labels: int = 20, risk: float = 0.1) -> Iterator[Session]:
    target = open_target(made.path)
    with opened(target.run, target.classes) as file:
        files = find_images(target, None)
        items = target.queue(labels)
        yield Session(target, items, files, stored_guesses(target), file, risk)


@contextmanager
def served(session: Session) -> Iterator[str]:
    """Serve the page in a thread; yield its address."""
    with server.listen(0) as listener:
        running = server.make_server(session, TOKEN)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not running.started:
            assert thread.is_alive()
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/{TOKEN}/"
        finally:
            running.should_exit = True
            thread.join()


def stored(made: MadeRun) -> list[Review]:
    return LabelsFile(made.path / "review.csv", made.classes).reviews
