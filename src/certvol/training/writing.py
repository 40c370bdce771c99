"""Weights written to a file while training goes on."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from certvol.training.checkpoint import write_tensors


class BackgroundWriter:
    """One file at a time. Whoever builds on a file calls `wait` first, which also raises what went wrong."""

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None

    def write(self, path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """As they are now: training may change them at once."""
        self.wait()
        copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}

        def work() -> None:
            try:
                write_tensors(path, copies, about)
            except BaseException as failure:
                self.failure = failure

        self.thread = threading.Thread(target=work, name=f"writing {path.name}")
        self.thread.start()

    def wait(self) -> None:
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
