"""Save what training produces: states to resume from, weights of chosen cycles, history, scores.

The training loop uses the interface of `Keeper`, which keeps everything in memory. `RunKeeper`
writes it to a run folder.
"""

import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from certvol.data.folders import printable
from certvol.distributed import Team
from certvol.errors import RunFailed, UserError
from certvol.methods._base import AdaptationMethod
from certvol.nn import norm
from certvol.progress import Reporter
from certvol.runs.checkpoint import (
    Checkpoints,
    State,
    load_into,
    read_tensors,
    trained_tensors,
    write_tensors,
)
from certvol.runs.folder import Journal, RunFolder
from certvol.settings import WITHOUT_EFFECT, Config, flatten, shown
from certvol.training.state import RunState

PRETRAINED = "pretrained"
# Settings that may change between two parts of a run. The prior itself is compared, not its place.
FREE_SETTINGS = WITHOUT_EFFECT | {"data.target_prior"}
MOST_DIFFERENCES = 5
NOT_OF_THIS_RUN = (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError)


class Keeper:
    """Keeps weights in memory, but no states, history or trials: these need a run folder."""

    last_good_state = ""
    """A sentence for messages that says where the newest checkpoint is."""

    def __init__(self) -> None:
        self.weights: dict[str, dict[str, Tensor]] = {}

    def resume(self, state: RunState) -> bool:
        """Restore the newest checkpoint; False if there is none."""
        return False

    @property
    def is_save_due(self) -> bool:
        return False

    def save(self, state: RunState) -> None:
        """Write a checkpoint of the run."""

    def save_as(self, name: str, state: RunState) -> None:
        """Save a state beside the run's own, for a trial of norm modes."""
        raise NotImplementedError

    def restore(self, name: str, state: RunState) -> None:
        raise NotImplementedError

    def begin_trial(self, mode: norm.Mode, fresh: bool) -> None:
        """Send the lines and weights that follow to a trial; a `fresh` trial starts without any."""

    def end_trials(self, chosen: norm.Mode, replace: bool) -> None:
        """Make the lines and weights of the chosen trial the run's own.

        `replace`: the trial pretrained again, and its lines replace those of the run.
        """

    def drop_trials(self, state: RunState) -> None:
        """Delete the files of the trials."""

    def keep_weights(self, name: str, method: AdaptationMethod) -> None:
        """Save the present weights as `pretrained`, or as a validator's best."""
        self.weights[name] = delivered_tensors(method)

    def load_weights(self, name: str, method: AdaptationMethod) -> None:
        load_weights(method, self.weights[name], name)

    def log(self, line: Mapping[str, Any]) -> None: ...
    def log_scores(
        self, cycle: int, scores: Mapping[str, Any], probabilities_NC: NDArray[np.float32]
    ) -> None: ...
    def note_time(self, line: Mapping[str, Any]) -> None: ...


class RunKeeper(Keeper):
    """Saves everything in a run folder. With several processes, only the main one writes."""

    def __init__(
        self,
        run: RunFolder,
        config: Config,
        team: Team,
        about: Mapping[str, Any],
        fingerprints: Mapping[str, str],
        reporter: Reporter,
    ) -> None:
        """`about` becomes the header of weights files; `fingerprints` are those of both domains."""
        super().__init__()
        self.run, self.config, self.team, self.about = run, config, team, about
        self.settings = config.training
        self.bf16: bool | None = None
        """Whether training runs in bf16, which a resumed run keeps."""
        self.accepts_changes = False
        """Resume also if settings changed since the last checkpoint."""
        self.fingerprints, self.reporter = dict(fingerprints), reporter
        self.journal: Journal = run.journal
        self.unwritten: dict[Path, dict[str, Tensor]] = {}
        """Weights of validators' best cycles, to be written with the next checkpoint."""
        self.saved_at = time.monotonic()
        run.checkpoints.keeps_previous = self.settings.checkpoint_previous

    @property
    def last_good_state(self) -> str:  # type: ignore[override]
        checkpoints = self.run.checkpoints
        return f"the last good state is in {checkpoints.folder}" if checkpoints.exist else ""

    # --- states

    def resume(self, state: RunState) -> bool:
        found = self._restore(self.run.checkpoints, state)
        if found is None:
            self.run.journal.cut({})
            return False
        for name, fingerprint in self.fingerprints.items():
            if found.facts["fingerprints"][name] != fingerprint:
                what = f"the {name} images" if name in ("source", "target") else f"the {name}"
                raise UserError(
                    f"{what} changed since the run {self.run.path} began: undo that, or start a "
                    "new run"
                )
        self.run.journal.cut(found.facts["journal"])
        if (trial := state.position.trial) is not None:
            self.run.trial_journal(trial).cut(found.facts["trial_journal"])
        return True

    @property
    def is_save_due(self) -> bool:
        waited = time.monotonic() - self.saved_at
        due = self.team.main and waited > self.settings.checkpoint_seconds
        return self.team.agree(1 if due else None) is not None

    def save(self, state: RunState) -> None:
        self.run.check_present()
        try:
            while self.unwritten:
                path, weights = self.unwritten.popitem()
                write_tensors(path, weights, self.about)
            self.run.checkpoints.save(self._state(state))
        except OSError as error:
            raise UserError(
                f"cannot write the checkpoint: {error.strerror or error}. The previous one is "
                f"kept; when the cause is fixed, resume with `certvol adapt --resume "
                f"{self.run.path}`"
            ) from None
        self.saved_at = time.monotonic()

    def save_as(self, name: str, state: RunState) -> None:
        self._beside(name).save(self._state(state))

    def restore(self, name: str, state: RunState) -> None:
        if self._restore(self._beside(name), state) is None:
            raise RunFailed(
                f"a state of this run is missing or damaged in {self._beside(name).folder}; "
                "start a new run"
            )

    def _beside(self, name: str) -> Checkpoints:
        return Checkpoints(self.run.checkpoints.folder / name, self.team.main)

    def _state(self, state: RunState) -> State:
        found = state.checkpoint()
        facts = {
            "fingerprints": self.fingerprints,
            "settings": flatten(self.config.as_dict(), "settings"),
            "classes": list(self.about.get("classes", [])),
            "bf16": self.bf16,
            "journal": self.run.journal.lengths(),
            "trial_journal": self.run.trial_journal(state.position.mode).lengths(),
        }
        return State(found.tensors, found.facts | facts)

    def _restore(self, checkpoints: Checkpoints, state: RunState) -> State | None:
        self.team.wait()
        found, warnings = checkpoints.load()
        for warning in warnings:
            self.reporter.warn(warning)
        if found is None:
            return None
        self.unwritten.clear()
        try:
            self._check_settings(found.facts)
            state.restore(found)
            self._check(found)
        except NOT_OF_THIS_RUN as error:
            raise RunFailed(
                f"the checkpoint in {checkpoints.folder} is not one of this run "
                f"({type(error).__name__}: {error}); start a new run"
            ) from None
        return found

    def _check_settings(self, facts: Mapping[str, Any]) -> None:
        """Raise UserError if the run's settings or classes are not those of the checkpoint."""
        before, now = dict(facts["settings"]), flatten(self.config.as_dict(), "settings")
        changed = [
            f"`{name}` {shown(before.get(name))} -> {shown(now.get(name))}"
            for name in sorted({*before, *now} - FREE_SETTINGS)
            if before.get(name) != now.get(name)
        ]
        if changed and not self.accepts_changes:
            more = f" and {len(changed) - MOST_DIFFERENCES} more"
            named = ", ".join(changed[:MOST_DIFFERENCES])
            raise UserError(
                f"settings of the run {self.run.path} changed since its last checkpoint ({named}"
                f"{more if len(changed) > MOST_DIFFERENCES else ''}); undo that in config.yaml, or "
                "add --accept-changes to resume with the new ones"
            )
        for name in sorted({"prior", "labels"} & ({*facts["fingerprints"]} ^ {*self.fingerprints})):
            raise UserError(
                f"the {name} changed since the run {self.run.path} began: undo that in config.yaml,"
                " or start a new run"
            )
        classes = list(self.about.get("classes", []))
        if list(facts["classes"]) != classes:
            pairs = zip(facts["classes"], classes, strict=False)
            other = next(((old, new) for old, new in pairs if old != new), ("?", "?"))
            raise UserError(
                f"the class folders of the source changed since the run {self.run.path} began "
                f"({printable(str(other[0]))} -> {printable(str(other[1]))}): undo that, or start "
                "a new run"
            )

    def _check(self, state: State) -> None:
        journals = ("journal", "trial_journal")
        lengths = [length for name in journals for length in state.facts[name].values()]
        if not all(isinstance(length, int) and length >= 0 for length in lengths):
            raise ValueError("invalid length of a journal")
        if set(state.facts["fingerprints"]) != set(self.fingerprints):
            raise ValueError("invalid fingerprints")

    # --- trials of norm modes

    def begin_trial(self, mode: norm.Mode, fresh: bool) -> None:
        self.journal = self.run.trial_journal(mode)
        if fresh:
            self.journal.cut({})

    def end_trials(self, chosen: norm.Mode, replace: bool) -> None:
        self.journal = self.run.journal
        if replace:
            self.journal.cut({})
        self.journal.adopt(self.run.trial_journal(chosen))

    def drop_trials(self, state: RunState) -> None:
        """Delete the files of the trials, even if an earlier call was killed halfway."""
        folders = [path for path in self.run.checkpoints.folder.glob("*") if path.is_dir()]
        weights = list(self.run.cycles.glob("trial-*/best-*.safetensors"))
        left = self.team.main and bool(folders or weights)
        if self.team.agree(1 if left else None) is None:
            return
        self.save(state)  # the previous checkpoint must not need what is deleted
        for folder in folders:
            self._beside(folder.name).remove()
        for file in weights if self.team.main else ():
            file.unlink(missing_ok=True)

    # --- weights and history

    def keep_weights(self, name: str, method: AdaptationMethod) -> None:
        if not self.team.main:
            return
        if name == PRETRAINED:
            self.run.check_present()
            write_tensors(self.run.pretrained, delivered_tensors(method), self.about)
        else:
            self.unwritten[self.journal.best_weights(name)] = delivered_tensors(method)

    def load_weights(self, name: str, method: AdaptationMethod) -> None:
        self.team.wait()
        path = self.run.pretrained if name == PRETRAINED else self.journal.best_weights(name)
        load_weights(method, read_tensors(path), path.name)

    def log(self, line: Mapping[str, Any]) -> None:
        self.journal.log(line)

    def log_scores(
        self, cycle: int, scores: Mapping[str, Any], probabilities_NC: NDArray[np.float32]
    ) -> None:
        self.journal.log_scores(cycle, scores, probabilities_NC)

    def note_time(self, line: Mapping[str, Any]) -> None:
        self.run.note_time(line)


def delivered_tensors(method: AdaptationMethod) -> dict[str, Tensor]:
    """Copy the weights that a run delivers: the teacher's if there is one, no frozen backbone."""
    with method.teacher.in_charge() if method.teacher else nullcontext():
        return {
            name: tensor.clone()
            for name, tensor in trained_tensors(method).items()
            if not name.startswith("teacher.")
        }


def load_weights(method: AdaptationMethod, weights: Mapping[str, Tensor], what: str) -> None:
    """Load delivered weights; a teacher starts from the same."""
    teacher, method.teacher = method.teacher, None
    load_into(method, weights, what)
    method.teacher = teacher
    if teacher is not None:
        teacher.start()
