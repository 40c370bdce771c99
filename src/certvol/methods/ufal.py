"""UFAL (Ringwald and Stiefelhagen, "Unsupervised Domain Adaptation by Uncertain Feature Alignment", BMVC 2020): target
features are pulled towards class means, by soft labels of MC-dropout.

Implemented: before each cycle, MC-dropout over the whole target gives soft labels q; probabilities up to `floor` count
as nothing, and an image is left out (uncertainty-based filtering) where its C/4 largest hold no more than half. Class
means are those of target features with a class drawn from q, `mean_draws` times per cycle; every step uses one of these
sets. Loss: cross-entropy, smoothed on the source, + `alignment_weight` * cross-entropy between q and the softmax over
minus the squared distances from the means. `double_softmax` takes the softmax of that softmax, which is what the
published code does: the loss is then bounded, where the paper's form grows with the squared scale of the features; and where
that scale is large it is nearly idle (on Inception-v3's features its gradient is a tenth of the cross-entropy's).
Deliberate differences: the common classifier, dropout and batches (published: one linear layer,
`model.classifier_layers 1`; dropout 0.75; batches of 10 classes with 12 + 12 images, the target's from three ranges of
certainty); sets of means drawn at the beginning of a cycle, instead of anew every 5 steps; the common schedule
(published: 2.5e-4, a tenth of it after two thirds of the cycles).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from certvol.bounds import bounded
from certvol.clusters import class_sums
from certvol.losses import cross_entropy, mean_or_zero, smoothed_cross_entropy, squared_distances
from certvol.methods.protocol import AdaptationMethod, Batch, Labelled, Survey
from certvol.nn.network import Network

NOTHING = 1e-5  # what a probability up to the floor becomes


def filtered(q_NC: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """(soft labels without what is at most `floor`, sum 1; whether the image is kept)."""
    q_NC = q_NC.where(q_NC > floor, q_NC.new_tensor(NOTHING))
    top = max(1, q_NC.shape[1] // 4)
    kept_N = q_NC.topk(top, dim=1).values.sum(dim=1) > 0.5
    return q_NC / q_NC.sum(dim=1, keepdim=True), kept_N


def feature_alignment(features_ND: Tensor, means_CD: Tensor, q_NC: Tensor, double_softmax: bool) -> Tensor:
    """One value per image: cross-entropy between q and softmax(-|f - m|^2), or the softmax of that."""
    with torch.autocast(features_ND.device.type, enabled=False):
        scores_NC = -squared_distances(features_ND.float(), means_CD.float())
        if double_softmax:
            scores_NC = scores_NC.softmax(dim=1)
        return -(q_NC * scores_NC.log_softmax(dim=1)).sum(dim=1)


class Method(AdaptationMethod):
    summary = "UFAL: target features pulled to class means, by soft labels of MC-dropout"
    labels_whole_target = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        passes: int = bounded(20, above=0)
        drop: float = bounded(0.85, least=0, below=1)  # of MC-dropout
        floor: float = bounded(0.05, least=0, below=1)
        mean_draws: int = bounded(10, above=0)
        label_smoothing: float = bounded(0.2, least=0, below=1)  # on the source
        alignment_weight: float = bounded(1.0, least=0)
        double_softmax: bool = True

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__(network, config)
        self.class_means_RCD: Tensor
        shape = (config.mean_draws, network.num_classes, network.info.dim)
        self.register_buffer("class_means_RCD", torch.zeros(shape))

    @property
    def term_weights(self) -> dict[str, float]:
        return {"alignment": self.config.alignment_weight}

    def label_target(self, survey: Survey) -> Labelled:
        mean_NC, _ = self.mc_dropout_moments(survey.features_ND, self.config.passes, self.config.drop, survey.generator)
        q_NC, kept_N = filtered(mean_NC, self.config.floor)
        labels_N = survey.probabilities_NC.argmax(dim=1)
        for number in range(self.config.mean_draws):
            noise_NC = torch.empty_like(q_NC).exponential_(generator=survey.generator)
            drawn_N = (q_NC / noise_NC.clamp(min=1e-30)).argmax(dim=1)  # a class with probability q
            means_CD = self._means(survey.features_ND, drawn_N, labels_N, kept_N)
            self.class_means_RCD[number].copy_(means_CD)
        return Labelled(labels_N.where(kept_N, -1), {"soft_labels": q_NC})

    def _means(self, features_ND: Tensor, drawn_N: Tensor, labels_N: Tensor, kept_N: Tensor) -> Tensor:
        """Of the drawn classes; for a class not drawn, of its pseudo-labels; for one without these, of all images."""
        means_CD = features_ND.mean(dim=0).expand(self.network.num_classes, -1)
        kept_N1 = kept_N[:, None].to(features_ND.dtype)
        for chosen_N, weight_N1 in ((labels_N, torch.ones_like(kept_N1)), (drawn_N, kept_N1)):
            sums_CD = class_sums(features_ND * weight_N1, chosen_N, len(means_CD))
            counts_C1 = class_sums(weight_N1, chosen_N, len(means_CD))
            means_CD = torch.where(counts_C1 > 0, sums_CD / counts_C1.clamp(min=1), means_CD)
        return means_CD

    def loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        features_ND = self.network.features(batch.images_NCHW)
        logits_NC = self.network.classifier(features_ND)
        split, labels_N = batch.num_source, batch.labels_N
        ce_N = torch.cat(
            [
                smoothed_cross_entropy(logits_NC[:split], labels_N[:split], self.config.label_smoothing),
                cross_entropy(logits_NC[split:], labels_N[split:]),
            ]
        )
        terms = {"ce": ce_N.mean()}
        if batch.adapting:
            draw = torch.randint(self.config.mean_draws, (1,), generator=batch.generator, device=features_ND.device)
            means_CD = self.class_means_RCD.index_select(0, draw)[0]
            aligned_N = feature_alignment(
                features_ND[split:], means_CD, batch.tables["soft_labels"], self.config.double_softmax
            )
            terms["alignment"] = mean_or_zero(aligned_N)
        return terms
