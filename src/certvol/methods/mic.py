"""Masked Image Consistency, MIC (Hoyer et al., CVPR 2023): target images with masked blocks are
classified as a teacher classifies the whole ones; on SDAT.

Implemented: the terms of `sdat` + `consistency_weight` * q * cross-entropy of the masked target
rows to the teacher's labels, which is part of the task loss that SAM climbs. Each of `blocks` x
`blocks` equal parts of an image is 0, which is the mean colour, with probability `masked`. The
teacher, an average of the student's weights, sees the whole images without dropout; q is its
highest probability. It labels and is delivered.
Deliberate differences: those of `sdat`, `entropy` included. Under a target prior, the teacher's
labels and q are those of the posterior under it. Masked images get no further jitter or blur, as
views here are augmented already. The teacher begins at the pretrained weights with its final decay
(published: min(1 - 1/(t + 1), 0.9)), and it is what is delivered (published: the student). The two
evaluations of a SAM step draw masks of their own (published: the same), and q counts in both
(published code: in the first alone). Features of a frozen backbone have no blocks: each dimension
is masked by itself, which is ours.
Published: 64-pixel blocks of 224 pixels, 70 % masked; q is 1 with ResNet-101.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from certvol.methods import sdat
from certvol.methods._base import Batch
from certvol.methods._losses import cross_entropy, mean_or_zero
from certvol.nn.network import Network
from certvol.nn.teacher import Teacher
from certvol.settings import setting


def masked_inputs(batch: Batch, blocks: int, rate: float) -> Tensor:
    """Return the batch's target rows with masked blocks, or dimensions if they are features."""
    inputs, split = batch.inputs, batch.num_source
    if inputs.ndim == 2:
        return (inputs * batch.dropout_masks(inputs, 1, rate)[:, 0])[split:]
    height, width = inputs.shape[2:]
    blocks = min(blocks, height, width)
    parts_NP = inputs[:, 0].flatten(1)[:, : blocks * blocks]
    masks_NP = batch.dropout_masks(parts_NP, 1, rate)
    masks_N1BB = masks_NP.reshape(-1, 1, blocks, blocks)
    return (inputs * F.interpolate(masks_N1BB, (height, width)))[split:]


class Method(sdat.Method):
    summary = (
        "MIC: SDAT, and masked target images must be classified as a teacher classifies whole ones"
    )
    weighted: ClassVar[dict[str, str]] = {
        **sdat.Method.weighted,
        "consistency": "consistency_weight",
    }

    @dataclass(frozen=True, kw_only=True)
    class Config(sdat.Method.Config):
        consistency_weight: float = setting(1.0, at_least=0, help="Weight of the consistency.")
        masked: float = setting(0.7, at_least=0, below=1, help="Share of blocks that are masked.")
        blocks: int = setting(4, above=0, at_most=1024, help="Blocks along each side of an image.")
        certain: bool = setting(
            True, help="Weight rows by the teacher's probability; published for ResNet-101: false."
        )
        teacher_decay: float = setting(
            0.9,
            at_least=0,
            below=1,
            help="Decay per step of the average of weights that is the teacher.",
        )

    def __init__(self, network: Network, config: Any) -> None:
        super().__init__(network, config)
        self.teacher: Teacher = Teacher(self, network, config.teacher_decay)

    def _taught(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the teacher's labels of the target rows, and its probabilities of these."""
        with self.teacher.in_charge(), self.network.rows_of(num_source=0):
            features_TD = self.network.features(batch.inputs[batch.num_source :])
            logits_TC = self.decide(features_TD, nn.Identity())
        sure_T, labels_T = logits_TC.float().softmax(dim=1).max(dim=1)
        return labels_T, sure_T

    def loss_terms(self, batch: Batch) -> dict[str, Tensor]:
        has_target = batch.adapting and batch.num_source < len(batch.labels_N)
        # Before the student's passes, whose gradients need the student's own weights.
        taught = self._taught(batch) if has_target else None
        terms = super().loss_terms(batch)
        if taught is not None:
            labels_T, sure_T = taught
            masked = masked_inputs(batch, self.config.blocks, self.config.masked)
            with self.network.rows_of(num_source=0):
                logits_TC = self.network.classifier(self.network.features(masked))
            ce_T = cross_entropy(logits_TC, labels_T)
            terms["consistency"] = mean_or_zero(sure_T * ce_T if self.config.certain else ce_T)
        elif batch.adapting:
            terms["consistency"] = 0.0 * terms["ce"]
        return terms
