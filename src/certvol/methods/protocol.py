"""What a method is to the trainer: a module that turns a batch into loss terms.

On a GPU the trainer records a step once and replays it. So `loss_terms` and `after_step` work on tensors alone: no branch on a
tensor's value, no shape that depends on one (`x[mask]`, `nonzero`), nothing that waits for the device (`item`, `float(tensor)`,
`cpu`). Randomness comes from dropout or from `batch.generator`. A contract test holds every method to it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from certvol.nn.network import Network


@dataclass(frozen=True)
class Batch:
    """One step's images on the training device, source rows first."""

    images_NCHW: Tensor
    labels_N: Tensor
    """True labels of the source rows, this cycle's pseudo-labels of the target rows."""
    num_source: int
    rows: Tensor
    """Which rows of the whole batch these are: all of them, but where several processes share the batch."""
    total: int
    """Rows of the whole batch."""
    generator: torch.Generator
    """For this step's noise, on the device of the images."""
    progress: Tensor
    """Of the phase, 0 to 1; a scalar on the device of the images."""
    adapting: bool
    """False in pretraining, where all rows are source images."""
    watched: dict[str, Tensor] = field(default_factory=dict)
    """A method may leave values per image here (`sigma`), detached: their medians over each domain are logged."""

    def noise(self, features_ND: Tensor, num_samples: int) -> Tensor:
        """eps ~ N(0, 1), N x M x D. Drawn for the whole batch, so that it depends on an image's place in it alone."""
        shape = (self.total, num_samples, features_ND.shape[1])
        whole = torch.randn(shape, generator=self.generator, device=features_ND.device, dtype=features_ND.dtype)
        return whole if len(self.rows) == self.total else whole[self.rows]


class AdaptationMethod(nn.Module, ABC):
    """Extra networks of a method are its sub-modules: they are trained, saved and resumed with the rest."""

    summary: ClassVar[str]
    adapts: ClassVar[bool] = True
    """False: training ends with pretraining."""
    labels_whole_target: ClassVar[bool] = False
    """True: every cycle labels all target images, not only those it will draw."""

    closed_form: ClassVar[bool] = False
    """True: adaptation is one call of `fit_features` in place of all cycles, on the features of a frozen backbone."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Settings of the method, given as `method.<field>`."""

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__()
        self.network = network
        self.config = config

    @abstractmethod
    def loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        """Scalars by name, as they are logged; their sum, weighted by `term_weights`, is minimised."""

    @property
    def term_weights(self) -> dict[str, float]:
        """Of the terms whose weight is not 1."""
        return {}

    def loss(self, terms: dict[str, Tensor]) -> Tensor:
        return torch.stack([self.term_weights.get(name, 1.0) * term for name, term in terms.items()]).sum()

    def logits(self, features_ND: Tensor, dropout: float | None = None) -> Tensor:
        """What labels and predictions are made of. `dropout`: drop with this probability, in evaluation too (MC-dropout)."""
        logits: Tensor = self.network.classifier(features_ND, dropout=dropout)
        return logits

    def after_step(self) -> None:
        """Called after every optimiser step: for what moves without gradients, such as a teacher."""

    def fit_features(self, source_SD: Tensor, labels_S: Tensor, target_TD: Tensor) -> None:
        """Of a method in closed form: features of all source images with their labels, and of all target images, on the CPU."""
        raise NotImplementedError

    def sigma(self, features_ND: Tensor) -> Tensor | None:
        """Certainty of each image, where the method has one."""
        return None
