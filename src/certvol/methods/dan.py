"""Deep Adaptation Network (Long et al., ICML 2015): match the means of source and target rows of a
batch in a kernel's feature space.

Implemented: cross-entropy on the source + `weight` * MMD^2 on a bottleneck's output, without bias,
with a sum of Gaussian kernels whose widths are multiples of the mean squared distance in the batch
(1/8, 1/4, .. 2; the mean has no gradient). Plain batches.
Deliberate differences: this is the usual form for residual networks: one layer, five kernels with
even weights, all pairs. The paper compares AlexNet's last three layers with linear-time estimates
and learned weights of 33 kernels (2^-8 to 2^8). All parts learn at one rate (published: the
backbone at a tenth), and `model.dropout` stands before the classifier. `target_ce` is not in the
paper.
"""

from typing import ClassVar

from torch import Tensor

from certvol.methods._base import Batch
from certvol.methods._domain_loss import BottleneckMethod
from certvol.methods._losses import maximum_mean_discrepancy

KERNEL_WIDTHS = (0.125, 0.25, 0.5, 1.0, 2.0)  # times the mean squared distance


class Method(BottleneckMethod):
    summary = "DAN: match source and target features by a kernel discrepancy (MK-MMD)"
    weighted: ClassVar[dict[str, str]] = {"mmd": "weight"}

    def domain_losses(self, batch: Batch, rows_NB: Tensor, logits_NC: Tensor) -> dict[str, Tensor]:
        source_SB, target_TB = rows_NB.tensor_split([batch.num_source])
        return {"mmd": maximum_mean_discrepancy(source_SB, target_TB, KERNEL_WIDTHS)}
