"""Losses from tensors to tensors, in float32. N images, M samples, D features, C classes."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from certvol.scores.uncertainty import entropy

TINY = torch.finfo(torch.float32).tiny


def cross_entropy(logits_NC: Tensor, labels_N: Tensor) -> Tensor:
    """Return one value per image."""
    return F.cross_entropy(logits_NC.float(), labels_N, reduction="none")


def samples_cross_entropy(logits_NMC: Tensor, labels_N: Tensor) -> Tensor:
    """Eq. 1: average the cross-entropy of each image's M samples."""
    logits_NMC = logits_NMC.float()
    labels_NM1 = labels_N[:, None, None].expand(-1, logits_NMC.shape[1], 1)
    true_NM = logits_NMC.gather(2, labels_NM1).squeeze(2)
    return (logits_NMC.logsumexp(dim=2) - true_NM).mean(dim=1)


def sigma_target(samples_ce_N: Tensor, num_classes: int) -> Tensor:
    """Eq. 2, psi: log C - samples CE, at least 0. No gradient flows: it is a regression target."""
    return (math.log(num_classes) - samples_ce_N.detach()).clamp(min=0)


def antagonistic(sigma_N: Tensor, samples_ce_N: Tensor, num_classes: int) -> Tensor:
    """Eq. 3: return the smooth-L1 loss between sigma and psi, one value per image.

    The printed equation jumps by 1/2 at a distance of 1. The usual form, used here, does not, and
    has the same gradient.
    """
    target_N = sigma_target(samples_ce_N, num_classes)
    return F.smooth_l1_loss(sigma_N.float(), target_N, reduction="none")


def membership(labels_N: Tensor, num_classes: int) -> Tensor:
    """Return one-hot rows, N x C. Torch's own `one_hot` waits for the device."""
    return (labels_N[:, None] == torch.arange(num_classes, device=labels_N.device)).float()


def mean_or_zero(values_N: Tensor) -> Tensor:
    """Average over rows; 0 without rows, which a batch or a process's share of one may lack."""
    return values_N.sum() / max(1, len(values_N))


def mean_cross_entropy(logits_NC: Tensor, labels_N: Tensor) -> Tensor:
    """Average over the images; 0 without any."""
    return mean_or_zero(cross_entropy(logits_NC, labels_N))


def class_means(rows_ND: Tensor, labels_N: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return means, C x D, 0 for an absent class, and whether a class is present, 0 or 1."""
    one_hot_CN = membership(labels_N, num_classes).T
    count_C = one_hot_CN.sum(dim=1)
    with _full_precision(rows_ND):
        means_CD = one_hot_CN @ rows_ND.float() / count_C.clamp(min=1)[:, None]
    return means_CD, (count_C > 0).float()


def ramp(progress: Tensor, steepness: float = 10.0) -> Tensor:
    """Rise from 0 to almost 1: 2 / (1 + exp(-steepness * p)) - 1 (Ganin and Lempitsky)."""
    return (progress * (steepness / 2)).tanh()


def domain_confusion(
    logits_N: Tensor, num_source: int, certainty_N: Tensor | None = None
) -> Tensor:
    """Average a domain discriminator's cross-entropy (1: source) over each domain, then over both.

    0, with zero gradients, if the batch lacks a domain. `certainty_N` weights rows in their domain.
    """
    num_target = len(logits_N) - num_source
    is_source_N = torch.zeros_like(logits_N, dtype=torch.float32)
    is_source_N[:num_source] = 1
    each_N = F.binary_cross_entropy_with_logits(logits_N.float(), is_source_N, reduction="none")
    weights_N = torch.zeros_like(is_source_N)
    if num_source > 0 and num_target > 0:
        weights_N[:num_source], weights_N[num_source:] = 0.5 / num_source, 0.5 / num_target
    if certainty_N is not None:
        by_domain = certainty_N.float().tensor_split([num_source])
        weights_N = weights_N * torch.cat([_with_mean_one(weights) for weights in by_domain])
    return (weights_N * each_N).sum()


def _with_mean_one(weights_N: Tensor) -> Tensor:
    return weights_N / weights_N.mean() if len(weights_N) > 0 else weights_N


def _full_precision(like: Tensor) -> torch.autocast:
    return torch.autocast(like.device.type, enabled=False)


def covariance(rows_ND: Tensor) -> Tensor:
    """Return the covariance, D x D, with N - 1."""
    with _full_precision(rows_ND):
        centred_ND = rows_ND.float() - rows_ND.float().mean(dim=0)
        return centred_ND.T @ centred_ND / max(1, len(rows_ND) - 1)


def coral(source_ND: Tensor, target_ND: Tensor) -> Tensor:
    """Return the squared distance of the covariances over 4 D^2 (Sun and Saenko).

    0 if a domain has fewer than 2 rows.
    """
    if min(len(source_ND), len(target_ND)) < 2:
        return source_ND.new_zeros((), dtype=torch.float32)
    difference_DD = covariance(source_ND) - covariance(target_ND)
    return difference_DD.square().sum() / (4 * source_ND.shape[1] ** 2)


def squared_distances(a_ND: Tensor, b_MD: Tensor) -> Tensor:
    """Return N x M distances without matrix products, which round too coarsely for near rows."""
    return torch.cdist(a_ND, b_MD, compute_mode="donot_use_mm_for_euclid_dist").square()


def maximum_mean_discrepancy(
    source_ND: Tensor,
    target_ND: Tensor,
    scales: tuple[float, ...] = (0.5, 1.0, 2.0),
    biased: bool = False,
) -> Tensor:
    """Return MMD^2 with a sum of Gaussian kernels exp(-d^2 / (2 scale m)).

    m, without gradient, is the mean d^2 of all pairs of rows. Without bias MMD^2 may be negative:
    its expectation is 0 if the domains agree. `biased` counts each row's kernel with itself. 0 if a
    domain has fewer than 2 rows.
    """
    num_source, num_target = len(source_ND), len(target_ND)
    if min(num_source, num_target) < 2:
        return source_ND.new_zeros((), dtype=torch.float32)
    with _full_precision(source_ND):
        rows_ND = torch.cat([source_ND, target_ND]).float()
        squared_NN = squared_distances(rows_ND, rows_ND)
        mean = squared_NN.detach().sum() / (len(rows_ND) * (len(rows_ND) - 1))
        mean = mean.clamp(min=TINY)
        kernels = [(squared_NN / (-2 * scale * mean)).exp() for scale in scales]
        kernel_NN = torch.stack(kernels).sum(dim=0)
        own = 0 if biased else 1
        if not biased:
            kernel_NN = kernel_NN * (1 - torch.eye(len(rows_ND), device=kernel_NN.device))
        source_pairs, target_pairs = (n * (n - own) for n in (num_source, num_target))
        within_source = kernel_NN[:num_source, :num_source].sum() / source_pairs
        within_target = kernel_NN[num_source:, num_source:].sum() / target_pairs
        return within_source + within_target - 2 * kernel_NN[:num_source, num_source:].mean()


def certainty_weights(probabilities_NC: Tensor) -> Tensor:
    """Return 1 + exp(-entropy) of each row, without gradient: almost 1 (unsure) to 2 (sure)."""
    return 1 + (-entropy(probabilities_NC.detach())).exp()


def class_confusion(logits_NC: Tensor, temperature: float) -> Tensor:
    """Return MCC (Jin et al.): the probability that sure rows give to pairs of classes, per class.

    0 without rows.
    """
    with _full_precision(logits_NC):
        p_NC = (logits_NC.float() / temperature).softmax(dim=1)
        weights_N = _with_mean_one(certainty_weights(p_NC))
        confusion_CC = (weights_N[:, None] * p_NC).T @ p_NC
        # The row of a class without any probability is empty.
        confusion_CC = confusion_CC / confusion_CC.sum(dim=1, keepdim=True).clamp(min=TINY)
        num_classes = logits_NC.shape[1]
        return (confusion_CC * (1 - torch.eye(num_classes, device=p_NC.device))).sum() / num_classes


def smoothed_cross_entropy(logits_NC: Tensor, labels_N: Tensor, smoothing: float) -> Tensor:
    """Return the cross-entropy to 1 - smoothing for the label, smoothing / (C - 1) for others."""
    log_NC = logits_NC.float().log_softmax(dim=1)
    own_N = log_NC.gather(1, labels_N[:, None]).squeeze(1)
    other = smoothing / max(1, logits_NC.shape[1] - 1)
    return -((1 - smoothing) * own_N + other * (log_NC.sum(dim=1) - own_N))
