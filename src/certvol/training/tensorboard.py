"""The scalars of history.jsonl for TensorBoard, in RUN/tensorboard."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from certvol.errors import UserError


def check_installed() -> None:
    """Before anything is written."""
    if find_spec("tensorboard") is None:
        raise UserError(
            "`training.tensorboard` needs the package tensorboard: install certvol with its extra, "
            "`pip install 'certvol[tensorboard]'`, or leave the setting out"
        )


class TensorBoard:
    """Follows the file of a run's history, and so shows what it says: also after a resume, which cuts it back.

    A scalar is named `<phase>/<key>`, at the step of its phase."""

    def __init__(self, history: Path, folder: Path) -> None:
        check_installed()
        self.history, self.folder = history, folder
        self.read = 0
        self.writer: Any = None

    def follow(self) -> None:
        """Writes the lines that are new."""
        if self.writer is None:
            self._start()
        with self.history.open("rb") as file:
            file.seek(self.read)
            lines = file.read()
        for line in lines.splitlines():
            self._show(json.loads(line))
        self.read += len(lines)
        self.writer.flush()

    def _start(self) -> None:
        """Events of an earlier part of the run are written anew: what was cut off must not stay on the curves."""
        from torch.utils.tensorboard import SummaryWriter

        for stale in self.folder.glob("events.out.tfevents.*"):
            stale.unlink(missing_ok=True)
        self.writer = SummaryWriter(str(self.folder))

    def _show(self, line: dict[str, Any]) -> None:
        for key, value in line.items():
            if key not in ("phase", "step") and isinstance(value, int | float):
                self.writer.add_scalar(f"{line['phase']}/{key}", value, line["step"])

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
