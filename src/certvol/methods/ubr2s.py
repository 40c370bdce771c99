"""UBR2S (Ringwald and Stiefelhagen, "UBR2S: Uncertainty-Based Resampling and Reweighting Strategy",
BMVC 2021).

Implemented: before each cycle, MC-dropout over the whole target gives a mean m and a deviation s
per image and class; argmax m is the image's pseudo-label. In a step each target image draws r = m +
s * noise, limited to 0..1, and a label c with probability r / sum r; its cross-entropy counts by (1
- DE) * SL, scaled to mean 1 over the batch. SL = 1 - |r_c - m_c| / (2 s_c), limited to 0..1, falls
when the draw is far from the mean; DE is the largest probability, over the other classes k, that a
draw of k exceeds r_c. Source images count 1, with smoothed labels.
Deliberate differences: r is drawn in each step (published: every 10 steps; an image seldom comes
twice in these). Weights are scaled over the target rows of the batch. Batches are the common ones
(published: 12 classes with 10 + 10 images, the target's from three ranges of certainty). Published:
`training.label_view augmented`, 25 cycles, constant learning rates.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from certvol.methods._base import AdaptationMethod, Batch, Labelled, Survey
from certvol.methods._losses import cross_entropy, smoothed_cross_entropy
from certvol.nn.heads import mc_dropout
from certvol.settings import setting

LEAST_DEVIATION = 1e-6


def resampled(mean_NC: Tensor, deviation_NC: Tensor, noise_N3C: Tensor) -> tuple[Tensor, Tensor]:
    """Return r and a label drawn with probability r / sum r.

    `noise_N3C` is normal; half the sum of two of its squares is exponential.
    """
    r_NC = (mean_NC + deviation_NC * noise_N3C[:, 0]).clamp(0, 1)
    waiting_NC = 0.5 * (noise_N3C[:, 1].square() + noise_N3C[:, 2].square())
    return r_NC, (r_NC / waiting_NC.clamp(min=1e-12)).argmax(dim=1)


def draw_weights(r_NC: Tensor, labels_N: Tensor, mean_NC: Tensor, deviation_NC: Tensor) -> Tensor:
    """Return (1 - DE) * SL of each draw, before scaling."""
    deviation_NC = deviation_NC.clamp(min=LEAST_DEVIATION)
    column_N1 = labels_N[:, None]
    drawn_N1 = r_NC.gather(1, column_N1)
    away_N1 = (drawn_N1 - mean_NC.gather(1, column_N1)).abs()
    away_N1 = away_N1 / (2 * deviation_NC.gather(1, column_N1))
    near_N = (1 - away_N1.squeeze(1)).clamp(0, 1)  # SL
    # 1 - Phi((r_c - m_k) / s_k)
    exceeds_NC = torch.special.ndtr((mean_NC - drawn_N1) / deviation_NC)
    exceeds_N = exceeds_NC.scatter(1, column_N1, 0.0).amax(dim=1)  # DE
    weights_N: Tensor = (1 - exceeds_N) * near_N
    return weights_N


class Method(AdaptationMethod):
    summary = (
        "UBR2S: draw target labels from MC-dropout's distribution, and weight them by reliability"
    )
    labels_whole_target = True

    @dataclass(frozen=True, kw_only=True)
    class Config:
        passes: int = setting(50, above=0, at_most=1000, help="Passes of MC-dropout.")
        drop: float = setting(0.75, at_least=0, below=1, help="Dropout rate of MC-dropout.")
        label_smoothing: float = setting(
            0.25, at_least=0, below=1, help="Smoothing of source labels."
        )

    def label_target(self, survey: Survey) -> Labelled:
        passes, rate = self.config.passes, self.config.drop
        moments = mc_dropout(self.logits, survey.features_ND, passes, rate, survey.seed())
        mean_NC, deviation_NC = moments
        return Labelled(mean_NC.argmax(dim=1), {"mean": mean_NC, "deviation": deviation_NC})

    def loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        logits_NC = self.network.classifier(self.network.features(batch.inputs)).float()
        split, smoothing = batch.num_source, self.config.label_smoothing
        source_N = smoothed_cross_entropy(logits_NC[:split], batch.labels_N[:split], smoothing)
        if not batch.adapting:
            return {"ce": source_N.mean()}
        noise_N3C = batch.noise(logits_NC.detach(), 3)[split:]
        mean_NC, deviation_NC = batch.tables["mean"], batch.tables["deviation"]
        r_NC, labels_N = resampled(mean_NC, deviation_NC, noise_N3C)
        weights_N = draw_weights(r_NC, labels_N, mean_NC, deviation_NC)
        weights_N = weights_N * len(weights_N) / weights_N.sum().clamp(min=1e-6)
        target_N = weights_N * cross_entropy(logits_NC[split:], labels_N)
        return {"ce": torch.cat([source_N, target_N]).mean()}
