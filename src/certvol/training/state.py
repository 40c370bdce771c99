"""All that changes as a run goes on, as one piece that becomes a checkpoint and comes back from it."""

import dataclasses
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from certvol.data.batches import CyclePlan
from certvol.methods.protocol import AdaptationMethod, Labelled
from certvol.training.checkpoint import (
    State,
    load_into,
    optimizer_tensors,
    restore_optimizer,
    with_prefix,
    without_prefix,
)
from certvol.training.choice import Choice
from certvol.training.guard import Guard
from certvol.training.position import Position
from certvol.training.stepper import Stepper


class RunState:
    """Weights and momentum are in the method and in the stepper; the rest is here."""

    def __init__(self, method: AdaptationMethod, stepper: Stepper, guard: Guard, choice: Choice) -> None:
        self.method, self.stepper, self.guard, self.choice = method, stepper, guard, choice
        self.position = Position(mode=method.network.domains.mode)
        self.plan: CyclePlan | None = None
        self.labelled: Labelled | None = None
        """All target images, by a method that labels them so."""
        self.pretrained_NC: NDArray[np.float32] | None = None
        """Probabilities of the watched target images by the pretrained model."""

    def note(self, labelled: Labelled | None) -> None:
        self.labelled = labelled
        self.stepper.tables = labelled.tables if labelled is not None else {}

    def checkpoint(self, further_facts: dict[str, Any]) -> State:
        tensors = {**with_prefix("method", self.method.state_dict()), **optimizer_tensors(self.stepper.optimizer)}
        if self.plan is not None:
            plan = {f.name: torch.from_numpy(getattr(self.plan, f.name)) for f in dataclasses.fields(self.plan)}
            tensors |= with_prefix("plan", plan)
        if self.pretrained_NC is not None:
            tensors["pretrained_NC"] = torch.from_numpy(self.pretrained_NC)
        tensors |= with_prefix("choice", self.choice.tensors())
        if self.labelled is not None:
            tensors |= {"labelled": self.labelled.labels_N, **with_prefix("tables", self.labelled.tables)}
        facts = {
            "position": dataclasses.asdict(self.position),
            "guard": self.guard.facts(),
            "choice": self.choice.facts(),
        }
        return State(tensors, facts | further_facts)

    def take(self, state: State) -> None:
        """Goes to where a checkpoint stands. KeyError, TypeError, ValueError and the like where it is none of this run."""
        self.position = Position(**state.facts["position"])
        self.position.check()
        self.guard.restore(state.facts["guard"])
        self.choice.restore(state.facts["choice"], without_prefix("choice", state.tensors))
        self.method.network.domains.mode = self.position.mode
        load_into(self.method, without_prefix("method", state.tensors), "the checkpoint")
        restore_optimizer(self.stepper.new_optimizer(), state.tensors)
        pretrained = state.tensors.get("pretrained_NC")
        self.pretrained_NC = None if pretrained is None else pretrained.numpy()
        self.plan = self._plan_in(state.tensors)
        self.note(self._labelled_in(state.tensors))

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
        views = self.stepper.views
        if any(len(tensor) != len(views.target) for tensor in (labels_N, *tables.values())):
            raise ValueError("its labels are of other images")
        if labels_N.dtype != torch.int64 or not bool((labels_N < self.method.network.num_classes).all()):
            raise ValueError("its labels are none of these classes")
        return Labelled(labels_N.to(views.device), {name: table.to(views.device) for name, table in tables.items()})
