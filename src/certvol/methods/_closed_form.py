"""Base of methods in closed form: pretrain as the baseline, then fit a head in one call."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from certvol.methods import basic
from certvol.methods._alignment import Array, mean_and_scale
from certvol.nn.heads import Drop
from certvol.nn.network import Network


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

    def keep(self, **arrays: NDArray[Any]) -> None:
        """Store fitted arrays, floats as float32 and integers unchanged."""
        device = next(self.network.classifier.parameters()).device
        for name, array in arrays.items():
            tensor = torch.from_numpy(np.ascontiguousarray(array))
            tensor = tensor.float() if tensor.is_floating_point() else tensor
            setattr(self, name, tensor.to(device))

    def keep_standardised(self, source_SD: Tensor, target_TD: Tensor) -> tuple[Array, Array]:
        """Standardise each domain by its own mean and scale; keep the target's for predictions."""
        standardised = []
        for rows_ND in (source_SD, target_TD):
            rows = rows_ND.double().numpy()
            mean_D, scale_D = mean_and_scale(rows)
            standardised.append((rows - mean_D) / scale_D)
        self.keep(mean_D=mean_D, scale_D=scale_D)
        return standardised[0], standardised[1]

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
