"""What methods in closed form share: pretraining as the baseline does, and a head of arrays that are fitted at once."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from certvol.alignment import Array, mean_and_scale
from certvol.losses import cross_entropy
from certvol.methods.protocol import AdaptationMethod, Batch
from certvol.nn.network import Network


class ClosedFormMethod(AdaptationMethod):
    """The fitted arrays are buffers: empty until then, of the file's shapes after loading. Pretraining trains f_Cl, whose
    predictions are the run's source-only figure."""

    closed_form = True
    uses_split = False
    arrays: tuple[str, ...]
    """Names of what is fitted."""
    mean_D: Tensor
    scale_D: Tensor

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__(network, config)
        for name in ("mean_D", "scale_D", *self.arrays):
            self.register_buffer(name, torch.empty(0))

    @property
    def is_fitted(self) -> bool:
        return len(self.mean_D) > 0

    def keep(self, **arrays: NDArray[Any]) -> None:
        """Fitted arrays: float32, or whole numbers as they are."""
        device = next(self.network.classifier.parameters()).device
        for name, array in arrays.items():
            tensor = torch.from_numpy(np.ascontiguousarray(array))
            setattr(self, name, (tensor.float() if tensor.is_floating_point() else tensor).to(device))

    def keep_standardised(self, source_SD: Tensor, target_TD: Tensor) -> tuple[Array, Array]:
        """Each domain by its own mean and scale, in double precision; the target's are kept for predictions."""
        source, target = (rows.double().numpy() for rows in (source_SD, target_TD))
        (source_mean, source_scale), (mean_D, scale_D) = mean_and_scale(source), mean_and_scale(target)
        self.keep(mean_D=mean_D, scale_D=scale_D)
        return (source - source_mean) / source_scale, (target - mean_D) / scale_D

    def loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        logits_NC = self.network.classifier(self.network.features(batch.images_NCHW))
        return {"ce": cross_entropy(logits_NC, batch.labels_N).mean()}

    def logits(self, features_ND: Tensor, dropout: float | None = None) -> Tensor:
        if not self.is_fitted:
            return super().logits(features_ND, dropout)
        with torch.autocast(features_ND.device.type, enabled=False):
            return self.fitted_logits((features_ND.float() - self.mean_D) / self.scale_D)

    def fitted_logits(self, rows_ND: Tensor) -> Tensor:
        """Of standardised features."""
        raise NotImplementedError

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *others: Any) -> None:
        for name in ("mean_D", "scale_D", *self.arrays):
            if (found := state_dict.get(prefix + name)) is not None:
                setattr(self, name, torch.empty_like(found, device=getattr(self, name).device))
        super()._load_from_state_dict(state_dict, prefix, *others)
