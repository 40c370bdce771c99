"""Hold everything that changes during a run; save it to a checkpoint and restore it."""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from certvol.data.batches import CyclePlan
from certvol.methods._base import AdaptationMethod, Labelled
from certvol.nn import norm
from certvol.runs.checkpoint import (
    State,
    load_into,
    optimizer_tensors,
    restore_optimizer,
    trained_tensors,
    with_prefix,
    without_prefix,
)
from certvol.training.model_choice import ModelChoice, Scores
from certvol.training.step import Stepper

Phase = Literal["pretrain", "trial", "adapt", "done"]
SETTLED_CYCLES = 2  # cycles in a row that must change few labels


@dataclass
class Position:
    """The position of a run: finished cycles of the phase, and steps of the next cycle."""

    phase: Phase = "pretrain"
    mode: norm.Mode = "mixed"
    cycle: int = 0
    step: int = 0
    trial: str | None = None
    """The norm mode on trial."""
    trial_scores: dict[str, Scores | None] = field(default_factory=dict)
    """Label-free scores of each norm mode tried; None if it collapsed."""
    collapse: list[str] = field(default_factory=list)
    """The signs of collapse because of which the guard ended adaptation."""
    changed: float = 1.0
    """The share of watched target images whose prediction the newest cycle changed."""
    steady: int = 0
    """How many cycles in a row changed few labels."""
    settled: float | None = None
    """The share of labels that changed last, if adaptation ended because they had settled."""

    def check(self) -> None:
        """Raise ValueError for invalid values; modes must be valid because paths contain them."""
        modes = get_args(norm.Mode)
        counts = (self.cycle, self.step, self.steady)
        if (
            self.phase not in get_args(Phase)
            or self.mode not in modes
            or self.trial not in (None, *modes)
            or not all(isinstance(count, int) and count >= 0 for count in counts)
            or not isinstance(self.trial_scores, dict)
            or not all(_are_scores(each) for each in self.trial_scores.values())
            or not isinstance(self.collapse, list)
            or not isinstance(self.changed, float | int)
            or not isinstance(self.settled, float | int | None)
        ):
            raise ValueError("invalid training position in checkpoint")


def _are_scores(found: object) -> bool:
    return found is None or (
        isinstance(found, dict)
        and all(isinstance(score, float | int | None) for score in found.values())
    )


class RunState:
    """The state of a run: position, plan and labels; weights and momentum lie in their owners."""

    def __init__(self, method: AdaptationMethod, stepper: Stepper, choice: ModelChoice) -> None:
        self.method, self.stepper, self.choice = method, stepper, choice
        self.position = Position(mode=method.network.domains.mode)
        self.plan: CyclePlan | None = None
        self.labelled: Labelled | None = None
        """Labels of all target images, from a method or rule that labels the whole target."""
        self.pretrained_NC: NDArray[np.float32] | None = None
        """Probabilities of the watched target images by the pretrained model."""
        self.watched_N: NDArray[np.int64] | None = None
        """Predictions of the watched target images after the newest cycle."""

    def set_labelled(self, labelled: Labelled | None) -> None:
        self.labelled = labelled
        self.stepper.tables = labelled.tables if labelled is not None else {}

    def checkpoint(self) -> State:
        tensors = {
            **with_prefix("method", trained_tensors(self.method)),
            **optimizer_tensors(self.stepper.optimizer),
            **with_prefix("choice", self.choice.tensors()),
        }
        if self.plan is not None:
            arrays = {f.name: getattr(self.plan, f.name) for f in dataclasses.fields(self.plan)}
            plan = {name: torch.from_numpy(array) for name, array in arrays.items()}
            tensors |= with_prefix("plan", plan)
        if self.pretrained_NC is not None:
            tensors["pretrained_NC"] = torch.from_numpy(self.pretrained_NC)
        if self.watched_N is not None:
            tensors["watched_N"] = torch.from_numpy(self.watched_N)
        if self.labelled is not None:
            tensors["labelled"] = self.labelled.labels_N
            tensors |= with_prefix("tables", self.labelled.tables)
        position = dataclasses.asdict(self.position)
        return State(tensors, {"position": position, "choice": self.choice.facts()})

    def restore(self, state: State) -> None:
        """Restore a checkpoint; KeyError, ValueError or the like if it belongs to another run."""
        self.position = Position(**state.facts["position"])
        self.position.check()
        self.choice.restore(state.facts["choice"], without_prefix("choice", state.tensors))
        self.method.network.domains.mode = self.position.mode
        load_into(self.method, without_prefix("method", state.tensors), "the checkpoint")
        restore_optimizer(self.stepper.new_optimizer(), state.tensors)
        pretrained = state.tensors.get("pretrained_NC")
        self.pretrained_NC = None if pretrained is None else pretrained.numpy()
        watched = state.tensors.get("watched_N")
        self.watched_N = None if watched is None else watched.numpy()
        self.plan = self._plan_in(state.tensors)
        self.set_labelled(self._labelled_in(state.tensors))

    def note_change(self, changed: float, most: float) -> None:
        """Count a cycle as steady if at most the share `most` of the labels changed in it."""
        position = self.position
        position.steady = position.steady + 1 if changed <= most else 0
        if position.steady >= SETTLED_CYCLES and position.trial is None:
            position.settled = changed

    def _plan_in(self, tensors: dict[str, Tensor]) -> CyclePlan | None:
        found = without_prefix("plan", tensors)
        if not found:
            return None
        plan = CyclePlan(**{name: tensor.numpy() for name, tensor in found.items()})
        views = self.stepper.views
        plan.check(len(views.source), len(views.target), self.method.network.num_classes)
        return plan

    def _labelled_in(self, tensors: dict[str, Tensor]) -> Labelled | None:
        if "labelled" not in tensors:
            return None
        labels_N, tables = tensors["labelled"], without_prefix("tables", tensors)
        views, classes = self.stepper.views, self.method.network.num_classes
        if any(len(tensor) != len(views.target) for tensor in (labels_N, *tables.values())):
            raise ValueError("the labels in the checkpoint are for other images")
        if labels_N.dtype != torch.int64 or not bool((labels_N < classes).all()):
            raise ValueError("the labels in the checkpoint are for other classes")
        on_device = {name: table.to(views.device) for name, table in tables.items()}
        return Labelled(labels_N.to(views.device), on_device)
