"""RSDA-DANN (Gu, Sun and Xu, "Spherical Space Domain Adaptation with Robust Pseudo-label Loss", CVPR 2020), on DANN.

Implemented: features on a sphere of radius `radius` behind a bottleneck, a spherical classifier in the place of the
common one, a spherical domain discriminator behind gradient reversal. Adaptation is 1 + `rounds` trainings. The first
minimises cross-entropy on the source + the adversarial loss. Each further one starts from the pretrained weights again,
with pseudo-labels of the training before it and a weight g for each: the posterior, in a Gaussian-uniform mixture of
the angles to the class's mean, that the image is no outlier; below 0.5 it is 0. It adds sum(g (1 - p_label)) / sum(g)
on the target and `entropy_weight` * ramp * the entropy of its predictions, whose gradient leaves the classifier's
weights alone.
Deliberate differences: each training starts from this run's model after pretraining on the source (published: from
ImageNet), and takes `training.cycles` with ramps and learning rate over them (published: 1001 to 5001 steps each), so
that a run costs 1 + `rounds` times as much as others; labels come from the last model of a training (published code: from
the best by target labels); the common optimiser, with one rate for all but the discriminator (published: ten times
higher for all but the backbone).
Published radius: 10 on Office-31, 20 on Office-Home, 8.5 on VisDA; entropy weight 1, or 0.1 on some tasks.
The mixture is the published one, the Gaussian's share at most 0.5. Of two published widths of the uniform it has that of its
moments, 2 sqrt(3 (C2 - C1^2)), not 2 sqrt(3 C2 - C1^2). Fewer than three images of a class all count.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from certvol.bounds import bounded
from certvol.clusters import class_sums, gaussian_uniform_posterior
from certvol.losses import domain_confusion, entropy, mean_cross_entropy, mean_or_zero, ramp
from certvol.methods.protocol import AdaptationMethod, Batch, Labelled, Survey
from certvol.nn.adversary import reverse_gradient
from certvol.nn.network import Network
from certvol.nn.sphere import SphericalClassifier, SphericalDiscriminator, unit


def robust_loss(probabilities_NC: Tensor, labels_N: Tensor, weights_N: Tensor) -> Tensor:
    """Weighted mean of 1 - p_label; 0 where all weights are."""
    wrong_N = 1 - probabilities_NC.gather(1, labels_N[:, None]).squeeze(1)
    return (weights_N * wrong_N).sum() / weights_N.sum().clamp(min=1e-6)


def pseudo_label_weights(embedded_ND: Tensor, labels_N: Tensor, num_classes: int) -> Tensor:
    """g of each image, among those of its label."""
    units_ND = unit(embedded_ND)
    centres_CD = unit(class_sums(units_ND, labels_N, num_classes))
    angles_N = (units_ND * centres_CD[labels_N]).sum(dim=1).clamp(-1, 1).acos()
    weights_N = torch.zeros_like(angles_N)
    for label in range(num_classes):
        members = torch.nonzero(labels_N == label).squeeze(1)
        if len(members) > 0:
            weights_N[members] = gaussian_uniform_posterior(angles_N[members])
    return weights_N.where(weights_N >= 0.5, 0.0)


class Method(AdaptationMethod):
    summary = "RSDA on DANN: adversarial training on a sphere, in rounds with robust pseudo-labels"
    batches = "plain"
    labels_whole_target = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        radius: float = bounded(10.0, above=0)
        width: int = bounded(256, above=0)  # of the bottleneck
        rounds: int = bounded(5, least=0)  # of training with pseudo-labels, after one without
        adversarial_weight: float = bounded(1.0, least=0)
        discriminator_rate: float = bounded(10.0, above=0)  # its learning rate, over that of the others
        entropy_weight: float = bounded(1.0, least=0)

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__(network, config)
        head = SphericalClassifier(network.info.dim, network.num_classes, config.radius, config.width)
        network.classifier = head  # type: ignore[assignment]
        self.discriminator = SphericalDiscriminator(config.width, config.radius)

    @property
    def head(self) -> SphericalClassifier:
        return cast(SphericalClassifier, self.network.classifier)

    @property
    def stages(self) -> int:
        return 1 + int(self.config.rounds)

    @property
    def term_weights(self) -> dict[str, float]:
        return {"adversarial": self.config.adversarial_weight, "entropy": self.config.entropy_weight}

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
        z_ND = self.head.embed(self.network.features(batch.images_NCHW))
        logits_NC = self.head.classify(z_ND)
        split, labels_N = batch.num_source, batch.labels_N
        terms = {"ce": mean_cross_entropy(logits_NC[:split], labels_N[:split])}
        if batch.adapting:
            rising = ramp(batch.progress)
            domains_N = self.discriminator(reverse_gradient(z_ND, rising))
            terms["adversarial"] = domain_confusion(domains_N, split)
            p_NC = logits_NC[split:].softmax(dim=1)
            terms["pseudo_labels"] = robust_loss(p_NC, labels_N[split:], batch.tables["weights"])
            unsure_N = entropy(self.head.classify(z_ND[split:], frozen=True).softmax(dim=1))
            terms["entropy"] = rising * mean_or_zero(batch.tables["in_rounds"] * unsure_N)
            terms |= self.further_terms(batch, z_ND, logits_NC, rising)
        return terms

    def further_terms(self, batch: Batch, z_ND: Tensor, logits_NC: Tensor, rising: Tensor) -> dict[str, Tensor]:
        """Of a method that builds on this one."""
        return {}
