"""What a method is to the trainer: a module that turns a batch into loss terms.

On a GPU the trainer records a step once and replays it. So `loss_terms` and `after_step` work on tensors alone: no branch on a
tensor's value, no shape that depends on one (`x[mask]`, `nonzero`), nothing that waits for the device (`item`, `float(tensor)`,
`cpu`). Randomness comes from dropout or from `batch.generator`. A contract test holds every method to it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from certvol.nn.network import Network
from certvol.nn.teacher import Teacher

MC_ROWS = 4096  # images whose head runs at a time, many times over


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
    other_images_NCHW: Tensor | None = None
    """A second view of the same images, for a method with `views_per_image` 2; in adaptation alone."""
    tables: dict[str, Tensor] = field(default_factory=dict)
    """Of the target rows, in their order: what the method's `label_target` has noted of these images."""
    watched: dict[str, Tensor] = field(default_factory=dict)
    """A method may leave values per image here (`sigma`), detached: their medians over each domain are logged."""

    def num_labelled(self, with_target: bool) -> int:
        """How many rows, from the first, train a classifier: the source's, or with the target's pseudo-labels all."""
        return len(self.labels_N) if with_target else self.num_source

    def noise(self, features_ND: Tensor, num_samples: int) -> Tensor:
        """eps ~ N(0, 1), N x M x D. Drawn for the whole batch, so that it depends on an image's place in it alone."""
        shape = (self.total, num_samples, features_ND.shape[1])
        whole = torch.randn(shape, generator=self.generator, device=features_ND.device, dtype=features_ND.dtype)
        return whole if len(self.rows) == self.total else whole[self.rows]


@dataclass(frozen=True)
class Survey:
    """All target images as the model sees them before a cycle, on the training device; the same in every process."""

    features_ND: Tensor
    probabilities_NC: Tensor
    source_centres_CD: Tensor | None
    """Of each class, the sum of its source features brought to unit length; for a method that `surveys_source`."""
    stage: int
    generator: torch.Generator


@dataclass(frozen=True)
class Labelled:
    """All target images, with what a method has made of them."""

    labels_N: Tensor
    """-1: the image is left out of the batches."""
    tables: dict[str, Tensor] = field(default_factory=dict)
    """By name, a row per target image: `Batch.tables` holds those of its target rows."""


class AdaptationMethod(nn.Module, ABC):
    """Extra networks of a method are its sub-modules: they are trained, saved and resumed with the rest.

    What a method keeps from cycle to cycle beside them (centroids) are buffers. Their shapes must not depend on the number of
    images, which whoever loads the model does not know.
    """

    summary: ClassVar[str]
    adapts: ClassVar[bool] = True
    """False: training ends with pretraining."""
    uses_split: ClassVar[bool] = True
    """False: `loss_terms` treats source and target rows alike, so that a step is the same however many of each there are."""
    batches: ClassVar[Literal["balanced", "plain"]] = "balanced"
    """What `training.batches auto` is in adaptation. Plain: the loss takes a batch's target rows for a sample of the target.
    Drawn evenly by pseudo-label they agree with the present predictions by construction, errors included: nothing is left to
    align."""
    labels_whole_target: ClassVar[bool] = False
    """True: every cycle labels all target images, not only those it will draw, and `label_target` has the say."""
    surveys_source: ClassVar[bool] = False
    """True: `label_target` also gets the centres of the source's classes."""
    views_per_image: ClassVar[int] = 1
    """2: adaptation gets two views of every image."""
    closed_form: ClassVar[bool] = False
    """True: adaptation is one call of `fit_features` in place of all cycles, on features as they are: those of pretrained
    weights, which then stay, or where a backbone has none those that pretraining has made."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Settings of the method, given as `method.<field>`."""

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__()
        self.network = network
        self.config = config
        self.teacher: Teacher | None = None
        """Where there is one, it labels and predicts in the place of the trained weights, and is what is delivered."""

    @property
    def stages(self) -> int:
        """Above 1: adaptation is this many trainings in a row, of `training.cycles` each. Each starts from the pretrained
        weights, with labels (and tables) that the training before it has made; `Batch.progress` and the learning rate start
        anew."""
        return 1

    @abstractmethod
    def loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        """Scalars by name, as they are logged; their sum, weighted by `term_weights`, is minimised.

        A batch, or a process's share of one, may have no row of a domain or of a class: the same terms, finite, are then
        expected (`losses.mean_cross_entropy` is 0 of no rows, where a plain mean is none)."""

    @property
    def term_weights(self) -> dict[str, float]:
        """Of the terms whose weight is not 1."""
        return {}

    def loss(self, terms: dict[str, Tensor]) -> Tensor:
        return torch.stack([self.term_weights.get(name, 1.0) * term for name, term in terms.items()]).sum()

    def rate_of(self, weight: str) -> float:
        """Learning rate of a weight, by its name among `named_parameters`, over that of the run."""
        return 1.0

    def logits(self, features_ND: Tensor, dropout: float | None = None) -> Tensor:
        """What labels and predictions are made of. `dropout`: drop with this probability, in evaluation too (MC-dropout)."""
        logits: Tensor = self.network.classifier(features_ND, dropout=dropout)
        return logits

    def label_target(self, survey: Survey) -> Labelled:
        """Pseudo-labels of all target images, for a method that `labels_whole_target`.

        Runs between steps, free of their rules. Buffers may be set here, but not for a new stage, which starts from the weights
        and buffers of the pretrained model: what is meant for it goes into tables.
        """
        return Labelled(survey.probabilities_NC.argmax(dim=1))

    def mc_dropout_moments(
        self, features_ND: Tensor, passes: int, dropout: float, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation (of the passes themselves, 1/T) of the probabilities under MC-dropout, N x C each."""
        devices = [features_ND.device] if features_ND.device.type == "cuda" else []
        seed = int(torch.randint(2**62, (), generator=generator, device=features_ND.device))
        means, deviations = [], []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            for rows_RD in torch.split(features_ND, MC_ROWS):
                drawn_TRC = torch.stack([self.logits(rows_RD, dropout).float().softmax(1) for _ in range(passes)])
                means.append(drawn_TRC.mean(0))
                deviations.append(drawn_TRC.std(0, correction=0))
        return torch.cat(means), torch.cat(deviations)

    def after_step(self) -> None:
        """Called after every optimiser step: for what moves without gradients, such as a teacher."""

    def fit_features(self, source_SD: Tensor, labels_S: Tensor, target_TD: Tensor) -> None:
        """Of a method in closed form: features of all source images with their labels, and of all target images, on the CPU."""
        raise NotImplementedError

    def sigma(self, features_ND: Tensor) -> Tensor | None:
        """Certainty of each image, where the method has one."""
        return None
