"""Certainty Volume Prediction (Ringwald and Stiefelhagen, BMVC 2021).

A Gaussian of predicted width sigma around every feature: its samples must keep the feature's class (which shrinks sigma), and
sigma is pulled towards a target that is the larger, the better the samples are classified (which widens it).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from certvol.bounds import bounded
from certvol.losses import antagonistic, cross_entropy, samples_cross_entropy
from certvol.methods.protocol import AdaptationMethod, Batch
from certvol.nn.heads import SigmaHead
from certvol.nn.network import Network
from certvol.nn.sampling import sample_features, sample_logits


class Method(AdaptationMethod):
    summary = "Certainty Volume Prediction: a Gaussian of predicted width around every feature"
    uses_split = False

    @dataclass(frozen=True, kw_only=True)
    class Config:
        num_samples: int = bounded(64, above=0)  # M
        samples_weight: float = bounded(0.5, least=0)  # alpha; 0: the samples only form sigma's target
        samples_width: float = bounded(1.0, above=0)  # in sigmas: sigma is at most log C, features are of any size
        antagonistic: bool = True  # L_Ant; without it sigma collapses to 0

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__(network, config)
        self.sigma_head = SigmaHead(network.info.dim, network.small_width)

    def sigma(self, features_ND: Tensor) -> Tensor:
        sigma: Tensor = self.sigma_head(features_ND)
        return sigma

    @property
    def term_weights(self) -> dict[str, float]:
        return {"samples_ce": self.config.samples_weight}

    def loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        mu_ND = self.network.features(batch.images_NCHW)
        sigma_N = self.sigma(mu_ND)
        batch.watched["sigma"] = sigma_N.detach()
        terms = {"ce": cross_entropy(self.network.classifier(mu_ND), batch.labels_N).mean()}
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.config.samples_weight > 0):
            samples_ce_N = samples_cross_entropy(self._samples_logits(mu_ND, sigma_N, batch), batch.labels_N)
        if self.config.samples_weight > 0:
            terms["samples_ce"] = samples_ce_N.mean()
        if self.config.antagonistic:
            terms["antagonistic"] = antagonistic(sigma_N, samples_ce_N, self.network.num_classes).mean()
        return terms

    def _samples_logits(self, mu_ND: Tensor, sigma_N: Tensor, batch: Batch) -> Tensor:
        """N x M x C. A linear f_Cl allows to draw them as logits, without dropout: the samples are noise enough."""
        classifier, m, width_N = self.network.classifier, self.config.num_samples, self.config.samples_width * sigma_N
        if classifier.fewer_logits_than_features:
            mean_NC = classifier.output(mu_ND)
            return sample_logits(mean_NC, width_N, classifier.output.weight, batch.noise(mean_NC.float(), m))
        logits_NMC: Tensor = classifier(sample_features(mu_ND, width_N, batch.noise(mu_ND, m)))
        return logits_NMC
