"""Shift a run's decisions towards the target prior, in each phase for the shares trained with.

Pretraining, adaptation and a fit in closed form may see the source's classes in different shares.
The shift of each phase's model divides by its own shares, and is saved with its weights.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from certvol.data.target_prior import Shares, TargetPrior
from certvol.methods._base import AdaptationMethod
from certvol.training.planner import Planner


@dataclass(frozen=True, eq=False)
class PriorShift:
    """Sets the shift of a method; nothing if the prior says nothing."""

    method: AdaptationMethod
    prior: TargetPrior
    planner: Planner
    device: torch.device

    def for_start(self, continued: bool) -> None:
        """Set the shift of the model before adaptation.

        A `continued` run starts from the end of another run's adaptation.
        """
        shares_C = self.prior.shares_C
        if shares_C is not None:
            self.method.target_shares_C = torch.from_numpy(shares_C).float().to(self.device)
        self._divide_by(self._adapted_C if continued else self.planner.trained_shares_C)

    def for_adaptation(self) -> None:
        """Set the shift of the model that adaptation trains."""
        self._divide_by(self._adapted_C)

    def for_fit(self, labels_S: Tensor) -> None:
        """Set the shift of a method in closed form that is fitted to rows of these labels."""
        if self.method.keeps_source_shares:
            counts_C = np.bincount(labels_S.numpy(), minlength=self.planner.num_classes)
            self._divide_by(counts_C / counts_C.sum())

    def contradiction(self, predict: Callable[[], NDArray[np.int64]]) -> str | None:
        """Warn if predictions that the method makes without the prior contradict it."""
        shift_C = self.method.prior_shift_C
        if shift_C is None:
            return None
        self.method.prior_shift_C = None
        labels_N = predict()
        self.method.prior_shift_C = shift_C
        predicted_C = np.bincount(labels_N, minlength=self.planner.num_classes) / len(labels_N)
        return self.prior.contradiction(predicted_C)

    @property
    def _adapted_C(self) -> Shares:
        planner = self.planner
        if self.method.source_free:
            return planner.trained_shares_C
        return planner.adapted_shares_C

    def _divide_by(self, trained_C: Shares) -> None:
        shift_C = self.prior.shift(trained_C)
        self.method.prior_shift_C = None if shift_C is None else shift_C.to(self.device)
