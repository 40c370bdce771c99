"""Show the scalars of history.jsonl in TensorBoard, from RUN/tensorboard."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from certvol.errors import UserError


class TensorBoard:
    """Copies a run's history file as it grows; a scalar is named `<phase>/<key>`."""

    def __init__(self, history: Path, folder: Path) -> None:
        if find_spec("tensorboard") is None:
            raise UserError(
                "`training.tensorboard` needs the package tensorboard: run "
                "`pip install 'certvol[tensorboard]'`, or leave the setting out"
            )
        self.history, self.folder = history, folder
        self.read = 0  # bytes of the history that were copied
        self.writer: Any = None

    def follow(self) -> None:
        """Copy the new lines."""
        if self.writer is None:
            self._start()
        with self.history.open("rb") as file:
            file.seek(self.read)
            lines = file.read()
        for line in map(json.loads, lines.splitlines()):
            for key, value in line.items():
                if key not in ("phase", "step") and isinstance(value, int | float):
                    self.writer.add_scalar(f"{line['phase']}/{key}", value, line["step"])
        self.read += len(lines)
        self.writer.flush()

    def _start(self) -> None:
        """Delete earlier events, because a resumed run copies its shortened history again."""
        from torch.utils.tensorboard import SummaryWriter

        for stale in self.folder.glob("events.out.tfevents.*"):
            stale.unlink(missing_ok=True)
        self.writer = SummaryWriter(str(self.folder))

    def restart(self) -> None:
        """Copy the history from its start, after lines were cut."""
        self.close()
        self.writer, self.read = None, 0

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
