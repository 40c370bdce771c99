"""The files of a run, and who may write them."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from certvol.errors import UserError
from certvol.file_systems import held_alone
from certvol.training.checkpoint import Checkpoints, append, append_line, load_tensors, write_atomically, write_tensors
from certvol.training.tensorboard import TensorBoard


def check_present(run: Path) -> None:
    """Before folders are made in it: where the disk of a run was taken away, they would be made below its place."""
    if not (run / "config.yaml").exists():
        raise UserError(
            f"the folder of the run, {run}, has gone; when it is back, go on with `certvol adapt --resume {run}`"
        )


def halved(probabilities_NC: NDArray[np.float32]) -> NDArray[np.float16]:
    """In half precision, in which the most probable class stays the most probable."""
    half, labels_N = probabilities_NC.astype(np.float16), probabilities_NC.argmax(axis=1)
    moved = np.flatnonzero(half.argmax(axis=1) != labels_N)
    half[moved, labels_N[moved]] = np.nextafter(half[moved].max(axis=1), np.float16(np.inf))
    return half


class Journal:
    """What training writes line by line. Lines after the last checkpoint are cut off on resuming, and written again."""

    def __init__(self, run: Path, folder: Path, cycles_folder: Path, writes: bool = True) -> None:
        self.run, self.writes = run, writes
        self.history = folder / "history.jsonl"
        self.scores = cycles_folder / "scores.jsonl"
        self.cycles_folder = cycles_folder
        self.follower: TensorBoard | None = None

    def best_weights(self, selector: str) -> Path:
        return self.cycles_folder / f"best-{selector}.safetensors"

    def kept_weights(self) -> list[Path]:
        return sorted(self.cycles_folder.glob("best-*.safetensors"))

    def _append(self, path: Path, line: Mapping[str, Any]) -> None:
        if self.writes:
            check_present(self.run)
            append_line(path, line)

    def log(self, line: Mapping[str, Any]) -> None:
        self._append(self.history, line)
        if self.follower is not None:
            self.follower.follow()

    def log_scores(self, cycle: int, scores: Mapping[str, Any], probabilities_NC: NDArray[np.float32]) -> None:
        """`cycle` 0 is the model that adaptation starts from."""
        if not self.writes:
            return
        self._append(self.scores, {"cycle": cycle, **scores})
        half = torch.from_numpy(halved(probabilities_NC))
        # Not synced: a run that resumes from its last checkpoint writes what came after it again.
        write_tensors(self.cycles_folder / f"{cycle:04d}.safetensors", {"probabilities": half}, synced=False)

    def read_cycles(self) -> Iterator[tuple[int, dict[str, Any], NDArray[np.float32]]]:
        """(cycle, scores, probabilities of the watched images) of each cycle, the model before adaptation (0) first.

        OSError, ValueError, KeyError or SafetensorError where the files are not those of a run."""
        lines = self.scores.read_text(encoding="utf-8").splitlines() if self.scores.exists() else []
        for scores in map(json.loads, lines):
            cycle = int(scores["cycle"])
            half = load_tensors(self.cycles_folder / f"{cycle:04d}.safetensors")["probabilities"]
            yield cycle, scores, half.float().numpy()

    def lengths(self) -> dict[str, int]:
        return {p.name: p.stat().st_size if p.exists() else 0 for p in (self.history, self.scores)}

    def cut(self, lengths: Mapping[str, int]) -> None:
        for path in (self.history, self.scores):
            if self.writes and path.exists():
                with path.open("r+b") as file:
                    file.truncate(min(lengths.get(path.name, 0), path.stat().st_size))

    def adopt(self, other: "Journal") -> None:
        """Goes on from another journal's lines: a trial that was chosen."""
        if not self.writes:
            return
        for mine, theirs in ((self.history, other.history), (self.scores, other.scores)):
            if theirs.exists():
                mine.parent.mkdir(parents=True, exist_ok=True)
                append(mine, theirs.read_bytes())
        for kept in other.cycles_folder.glob("*.safetensors"):
            write_atomically(self.cycles_folder / kept.name, kept.read_bytes())


class RunFolder:
    """Names as the design fixes them. Weights, state and tables are written whole or not at all."""

    def __init__(self, path: str | Path, writes: bool = True) -> None:
        """`writes`: False for a process of a team that leaves writing to the main one."""
        self.path, self.writes = Path(path), writes
        self.config = self.path / "config.yaml"
        self.environment = self.path / "environment.json"
        self.timing = self.path / "timing.jsonl"
        self.cycles = self.path / "cycles"
        self.pretrained = self.path / "pretrained.safetensors"
        self.model = self.path / "model.safetensors"
        self.predictions = self.path / "predictions.csv"
        self.metrics = self.path / "metrics.json"
        self.measures = self.path / "measures.csv"
        self.evaluation = self.path / "evaluation.json"
        self.features = self.path / "features.safetensors"
        self.checkpoints = Checkpoints(self.path / "checkpoint", writes)
        self.journal = Journal(self.path, self.path, self.cycles, writes)

    def trial_journal(self, name: str) -> Journal:
        folder = self.cycles / f"trial-{name}"
        return Journal(self.path, folder, folder, self.writes)

    @property
    def holds_a_run(self) -> bool:
        return self.config.exists()

    @property
    def finished(self) -> bool:
        return self.model.exists()

    def owns(self, path: Path) -> bool:
        """Whether it is one of the files that make up this run. The report is not: it is made of them."""
        if not (self.config.exists() and self.environment.exists()):
            return False
        folders = (self.cycles, self.checkpoints.folder)
        files = {place for place in vars(self).values() if isinstance(place, Path)} - {self.path, *folders}
        others = {self.journal.history, self.path / "lock", self.path / "warnings.jsonl"}
        return path in files | others or any(path.is_relative_to(folder) for folder in folders)

    def check_free(self) -> None:
        """Refused for a new run: a folder that holds another one, or files of any other kind. A run that was killed before its
        settings were written has not begun."""
        try:
            kept = sorted(entry.name for entry in self.path.iterdir() if entry.name not in ("lock", "config.yaml.part"))
        except FileNotFoundError:
            return
        except OSError as error:
            raise UserError(f"cannot use {self.path} for the run: {error.strerror}") from None
        if self.holds_a_run:
            way_on = "it is complete" if self.finished else f"go on with it by `certvol adapt --resume {self.path}`"
            raise UserError(f"{self.path} holds another run ({way_on}); give a new folder as --out")
        if kept:
            raise UserError(f"{self.path} is not empty (found {kept[0]}); give a new folder as --out")

    def drop_state(self, weights_of_cycles: bool) -> None:
        """Of a finished run: what it would have gone on from, and the weights that were kept for a choice that is made."""
        if not self.finished:
            raise AssertionError(f"{self.path} may still have to go on")
        self.checkpoints.remove()
        for file in self.journal.kept_weights() if weights_of_cycles else ():
            with suppress(OSError):  # as with the states: what cannot be removed takes room, and no more
                file.unlink()

    def check_present(self) -> None:
        check_present(self.path)

    def create(self) -> None:
        self.check_free()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot use {self.path} for the run: {error.strerror}") from None

    def note_resumption(self, environment: dict[str, Any]) -> None:
        """A run may go on elsewhere than it began."""
        try:
            before = json.loads(self.environment.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            before = {}
        before = before if isinstance(before, dict) else {}
        resumed = before.get("resumed")
        self.write_json(
            self.environment, {**before, "resumed": [*(resumed if isinstance(resumed, list) else []), environment]}
        )

    def check_links(self) -> None:
        """A run from somewhere else may hold links: what is written here must not land there. Or a named pipe, which would be
        waited for without end."""
        home = self.path.resolve()
        for folder, folders, files in os.walk(home):
            for name in (*folders, *files):
                entry = Path(folder) / name
                if entry.is_symlink() and not entry.resolve().is_relative_to(home):
                    raise UserError(
                        f"{entry} is a link that leads out of the run's folder; remove it, or put the file in its place"
                    )
                if entry.exists() and not (entry.is_file() or entry.is_dir()):
                    raise UserError(
                        f"{entry} is no file (a named pipe, a socket or a device); remove it from the run's folder"
                    )

    @contextmanager
    def lock(self) -> Iterator[None]:
        """One process at a time."""
        refusal = f"another process is writing the run {self.path}; wait for it, or stop it first"
        with held_alone(self.path / "lock", refusal):
            yield

    def write_json(self, path: Path, content: Any) -> None:
        if not self.writes:
            return
        write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())

    def note_time(self, line: Mapping[str, Any]) -> None:
        if self.writes:
            self.check_present()
            append_line(self.timing, line)
