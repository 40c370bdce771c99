"""RSDA-DANN (Gu, Sun and Xu, "Spherical Space Domain Adaptation with Robust Pseudo-label Loss",
CVPR 2020), on DANN.

Implemented: features on a sphere of radius `radius` behind a bottleneck, a spherical classifier in
place of the common one, a spherical domain discriminator behind gradient reversal. Adaptation is 1
+ `rounds` trainings. The first minimises cross-entropy on the source + the adversarial loss. Each
further one starts from the pretrained weights again, with pseudo-labels of the training before it
and a weight g for each: the posterior that the image is an inlier, in a Gaussian-uniform mixture
of the angles to the class's mean; below 0.5 it is 0. It adds sum(g (1 - p_label)) / sum(g) on the
target and `entropy_weight` * ramp * the entropy of its predictions, whose gradient leaves the
classifier's weights alone.
Deliberate differences: each training starts from this run's model after pretraining on the source
(published: from ImageNet), and takes `training.cycles` with ramps and learning rate over them
(published: 1001 to 5001 steps each), so a run costs 1 + `rounds` times as much as others. Labels
come from the last model of a training (published code: from the best by target labels). The
optimiser is the common one, without momentum at the start of each training as published, but with
one rate for all but the discriminator (published: ten times higher for all but the backbone).
Published radius: 10 on Office-31, 20 on Office-Home, 8.5 on VisDA; entropy weight 1, or 0.1 on some
tasks. The mixture is the published one, the Gaussian's share at most 0.5. Of the two published
widths of the uniform it uses that of its moments, 2 sqrt(3 (C2 - C1^2)), not 2 sqrt(3 C2 - C1^2).
All images count if a class has fewer than three.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from certvol.methods._adversary import reverse_gradient
from certvol.methods._base import AdaptationMethod, Batch, Labelled, Survey
from certvol.methods._clusters import class_sums, gaussian_uniform_posterior
from certvol.methods._losses import domain_confusion, mean_cross_entropy, mean_or_zero, ramp
from certvol.methods._sphere import SphericalClassifier, SphericalDiscriminator, unit
from certvol.nn.network import Network
from certvol.scores.uncertainty import entropy
from certvol.settings import setting


def robust_loss(probabilities_NC: Tensor, labels_N: Tensor, weights_N: Tensor) -> Tensor:
    """Return the weighted mean of 1 - p_label; 0 if all weights are."""
    wrong_N = 1 - probabilities_NC.gather(1, labels_N[:, None]).squeeze(1)
    return (weights_N * wrong_N).sum() / weights_N.sum().clamp(min=1e-6)


def pseudo_label_weights(embedded_ND: Tensor, labels_N: Tensor, num_classes: int) -> Tensor:
    """Return g of each image, compared with the images of its label."""
    units_ND = unit(embedded_ND)
    centres_CD = unit(class_sums(units_ND, labels_N, num_classes))
    angles_N = (units_ND * centres_CD[labels_N]).sum(dim=1).clamp(-1, 1).acos()
    weights_N = torch.zeros_like(angles_N)
    for label in range(num_classes):
        members_N = labels_N == label
        weights_N[members_N] = gaussian_uniform_posterior(angles_N[members_N])
    return weights_N.where(weights_N >= 0.5, 0.0)


class Method(AdaptationMethod):
    summary = "RSDA on DANN: adversarial training on a sphere, in rounds with robust pseudo-labels"
    batches = "plain"
    labels_whole_target = True
    ramps = True
    weighted: ClassVar[dict[str, str]] = {
        "adversarial": "adversarial_weight",
        "entropy": "entropy_weight",
    }

    @dataclass(frozen=True, kw_only=True)
    class Config:
        radius: float = setting(10.0, above=0, help="Radius of the sphere that features lie on.")
        width: int = setting(256, above=0, at_most=2**16, help="Width of the bottleneck.")
        rounds: int = setting(
            5,
            at_least=0,
            at_most=10_000,
            help="Number of trainings with pseudo-labels, after a first one without.",
        )
        adversarial_weight: float = setting(1.0, at_least=0, help="Weight of the adversarial loss.")
        discriminator_rate: float = setting(
            10.0, above=0, help="Learning rate of the discriminator, relative to the other layers'."
        )
        entropy_weight: float = setting(1.0, at_least=0, help="Weight of the target's entropy.")

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__(network, config)
        dim, radius, width = network.dim, config.radius, config.width
        head = SphericalClassifier(dim, network.num_classes, radius, width)
        network.classifier = head  # type: ignore[assignment]
        self.discriminator = SphericalDiscriminator(width, radius)

    @property
    def head(self) -> SphericalClassifier:
        return cast(SphericalClassifier, self.network.classifier)

    @property
    def stages(self) -> int:
        return 1 + int(self.config.rounds)

    def rate_of(self, weight: str) -> float:
        return float(self.config.discriminator_rate) if weight.startswith("discriminator.") else 1.0

    def label_target(self, survey: Survey) -> Labelled:
        labels_N = survey.probabilities_NC.argmax(dim=1)
        weights_N = survey.probabilities_NC.new_zeros(len(labels_N))
        in_rounds_N = torch.full_like(weights_N, float(survey.stage > 0))
        if survey.stage > 0:
            embedded_ND = self.head.embed(survey.features_ND)
            weights_N = pseudo_label_weights(embedded_ND, labels_N, self.network.num_classes)
        return Labelled(labels_N, {"weights": weights_N, "in_rounds": in_rounds_N})

    def loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        z_ND = self.head.embed(self.network.features(batch.inputs))
        logits_NC = self.head.classify(z_ND)
        split = batch.num_source
        terms = {"ce": mean_cross_entropy(logits_NC[:split], batch.labels_N[:split])}
        return terms | self.adaptation_terms(batch, z_ND, logits_NC) if batch.adapting else terms

    def adaptation_terms(self, batch: Batch, z_ND: Tensor, logits_NC: Tensor) -> dict[str, Tensor]:
        rising, split = ramp(batch.progress), batch.num_source
        domains_N = self.discriminator(reverse_gradient(z_ND, rising))
        p_NC = logits_NC[split:].softmax(dim=1)
        unsure_N = entropy(self.head.classify(z_ND[split:], frozen=True).softmax(dim=1))
        return {
            "adversarial": domain_confusion(domains_N, split),
            "pseudo_labels": robust_loss(p_NC, batch.labels_N[split:], batch.tables["weights"]),
            "entropy": rising * mean_or_zero(batch.tables["in_rounds"] * unsure_N),
        }
