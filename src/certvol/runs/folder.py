"""The folder of a run: its files, and the lock that lets only one process write them."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from certvol.data.folders import printable
from certvol.errors import UserError
from certvol.files import held_alone, is_leftover, remove_leftovers, write_atomically
from certvol.runs.checkpoint import Checkpoints, append, append_line, load_tensors, write_tensors
from certvol.runs.tables import json_text
from certvol.runs.tensorboard import TensorBoard


def to_half(probabilities_NC: NDArray[np.float32]) -> NDArray[np.float16]:
    """Convert to half precision without changing the most probable class."""
    half, labels_N = probabilities_NC.astype(np.float16), probabilities_NC.argmax(axis=1)
    changed = np.flatnonzero(half.argmax(axis=1) != labels_N)
    half[changed, labels_N[changed]] = np.nextafter(half[changed].max(axis=1), np.float16(np.inf))
    return half


class Journal:
    """The history and the scores of training, or of one trial of it.

    Resuming cuts the lines after the last checkpoint, and training writes them again.
    """

    def __init__(self, run: "RunFolder", trial: str | None = None) -> None:
        self.run = run
        self.cycles_folder = run.cycles if trial is None else run.cycles / f"trial-{trial}"
        self.history = (run.path if trial is None else self.cycles_folder) / "history.jsonl"
        self.scores = self.cycles_folder / "scores.jsonl"
        self.follower: TensorBoard | None = None

    def best_weights(self, validator: str) -> Path:
        return self.cycles_folder / f"best-{validator}.safetensors"

    def kept_weights(self) -> list[Path]:
        return sorted(self.cycles_folder.glob("best-*.safetensors"))

    def log(self, line: Mapping[str, Any]) -> None:
        self.run.append_line(self.history, line)
        if self.follower is not None:
            self.follower.follow()

    def log_scores(
        self, cycle: int, scores: Mapping[str, Any], probabilities_NC: NDArray[np.float32]
    ) -> None:
        """Log the scores of a cycle; cycle 0 is the model that adaptation starts from."""
        if not self.run.writes:
            return
        self.run.append_line(self.scores, {"cycle": cycle, **scores})
        tensors = {"probabilities": torch.from_numpy(to_half(probabilities_NC))}
        # Not synced: a resumed run writes everything after its checkpoint again.
        write_tensors(self._cycle(cycle), tensors, synced=False)

    def read_cycles(self) -> Iterator[tuple[int, dict[str, Any], NDArray[np.float32]]]:
        """Yield number, scores and probabilities of the watched images for each cycle from 0.

        Raises OSError, ValueError, KeyError or SafetensorError if the files are damaged.
        """
        lines = self.scores.read_text(encoding="utf-8").splitlines() if self.scores.exists() else []
        for scores in map(json.loads, lines):
            cycle = int(scores["cycle"])
            yield cycle, scores, load_tensors(self._cycle(cycle))["probabilities"].float().numpy()

    def _cycle(self, cycle: int) -> Path:
        return self.cycles_folder / f"{cycle:04d}.safetensors"

    def lengths(self) -> dict[str, int]:
        return {p.name: p.stat().st_size if p.exists() else 0 for p in (self.history, self.scores)}

    def cut(self, lengths: Mapping[str, int]) -> None:
        """Cut the files to these lengths."""
        for path in (self.history, self.scores):
            if self.run.writes and path.exists():
                os.truncate(path, min(lengths.get(path.name, 0), path.stat().st_size))
        if self.follower is not None:
            self.follower.restart()

    def adopt(self, other: "Journal") -> None:
        """Take over the lines and files of a trial's journal."""
        if not self.run.writes:
            return
        for own, others in ((self.history, other.history), (self.scores, other.scores)):
            if others.exists():
                append(own, others.read_bytes())
        for kept in other.cycles_folder.glob("*.safetensors"):
            write_atomically(self.cycles_folder / kept.name, kept.read_bytes())


class RunFolder:
    """The folder of a run. Weights, checkpoints and tables are written atomically."""

    def __init__(self, path: str | Path, writes: bool = True) -> None:
        """Set `writes` to False in a process that leaves writing to the main one."""
        self.path, self.writes = Path(path), writes
        self.config = self.path / "config.yaml"
        self.environment = self.path / "environment.json"
        self.timing = self.path / "timing.jsonl"
        self.warnings = self.path / "warnings.jsonl"
        self.lock_file = self.path / "lock"
        self.cycles = self.path / "cycles"
        self.pretrained = self.path / "pretrained.safetensors"
        self.model = self.path / "model.safetensors"
        self.predictions = self.path / "predictions.csv"
        self.metrics = self.path / "metrics.json"
        self.verdict = self.path / "verdict.json"
        self.measures = self.path / "measures.csv"
        self.evaluation = self.path / "evaluation.json"
        self.review = self.path / "review.csv"
        self.labels = self.path / "labels.csv"
        self.trained = self.path / "trained.csv"
        self.drawn = self.path / "drawn.csv"
        self.guesses = self.path / "review.safetensors"
        self.features = self.path / "features.safetensors"
        self.checkpoints = Checkpoints(self.path / "checkpoint", writes)
        self.projection = self.checkpoints.folder / "projection.safetensors"
        self.journal = Journal(self)

    def trial_journal(self, name: str) -> Journal:
        return Journal(self, name)

    @property
    def holds_a_run(self) -> bool:
        return self.config.exists()

    @property
    def finished(self) -> bool:
        return self.model.exists()

    def check_run(self) -> None:
        """Refuse a folder that holds no run, or one with links and pipes of a stranger."""
        if not self.holds_a_run:
            raise UserError(
                f"{printable(self.path)} holds no run (config.yaml is missing); give a folder that "
                "`certvol adapt` made"
            )
        self.check_links()

    def check_complete(self, *needed: Path) -> None:
        """Refuse a run without its delivered weights, or without the files `needed` instead."""
        if not all(file.exists() for file in needed or [self.model]):
            shown = printable(self.path)
            raise UserError(
                f"the run {shown} is not complete; resume it with `certvol adapt --resume {shown}`"
            )

    def owns(self, path: Path) -> bool:
        """Return whether the run needs this file. It does not need its report."""
        if not (self.config.exists() and self.environment.exists()):
            return False
        own = {place for place in vars(self).values() if isinstance(place, Path)} - {self.path}
        own |= {self.journal.history, self.checkpoints.folder}
        return not own.isdisjoint({path, *path.parents})

    def check_free(self) -> None:
        """Refuse a folder that holds a run or other files.

        A run that was killed before its settings were written does not count.
        """
        try:
            names = sorted(entry.name for entry in self.path.iterdir())
        except FileNotFoundError:
            return
        except OSError as error:
            raise UserError(f"cannot use {self.path} for the run: {error.strerror}") from None
        if self.holds_a_run:
            advice = f"resume it with `certvol adapt --resume {self.path}`"
            state = "it is complete" if self.finished else advice
            raise UserError(f"{self.path} holds another run ({state}); give a new folder as --out")
        names = [name for name in names if name != "lock" and not is_leftover(name)]
        if names:
            raise UserError(
                f"{self.path} is not empty (it holds {names[0]}); give a new folder as --out"
            )

    def drop_state(self, weights_of_cycles: bool) -> None:
        """Delete a finished run's checkpoints and, optionally, its per-cycle weights."""
        if not self.finished:
            raise AssertionError(f"{self.path} is not finished and needs its checkpoints")
        self.checkpoints.remove()
        for file in self.journal.kept_weights() if weights_of_cycles else ():
            with suppress(OSError):  # a file that cannot be removed only takes up space
                file.unlink()

    def check_present(self) -> None:
        """Refuse to write into a run whose disk is gone: its path would be made on another disk."""
        if not self.holds_a_run:
            raise UserError(
                f"the run folder {self.path} is gone; bring it back, then resume with "
                f"`certvol adapt --resume {self.path}`"
            )

    def create(self) -> None:
        self.check_free()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot use {self.path} for the run: {error.strerror}") from None

    def note_resumption(self, environment: dict[str, Any], changed: dict[str, Any]) -> None:
        """Add the environment of a resumed run to environment.json, and replace what `changed`."""
        try:
            before = dict(json.loads(self.environment.read_text(encoding="utf-8")))
            resumed = [*before.get("resumed", []), environment]
        except (OSError, ValueError, TypeError):
            before, resumed = {}, [environment]
        self.write_json(self.environment, {**before, **changed, "resumed": resumed})

    def check_links(self) -> None:
        """Refuse links and pipes, which a run from a stranger may contain.

        Writing must not land outside the run, and reading from a named pipe would never end.
        """
        home = self.path.resolve()
        for folder, folders, files in os.walk(home):
            for name in (*folders, *files):
                entry = Path(folder) / name
                if entry.is_symlink() and not entry.resolve().is_relative_to(home):
                    raise UserError(
                        f"{entry} is a link that leads out of the run; put the file there instead"
                    )
                if entry.exists() and not (entry.is_file() or entry.is_dir()):
                    raise UserError(
                        f"{entry} is a named pipe, a socket or a device; remove it from the run"
                    )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes from writing this run, and remove temporary files of killed ones."""
        refusal = f"another process is writing the run {self.path}; wait for it, or stop it first"
        with held_alone(self.lock_file, refusal):
            remove_leftovers(self.path)
            yield

    def write_json(self, path: Path, content: Any) -> None:
        if self.writes:
            write_atomically(path, json_text(content, indent=2).encode())

    def append_line(self, path: Path, line: Mapping[str, Any]) -> None:
        if self.writes:
            self.check_present()
            append_line(path, line)

    def note_time(self, line: Mapping[str, Any]) -> None:
        self.append_line(self.timing, line)
