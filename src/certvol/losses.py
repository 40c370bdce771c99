"""The losses, from tensors to tensors. N images, M samples, C classes. All are computed in float32."""

import math

import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits_NC: Tensor, labels_N: Tensor) -> Tensor:
    """One value per image."""
    return F.cross_entropy(logits_NC.float(), labels_N, reduction="none")


def samples_cross_entropy(logits_NMC: Tensor, labels_N: Tensor) -> Tensor:
    """Eq. 1, one value per image: cross-entropy averaged over its M samples."""
    logits_NMC = logits_NMC.float()
    true_NM = logits_NMC.gather(2, labels_N[:, None, None].expand(-1, logits_NMC.shape[1], 1)).squeeze(2)
    return (logits_NMC.logsumexp(dim=2) - true_NM).mean(dim=1)


def sigma_target(samples_ce_N: Tensor, num_classes: int) -> Tensor:
    """Eq. 2, psi: kappa - samples CE, not below 0, with kappa = log C. A regression target, so no gradient flows."""
    return (math.log(num_classes) - samples_ce_N.detach()).clamp(min=0)


def antagonistic(sigma_N: Tensor, samples_ce_N: Tensor, num_classes: int) -> Tensor:
    """Eq. 3, one value per image: smooth-L1 between sigma and psi.

    The equation as printed jumps by 1/2 at a distance of 1; the usual form used here does not, and has the same gradient.
    """
    return F.smooth_l1_loss(sigma_N.float(), sigma_target(samples_ce_N, num_classes), reduction="none")
