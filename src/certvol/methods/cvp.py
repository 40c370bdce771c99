"""Certainty Volume Prediction (Ringwald and Stiefelhagen, BMVC 2021).

A Gaussian of predicted width sigma surrounds every feature. Its samples must keep the feature's
class, which shrinks sigma. An antagonistic loss pulls sigma towards a target that grows as the
samples are classified better, which widens it.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from certvol.methods._base import AdaptationMethod, Batch
from certvol.methods._losses import antagonistic, cross_entropy, samples_cross_entropy
from certvol.nn.heads import SigmaHead, sample_features, sample_logits
from certvol.nn.network import Network
from certvol.settings import setting


class Method(AdaptationMethod):
    summary = "Certainty Volume Prediction: a Gaussian of predicted width around every feature"
    uses_split = False
    weighted: ClassVar[dict[str, str]] = {"samples_ce": "samples_weight"}

    @dataclass(frozen=True, kw_only=True)
    class Config:
        num_samples: int = setting(
            64, above=0, at_most=2**16, help="M, the samples drawn around each feature."
        )
        samples_weight: float = setting(
            0.5,
            at_least=0,
            help="Alpha, the weight of the samples' loss; 0: samples only set sigma's target.",
        )
        samples_width: float = setting(
            1.0,
            above=0,
            help="Width of the samples in sigmas; raise it if features are much larger than "
            "sigma, whose target is at most log C.",
        )
        antagonistic: bool = setting(
            True, help="Train sigma by the antagonistic loss; without it sigma collapses to 0."
        )

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__(network, config)
        self.sigma_head = SigmaHead(network.dim, network.small_width)

    def sigma(self, features_ND: Tensor) -> Tensor:
        sigma_N: Tensor = self.sigma_head(features_ND)
        return sigma_N

    def loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        config, labels_N = self.config, batch.labels_N
        mu_ND = self.network.features(batch.inputs)
        sigma_N = self.sigma(mu_ND)
        batch.logged["sigma"] = sigma_N.detach()
        terms = {"ce": cross_entropy(self.network.classifier(mu_ND), labels_N).mean()}
        with torch.set_grad_enabled(torch.is_grad_enabled() and config.samples_weight > 0):
            logits_NMC = self._samples_logits(mu_ND, sigma_N, batch)
            samples_ce_N = samples_cross_entropy(logits_NMC, labels_N)
        if config.samples_weight > 0:
            terms["samples_ce"] = samples_ce_N.mean()
        if config.antagonistic:
            loss_N = antagonistic(sigma_N, samples_ce_N, self.network.num_classes)
            terms["antagonistic"] = loss_N.mean()
        return terms

    def _samples_logits(self, mu_ND: Tensor, sigma_N: Tensor, batch: Batch) -> Tensor:
        """Return logits of samples, N x M x C; drawn directly if f_Cl is linear.

        Direct samples skip dropout, because they already are noise.
        """
        classifier, m = self.network.classifier, self.config.num_samples
        width_N = self.config.samples_width * sigma_N
        if classifier.fewer_logits_than_features:
            mean_NC = classifier.output(mu_ND)
            noise_NMC = batch.noise(mean_NC.float(), m)
            return sample_logits(mean_NC, width_N, classifier.output.weight, noise_NMC)
        logits_NMC: Tensor = classifier(sample_features(mu_ND, width_N, batch.noise(mu_ND, m)))
        return logits_NMC
