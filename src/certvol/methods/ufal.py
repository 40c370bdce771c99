"""UFAL (Ringwald and Stiefelhagen, "Unsupervised Domain Adaptation by Uncertain Feature Alignment",
BMVC 2020): target features are pulled towards class means, by soft labels of MC-dropout.

Implemented: before each cycle, MC-dropout over the whole target gives soft labels q. Probabilities
up to `floor` count as nothing, and an image is left out (uncertainty-based filtering) if its C/4
largest sum to no more than half. Class means are those of target features with a class drawn from
q, `mean_draws` times per cycle; every step uses one of these sets. Loss: cross-entropy, smoothed on
the source, + `alignment_weight` * cross-entropy between q and the softmax over minus the squared
distances from the means. `double_softmax` takes the softmax of that softmax, as the published code
does. The loss is then bounded, while the paper's form grows with the squared scale of the features;
but with a large scale it is nearly idle (on Inception-v3's features its gradient is a tenth of the
cross-entropy's).
Deliberate differences: classifier, dropout and batches are the common ones (published: one linear
layer, `model.classifier_layers 1`; dropout 0.75; batches of 10 classes with 12 + 12 images, the
target's from three ranges of certainty). Sets of means are drawn at the beginning of a cycle
(published: every 5 steps). The schedule is the common one (published: 2.5e-4, a tenth of it after
two thirds of the cycles).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from certvol.methods import _losses as losses
from certvol.methods._base import AdaptationMethod, Batch, Labelled, Survey
from certvol.methods._clusters import class_sums
from certvol.nn.heads import mc_dropout
from certvol.nn.network import Network
from certvol.settings import setting

NOTHING = 1e-5  # what a probability up to the floor becomes


def filtered(q_NC: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Return soft labels of sum 1 without values up to `floor`, and whether to keep each row."""
    q_NC = q_NC.where(q_NC > floor, q_NC.new_tensor(NOTHING))
    top = max(1, q_NC.shape[1] // 4)
    kept_N = q_NC.topk(top, dim=1).values.sum(dim=1) > 0.5
    return q_NC / q_NC.sum(dim=1, keepdim=True), kept_N


def feature_alignment(
    features_ND: Tensor, means_CD: Tensor, q_NC: Tensor, double_softmax: bool
) -> Tensor:
    """Return each image's cross-entropy of q and softmax(-|f - m|^2), or the softmax of that."""
    with torch.autocast(features_ND.device.type, enabled=False):
        scores_NC = -losses.squared_distances(features_ND.float(), means_CD.float())
        if double_softmax:
            scores_NC = scores_NC.softmax(dim=1)
        return -(q_NC * scores_NC.log_softmax(dim=1)).sum(dim=1)


class Method(AdaptationMethod):
    summary = "UFAL: pull target features to class means, by soft labels from MC-dropout"
    labels_whole_target = True
    weighted: ClassVar[dict[str, str]] = {"alignment": "alignment_weight"}

    @dataclass(frozen=True, kw_only=True)
    class Config:
        passes: int = setting(20, above=0, at_most=1000, help="Passes of MC-dropout.")
        drop: float = setting(0.85, at_least=0, below=1, help="Dropout rate of MC-dropout.")
        floor: float = setting(0.05, at_least=0, below=1, help="Drop soft labels up to this value.")
        mean_draws: int = setting(
            10, above=0, at_most=1000, help="Sets of class means drawn per cycle."
        )
        label_smoothing: float = setting(
            0.2, at_least=0, below=1, help="Smoothing of source labels."
        )
        alignment_weight: float = setting(1.0, at_least=0, help="Weight of the alignment loss.")
        double_softmax: bool = setting(
            True, help="Apply softmax twice in the alignment loss, as the published code does."
        )

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__(network, config)
        self.class_means_RCD: Tensor
        shape = (config.mean_draws, network.num_classes, network.dim)
        self.register_buffer("class_means_RCD", torch.zeros(shape))

    def label_target(self, survey: Survey) -> Labelled:
        passes, rate = self.config.passes, self.config.drop
        mean_NC, _ = mc_dropout(self.logits, survey.features_ND, passes, rate, survey.seed())
        q_NC, kept_N = filtered(mean_NC, self.config.floor)
        labels_N = survey.probabilities_NC.argmax(dim=1)
        for number in range(self.config.mean_draws):
            noise_NC = torch.empty_like(q_NC).exponential_(generator=survey.generator)
            drawn_N = (q_NC / noise_NC.clamp(min=1e-30)).argmax(dim=1)  # a class with probability q
            means_CD = self._means(survey.features_ND, drawn_N, labels_N, kept_N)
            self.class_means_RCD[number].copy_(means_CD)
        return Labelled(labels_N.where(kept_N, -1), {"soft_labels": q_NC})

    def _means(
        self, features_ND: Tensor, drawn_N: Tensor, labels_N: Tensor, kept_N: Tensor
    ) -> Tensor:
        """Average the images that drew a class; else those pseudo-labelled so; else all images."""
        means_CD = features_ND.mean(dim=0).expand(self.network.num_classes, -1)
        kept_N1 = kept_N[:, None].to(features_ND.dtype)
        for chosen_N, weight_N1 in ((labels_N, torch.ones_like(kept_N1)), (drawn_N, kept_N1)):
            sums_CD = class_sums(features_ND * weight_N1, chosen_N, len(means_CD))
            counts_C1 = class_sums(weight_N1, chosen_N, len(means_CD))
            means_CD = torch.where(counts_C1 > 0, sums_CD / counts_C1.clamp(min=1), means_CD)
        return means_CD

    def loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        config, split = self.config, batch.num_source
        features_ND = self.network.features(batch.inputs)
        source_NC, target_NC = self.network.classifier(features_ND).tensor_split([split])
        source_N, target_N = batch.labels_N.tensor_split([split])
        smoothed_N = losses.smoothed_cross_entropy(source_NC, source_N, config.label_smoothing)
        plain_N = losses.cross_entropy(target_NC, target_N)
        terms = {"ce": torch.cat([smoothed_N, plain_N]).mean()}
        if batch.adapting:
            device, soft_NC = features_ND.device, batch.tables["soft_labels"]
            draw = torch.randint(config.mean_draws, (1,), generator=batch.generator, device=device)
            means_CD = self.class_means_RCD.index_select(0, draw)[0]
            target_ND = features_ND[split:]
            aligned_N = feature_alignment(target_ND, means_CD, soft_NC, config.double_softmax)
            terms["alignment"] = losses.mean_or_zero(aligned_N)
        return terms
