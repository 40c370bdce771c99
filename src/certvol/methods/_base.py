"""The protocol of methods. A method is a module that turns a batch into loss terms.

On a GPU the trainer records a step once and replays it. `loss_terms` therefore uses tensors alone:
no branch on a tensor's value, no shape that depends on one (`x[mask]`, `nonzero`), nothing that
waits for the device (`item`, `float(tensor)`, `cpu`). Randomness comes from dropout or from
`batch.generator`. A contract test checks every method.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from certvol.nn.heads import Drop
from certvol.nn.network import Network
from certvol.nn.teacher import Teacher


@dataclass(frozen=True)
class ReviewedRows:
    """Target images with the labels that a person gave them."""

    inputs: Tensor
    labels_R: Tensor
    weight: float
    """Weight of their mean loss, such that each counts as much as a row of the batch."""


@dataclass(frozen=True)
class Batch:
    """The images (or features) of one step on the training device, source rows first."""

    inputs: Tensor
    labels_N: Tensor
    """True labels of the source rows, this cycle's pseudo-labels of the target rows."""
    num_source: int
    rows: Tensor
    """Places of these rows in the whole batch, which several processes may share."""
    total: int
    """Rows of the whole batch."""
    generator: torch.Generator
    """The generator of this step's noise, on the device of the inputs."""
    progress: Tensor
    """Progress of the phase, 0 to 1; a scalar on the device of the inputs."""
    adapting: bool
    """False in pretraining, where all rows are source images."""
    other_inputs: Tensor | None = None
    """A second view of the same images in adaptation, for a method with `views_per_image = 2`."""
    tables: dict[str, Tensor] = field(default_factory=dict)
    """The rows of the batch's target images in the tables of `Labelled`."""
    logged: dict[str, Tensor] = field(default_factory=dict)
    """A method may put detached values per image here (`sigma`); their medians are logged."""
    reviewed: ReviewedRows | None = None
    """Further rows of the step, on which the trainer itself trains the classifier."""

    def num_labelled(self, with_target: bool) -> int:
        """Return how many rows train a classifier: the source's, or all that have labels."""
        return len(self.labels_N) if with_target else self.num_source

    def noise(self, features_ND: Tensor, num_samples: int) -> Tensor:
        """Draw eps ~ N(0, 1), N x M x D; a row's values depend on its place in the whole batch."""
        device, dtype = features_ND.device, features_ND.dtype
        shape = (self.total, num_samples, features_ND.shape[1])
        whole = torch.randn(shape, generator=self.generator, device=device, dtype=dtype)
        return whole if len(self.rows) == self.total else whole[self.rows]

    def dropout_masks(self, features_ND: Tensor, num_masks: int, rate: float) -> Tensor:
        """Draw N x M x D masks: 0 with probability `rate`, else 1; they depend on a row's place."""
        uniform_NMD = torch.special.ndtr(self.noise(features_ND.float(), num_masks))
        masks_NMD: Tensor = (uniform_NMD >= rate).float()
        return masks_NMD


@dataclass(frozen=True)
class Survey:
    """All target images as the model sees them before a cycle; the same in every process."""

    features_ND: Tensor
    probabilities_NC: Tensor
    source_sums_CD: Tensor | None
    """Sum of the unit-length source features of each class, if the method `surveys_source`."""
    stage: int
    generator: torch.Generator
    cycle: int = 0
    """The number of cycles of the run before this one."""
    source_features_SD: Tensor | None = None
    """Features of all source images in training, for a pseudo-label rule that `uses_source`."""
    source_labels_S: Tensor | None = None
    fixed_features: bool = False
    """True if the features are the same in every cycle of the run."""

    def seed(self) -> int:
        """Draw a seed, for `mc_dropout`."""
        device = self.generator.device
        return int(torch.randint(2**62, (), generator=self.generator, device=device))


@dataclass(frozen=True)
class Labelled:
    """A method's pseudo-labels and other tables of all target images."""

    labels_N: Tensor
    """Labels; -1 leaves an image out of the batches."""
    tables: dict[str, Tensor] = field(default_factory=dict)
    """Tables by name with a row per target image; a batch gets those of its target rows."""


class AdaptationMethod(nn.Module, ABC):
    """A method: its sub-modules are trained, saved and resumed with the network.

    State that is not trained (centroids) belongs in buffers. Their shapes must not depend on the
    number of images, which is unknown when a model is loaded.
    """

    summary: ClassVar[str]
    adapts: ClassVar[bool] = True
    """False if training ends with pretraining."""
    uses_split: ClassVar[bool] = True
    """False if `loss_terms` treats source and target rows alike, in any proportion."""
    batches: ClassVar[Literal["balanced", "plain"]] = "balanced"
    """The batches of adaptation with `training.batches auto`. Use plain if the loss compares target
    rows with source rows: rows drawn evenly by pseudo-label follow the present predictions, errors
    included, so that nothing is left to align."""
    labels_whole_target: ClassVar[bool] = False
    """True if `label_target` labels all target images in every cycle."""
    surveys_source: ClassVar[bool] = False
    """True if `label_target` also needs the centres of the source's classes."""
    views_per_image: ClassVar[int] = 1
    """Set to 2 if adaptation needs two views of every image."""
    ramps: ClassVar[bool] = False
    """True if losses grow with `Batch.progress`, so that labels may change after they settled."""
    source_free: ClassVar[bool] = False
    """True if only pretraining trains on source labels."""
    closed_form: ClassVar[bool] = False
    """True if one call of `fit_features` replaces all cycles. It gets the features of the
    pretrained weights, which are not trained further or, without pretrained weights, of the
    network after pretraining."""
    keeps_source_shares: ClassVar[bool] = False
    """True if a fit in closed form gives posteriors for the class shares of the source rows."""
    weighted: ClassVar[dict[str, str]] = {}
    """Maps the name of a term to the setting that weighs it. Other terms weigh 1."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        """Settings of the method, given as `method.<field>`."""

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__()
        self.network = network
        self.config = config
        self.prior_shift_C: Tensor | None
        self.register_buffer("prior_shift_C", None)
        """A shift that is added to the logits of every decision; None without a target prior."""
        self.target_shares_C: Tensor | None = None
        """In training, the shares of the target's classes; None if they are unknown."""
        self.teacher: Teacher | None = None
        """A teacher labels, predicts and is delivered in place of the trained weights."""

    @property
    def stages(self) -> int:
        """The number of trainings in a row, with `training.cycles` each.

        Each one starts from the pretrained weights, with labels and tables of the training before
        it; `Batch.progress` and the learning rate restart.
        """
        return 1

    @abstractmethod
    def loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        """Return scalars by the names they are logged under; their weighted sum is minimised.

        A batch, or a process's share of one, may lack rows of a domain or of a class. Return the
        same terms then, all finite (`mean_cross_entropy` is 0 without rows).
        """

    @property
    def term_weights(self) -> dict[str, float]:
        """Weights of the terms, if not 1."""
        return {term: getattr(self.config, name) for term, name in self.weighted.items()}

    def loss(self, terms: dict[str, Tensor]) -> Tensor:
        weights = self.term_weights
        return torch.stack([weights.get(name, 1.0) * term for name, term in terms.items()]).sum()

    @property
    def sam_radius(self) -> float:
        """The radius of sharpness-aware minimisation (SAM) in adaptation; 0 for ordinary steps.

        The gradients of a step are then those at weights moved by this length along the gradient
        of `sam_loss`, so that a step evaluates `loss_terms` twice.
        """
        return 0.0

    def sam_loss(self, terms: dict[str, Tensor]) -> Tensor:
        """Return the part of the loss whose sharpness counts; by default all of it."""
        return self.loss(terms)

    def rate_of(self, weight: str) -> float:
        """Return a weight's learning rate relative to the run's, by the name of the parameter."""
        return 1.0

    def logits(self, features_ND: Tensor, drop: Drop | None = None) -> Tensor:
        """Return the logits of the model alone, as trained. `drop`: dropout for MC-dropout."""
        logits: Tensor = self.network.classifier(features_ND, drop)
        return logits

    def decide(self, features_ND: Tensor, drop: Drop | None = None) -> Tensor:
        """Return the logits for labels and predictions: the posterior under the target prior."""
        logits_NC = self.logits(features_ND, drop)
        shift_C = self.prior_shift_C
        return logits_NC if shift_C is None else logits_NC + shift_C

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *others: Any
    ) -> None:
        found = state_dict.get(f"{prefix}prior_shift_C")
        if found is None:
            self.prior_shift_C = None
        elif self.prior_shift_C is None:
            place = next(self.parameters()).device
            self.prior_shift_C = torch.empty_like(found, device=place)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def label_target(self, survey: Survey) -> Labelled:
        """Pseudo-label all target images, for a method that `labels_whole_target`.

        This runs between steps, so it may use more than tensors. It may set buffers, except for a
        new stage, which starts from the pretrained model's: put what it needs into tables.
        """
        return Labelled(survey.probabilities_NC.argmax(dim=1))

    def fit_features(self, source_SD: Tensor, labels_S: Tensor, target_TD: Tensor) -> None:
        """Fit a method in closed form to the features of all images, on the CPU."""
        raise NotImplementedError

    def sigma(self, features_ND: Tensor) -> Tensor | None:
        """Return the certainty of each image, if the method has one."""
        return None
