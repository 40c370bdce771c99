"""Base of methods in closed form: pretrain as the baseline, then fit a head in one call."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from certvol.methods import basic
from certvol.methods._alignment import Array, Problem, mean_and_scale
from certvol.nn.heads import Drop
from certvol.nn.network import Network
from certvol.randomness import numpy_generator

Fitted = dict[str, Any]
"""Fitted arrays and numbers by name."""


class ClosedFormMethod(basic.Method):
    """A method that fits a head to the features of both domains.

    Keeps what it fits in buffers, which are empty before the fit and resized on loading.
    Pretraining trains f_Cl, whose predictions are the run's source-only figure.
    """

    closed_form = True
    arrays: tuple[str, ...]
    """Names of the fitted arrays, besides the mean and scale of the target's features."""
    mean_D: Tensor
    scale_D: Tensor

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__(network, config)
        for name in ("mean_D", "scale_D", *self.arrays):
            self.register_buffer(name, torch.empty(0))
        self.seed = int(torch.randint(2**31 - 1, ()))
        """Seed of what the fit draws; it follows from the run's, as initial weights do."""

    @staticmethod
    def fit(problem: Problem, config: Any, draws: np.random.Generator) -> Fitted:
        """Fit to scaled rows; return what `arrays` names. Estimators of scikit-learn share this."""
        raise NotImplementedError

    @staticmethod
    def moments(source_SD: Array, target_TD: Array) -> list[tuple[Array, Array]]:
        """Return the mean and scale of the source's features, and those of the target's."""
        return [mean_and_scale(source_SD), mean_and_scale(target_TD)]

    def fit_features(self, source_SD: Tensor, labels_S: Tensor, target_TD: Tensor) -> None:
        both = [rows.double().numpy() for rows in (source_SD, target_TD)]
        moments = self.moments(*both)
        source, target = (
            (rows - mean) / scale for rows, (mean, scale) in zip(both, moments, strict=True)
        )
        problem = Problem(source, labels_S.numpy(), target, self.network.num_classes)
        draws = numpy_generator(self.seed, type(self).__module__.rpartition(".")[2])
        mean_D, scale_D = moments[1]
        self.keep(mean_D=mean_D, scale_D=scale_D, **self.fit(problem, self.config, draws))

    def keep(self, **arrays: Any) -> None:
        """Store what was fitted, floats as float32 and integers unchanged."""
        device = next(self.network.classifier.parameters()).device
        for name, array in arrays.items():
            tensor = torch.from_numpy(np.ascontiguousarray(array))
            tensor = tensor.float() if tensor.is_floating_point() else tensor
            setattr(self, name, tensor.to(device))

    def logits(self, features_ND: Tensor, drop: Drop | None = None) -> Tensor:
        if len(self.mean_D) == 0:  # before the fit
            return super().logits(features_ND, drop)
        with torch.autocast(features_ND.device.type, enabled=False):
            return self.fitted_logits((features_ND.float() - self.mean_D) / self.scale_D)

    def fitted_logits(self, rows_ND: Tensor) -> Tensor:
        """Return the logits of standardised features."""
        raise NotImplementedError

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *others: Any
    ) -> None:
        for name in ("mean_D", "scale_D", *self.arrays):
            if (found := state_dict.get(prefix + name)) is not None:
                setattr(self, name, torch.empty_like(found, device=getattr(self, name).device))
        super()._load_from_state_dict(state_dict, prefix, *others)


class LinearMethod(ClosedFormMethod):
    """A method that fits a logistic regression to standardised features."""

    keeps_source_shares = True
    arrays: tuple[str, ...] = ("weight_CD", "bias_C")
    weight_CD: Tensor
    bias_C: Tensor

    def fitted_logits(self, rows_ND: Tensor) -> Tensor:
        return rows_ND @ self.weight_CD.T + self.bias_C
