"""The losses, from tensors to tensors. N images, M samples, D features, C classes. All are computed in float32."""

import math

import torch
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


def membership(labels_N: Tensor, num_classes: int) -> Tensor:
    """One-hot rows, N x C. Torch's own `one_hot` waits for the device."""
    return (labels_N[:, None] == torch.arange(num_classes, device=labels_N.device)).float()


def mean_or_zero(values_N: Tensor) -> Tensor:
    """0 of no rows, which a batch, or a process's share of one, may be left with."""
    return values_N.sum() / max(1, len(values_N))


def mean_cross_entropy(logits_NC: Tensor, labels_N: Tensor) -> Tensor:
    """Averaged over the images; 0 of none."""
    return mean_or_zero(cross_entropy(logits_NC, labels_N))


def class_means(rows_ND: Tensor, labels_N: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """(means C x D, whether a class is there: 0 or 1). The mean of an absent class is 0."""
    one_hot_CN = membership(labels_N, num_classes).T
    count_C = one_hot_CN.sum(dim=1)
    with _full_precision(rows_ND):
        means_CD = one_hot_CN @ rows_ND.float() / count_C.clamp(min=1)[:, None]
    return means_CD, (count_C > 0).float()


def ramp(progress: Tensor, steepness: float = 10.0) -> Tensor:
    """From 0 at progress 0 to almost 1 at progress 1: 2 / (1 + exp(-steepness * p)) - 1 (Ganin and Lempitsky)."""
    return (progress * (steepness / 2)).tanh()


def _domain_weights(num_source: int, num_target: int, like: Tensor) -> Tensor:
    """One weight per row, source first: half for each domain, even over its rows. All 0 where one domain is absent."""
    if num_source == 0 or num_target == 0:
        return like.new_zeros(num_source + num_target, dtype=torch.float32)
    of_source = like.new_full((num_source,), 0.5 / num_source, dtype=torch.float32)
    return torch.cat([of_source, like.new_full((num_target,), 0.5 / num_target, dtype=torch.float32)])


def domain_confusion(logits_N: Tensor, num_source: int, certainty_N: Tensor | None = None) -> Tensor:
    """Cross-entropy of a domain discriminator (1: source), averaged over each domain, then over both.

    0, with zero gradients, where a batch has rows of one domain only. `certainty_N`: how much a row counts within its domain.
    """
    of_source_N = torch.zeros_like(logits_N, dtype=torch.float32)
    of_source_N[:num_source] = 1
    each_N = F.binary_cross_entropy_with_logits(logits_N.float(), of_source_N, reduction="none")
    weights_N = _domain_weights(num_source, len(logits_N) - num_source, logits_N)
    if certainty_N is not None:
        weights_N = weights_N * torch.cat([_mean_one(c) for c in certainty_N.float().tensor_split([num_source])])
    return (weights_N * each_N).sum()


def _mean_one(weights_N: Tensor) -> Tensor:
    return weights_N / weights_N.mean() if len(weights_N) > 0 else weights_N


def entropy(probabilities_NC: Tensor) -> Tensor:
    """Shannon's, one value per row; finite, and with finite gradients, at probability 0."""
    p_NC = probabilities_NC.float()
    return -(p_NC * p_NC.clamp(min=torch.finfo(torch.float32).tiny).log()).sum(dim=1)


def _full_precision(like: Tensor) -> torch.autocast:
    return torch.autocast(like.device.type, enabled=False)


def covariance(rows_ND: Tensor) -> Tensor:
    """D x D, with N - 1."""
    with _full_precision(rows_ND):
        centred_ND = rows_ND.float() - rows_ND.float().mean(dim=0)
        return centred_ND.T @ centred_ND / max(1, len(rows_ND) - 1)


def coral(source_ND: Tensor, target_ND: Tensor) -> Tensor:
    """Squared distance of the covariances over 4 D^2 (Sun and Saenko). 0 where a domain has no covariance: fewer than 2 rows."""
    if min(len(source_ND), len(target_ND)) < 2:
        return source_ND.new_zeros((), dtype=torch.float32)
    return (covariance(source_ND) - covariance(target_ND)).square().sum() / (4 * source_ND.shape[1] ** 2)


def squared_distances(a_ND: Tensor, b_MD: Tensor) -> Tensor:
    """N x M. Not by matrix products, whose rounding is large against the distance of near rows."""
    return torch.cdist(a_ND, b_MD, compute_mode="donot_use_mm_for_euclid_dist").square()


def maximum_mean_discrepancy(
    source_ND: Tensor, target_ND: Tensor, scales: tuple[float, ...] = (0.5, 1.0, 2.0), biased: bool = False
) -> Tensor:
    """MMD^2 with a sum of Gaussian kernels exp(-d^2 / (2 scale m)); m, without gradient, is the mean d^2 of all pairs of rows.

    Without bias it may be negative: its expectation is 0 where the domains agree. `biased` counts each row's kernel with itself.
    0 where a domain has fewer than 2 rows.
    """
    num_source, num_target = len(source_ND), len(target_ND)
    if min(num_source, num_target) < 2:
        return source_ND.new_zeros((), dtype=torch.float32)
    with _full_precision(source_ND):
        rows_ND = torch.cat([source_ND, target_ND]).float()
        squared_NN = squared_distances(rows_ND, rows_ND)
        pairs = len(rows_ND) * (len(rows_ND) - 1)
        mean = (squared_NN.detach().sum() / pairs).clamp(min=torch.finfo(torch.float32).tiny)
        kernel_NN = torch.stack([(squared_NN / (-2 * scale * mean)).exp() for scale in scales]).sum(dim=0)
        if not biased:
            kernel_NN = kernel_NN * (1 - torch.eye(len(rows_ND), device=kernel_NN.device))
        own = 0 if biased else 1
        within_source = kernel_NN[:num_source, :num_source].sum() / (num_source * (num_source - own))
        within_target = kernel_NN[num_source:, num_source:].sum() / (num_target * (num_target - own))
        return within_source + within_target - 2 * kernel_NN[:num_source, num_source:].mean()


def certainty_weights(probabilities_NC: Tensor) -> Tensor:
    """1 + exp(-entropy) of each row, without gradient: from almost 1 (no idea) to 2 (sure)."""
    return 1 + (-entropy(probabilities_NC.detach())).exp()


def class_confusion(logits_NC: Tensor, temperature: float) -> Tensor:
    """MCC (Jin et al.): how much probability sure rows give to pairs of different classes, per class. 0 of no rows."""
    with _full_precision(logits_NC):
        p_NC = (logits_NC.float() / temperature).softmax(dim=1)
        weights_N = _mean_one(certainty_weights(p_NC))
        confusion_CC = (weights_N[:, None] * p_NC).T @ p_NC
        # A class that no row believes in has an empty row.
        confusion_CC = confusion_CC / confusion_CC.sum(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        num_classes = logits_NC.shape[1]
        return (confusion_CC * (1 - torch.eye(num_classes, device=p_NC.device))).sum() / num_classes


def smoothed_cross_entropy(logits_NC: Tensor, labels_N: Tensor, smoothing: float) -> Tensor:
    """One value per image: against 1 - smoothing for the label and smoothing / (C - 1) for every other class."""
    log_NC = logits_NC.float().log_softmax(dim=1)
    own_N = log_NC.gather(1, labels_N[:, None]).squeeze(1)
    other = smoothing / max(1, logits_NC.shape[1] - 1)
    return -((1 - smoothing) * own_N + other * (log_NC.sum(dim=1) - own_N))
