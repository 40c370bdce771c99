"""Class-balanced self-training with a Renyi entropy (Han et al., "Unsupervised Domain Adaptation
via Calibrating Uncertainties", CVPR workshops 2019, arXiv 1907.11202).

Implemented: a linear layer beside the classifier gives each logit a variance; probabilities are the
mean softmax over `samples` draws of Gaussian logits. Cross-entropy on the source + `weight` * an
entropy of the target's probabilities: of order 1 (`shannon`), 2 (`collision`), or infinity (`min`,
the cross-entropy to pseudo-labels). Before each cycle, the classes get thresholds: the confidence
that a `portion` of the images predicted as the class reaches. An image is labelled with the class
whose probability is largest relative to its threshold, and takes part if it reaches it. The portion
grows from cycle to cycle.
Deliberate differences: predictions use fixed draws, so that they repeat. The published rounds also
choose source images (a portion of 0.5 to 0.8); here all take part. At least one image of each
predicted class takes part, and one at the threshold does too. Source and target share each step
(published: a pass over each in turn), and means and variances come from the common classifier and
one linear layer (published: two layers with 512 hidden units each). The variance that the paper
has in hidden layers too (dropout in every block) and its penalty on the variance of gradients are
left out; published draws are 10 on digits and 1 with ResNets, and the schedule is the common one
(published: a tenth every 7 epochs).
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from certvol.methods._base import AdaptationMethod, Batch, Labelled, Survey
from certvol.methods._losses import mean_or_zero
from certvol.nn.heads import Drop
from certvol.nn.network import Network
from certvol.settings import setting

TEST_DRAWS = 10  # as published
LARGEST_LOG_VARIANCE = 10.0  # either way: deviations of 0.007 to 148


def log_mean_softmax(mean_NC: Tensor, log_variance_NC: Tensor, noise_NMC: Tensor) -> Tensor:
    """Return the log of the mean softmax of mean + noise * deviation over M draws, N x C."""
    with torch.autocast(mean_NC.device.type, enabled=False):
        log_variance_NC = log_variance_NC.float()
        limit = LARGEST_LOG_VARIANCE
        deviation_NC = (log_variance_NC.clamp(-limit, limit) / 2).exp()
        logits_NMC = mean_NC.float()[:, None] + deviation_NC[:, None] * noise_NMC.float()
        draws = noise_NMC.shape[1]
        return logits_NMC.log_softmax(dim=2).logsumexp(dim=1) - math.log(draws)


def renyi_entropy(log_p_NC: Tensor, order: int) -> Tensor:
    """Return log(sum p^order) / (1 - order) of each row; Shannon's entropy for order 1."""
    if order == 1:
        return -(log_p_NC.exp() * log_p_NC).sum(dim=1)
    return (order * log_p_NC).logsumexp(dim=1) / (1 - order)


def balanced_labels(probabilities_NC: Tensor, portion: float) -> Tensor:
    """Label rows by p_c over the threshold of c; -1 for a row that reaches none.

    A threshold is the confidence that a portion of the rows predicted as c reaches, and of one at
    least; 1 for a class without such rows.
    """
    sure_N, guess_N = probabilities_NC.max(dim=1)
    by_sureness_N = sure_N.argsort(descending=True, stable=True)
    by_class_N = by_sureness_N[guess_N[by_sureness_N].argsort(stable=True)]
    count_C = torch.bincount(guess_N, minlength=probabilities_NC.shape[1])
    rank_C = (count_C * portion).floor().long().clamp(min=1) - 1
    place_C = (count_C.cumsum(0) - count_C + rank_C).clamp(max=len(guess_N) - 1)
    threshold_C = torch.where(count_C > 0, sure_N[by_class_N[place_C]], 1.0)
    best_N, labels_N = (probabilities_NC / threshold_C).max(dim=1)
    return labels_N.where(best_N >= 1, -1)


class Method(AdaptationMethod):
    summary = "Renyi: class-balanced self-training, and an entropy loss on Gaussian logits"
    batches = "plain"
    labels_whole_target = True
    draws_1MC: Tensor
    weighted: ClassVar[dict[str, str]] = {"entropy": "weight"}

    @dataclass(frozen=True, kw_only=True)
    class Config:
        entropy: Literal["min", "collision", "shannon"] = setting(
            "min",
            help="Order of the target's entropy: min (pseudo-labels), collision 2, shannon 1.",
        )
        weight: float = setting(1.0, at_least=0, help="Weight of the target's entropy.")
        samples: int = setting(10, above=0, at_most=1000, help="Draws of the logits in training.")
        portion: float = setting(
            0.3, above=0, at_most=1, help="Portion of each class's images in the first cycle."
        )
        portion_growth: float = setting(0.05, at_least=0, help="Growth of the portion per cycle.")
        most_portion: float = setting(0.6, above=0, at_most=1, help="Largest portion.")

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__(network, config)
        self.log_variance = nn.Linear(network.dim, network.num_classes)
        self.register_buffer("draws_1MC", torch.randn(1, TEST_DRAWS, network.num_classes))

    def logits(self, features_ND: Tensor, drop: Drop | None = None) -> Tensor:
        mean_NC = self.network.classifier(features_ND, drop)
        return log_mean_softmax(mean_NC, self.log_variance(features_ND), self.draws_1MC)

    def label_target(self, survey: Survey) -> Labelled:
        config = self.config
        grown = config.portion + config.portion_growth * survey.cycle
        portion = min(grown, max(config.portion, config.most_portion))
        return Labelled(balanced_labels(survey.probabilities_NC, portion))

    def loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        features_ND, split = self.network.features(batch.inputs), batch.num_source
        mean_NC = self.network.classifier(features_ND)
        noise_NMC = batch.noise(mean_NC.detach().float(), self.config.samples)
        log_p_NC = log_mean_softmax(mean_NC, self.log_variance(features_ND), noise_NMC)
        own_N = -log_p_NC.gather(1, batch.labels_N[:, None]).squeeze(1)
        terms = {"ce": mean_or_zero(own_N[:split])}
        if batch.adapting:
            if self.config.entropy == "min":
                unsure_T = own_N[split:]
            else:
                order = 1 if self.config.entropy == "shannon" else 2
                unsure_T = renyi_entropy(log_p_NC[split:], order)
            terms["entropy"] = mean_or_zero(unsure_T)
        return terms
