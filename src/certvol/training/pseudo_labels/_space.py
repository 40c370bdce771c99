"""Map features to a space for comparing images: classes are round and the domains are aligned.

Features differ most along directions that say nothing about the class. Dividing by the source's
covariance within classes shrinks those directions, so that the angle between two images says how
likely they show the same class.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from certvol.methods._base import Survey
from certvol.methods._clusters import class_sums
from certvol.nn.projection import principal_directions
from certvol.randomness import torch_generator

MAX_DIMS = 256  # dimensions of the compared rows; more take longer and gain nothing
MOST_ROWS = 16_384  # rows that the directions are estimated from
RIDGE = 0.25


def comparable_rows(survey: Survey) -> tuple[Tensor, Tensor]:
    """Return source and target rows of unit length, whose dot product compares images.

    Both domains are centred on the source, because a target that shows few classes has a
    different mean. Features that are never negative are replaced by their square roots first, which
    keeps a few large entries from dominating.
    """
    source_SD, labels_S = survey.source_features_SD, survey.source_labels_S
    if source_SD is None or labels_S is None:
        raise AssertionError("comparable_rows needs the features and labels of the source")
    target_ND = survey.features_ND
    has_roots = bool((source_SD >= 0).all()) and bool((target_ND >= 0).all())
    if source_SD.shape[1] > MAX_DIMS:
        basis_DR = _directions(source_SD, target_ND, has_roots)
        source_SD, target_ND = (
            torch.cat(
                [_scaled(part, has_roots) @ basis_DR for part in torch.split(rows_ND, MOST_ROWS)]
            )
            for rows_ND in (source_SD, target_ND)
        )
    else:
        source_SD, target_ND = _scaled(source_SD, has_roots), _scaled(target_ND, has_roots)
    mean_D = source_SD.mean(dim=0)
    source_SD = F.normalize(source_SD - mean_D, dim=1)
    target_ND = F.normalize(target_ND - mean_D, dim=1)
    whitening_DD = whitening(source_SD, labels_S, survey.probabilities_NC.shape[1])
    return F.normalize(source_SD @ whitening_DD, dim=1), F.normalize(
        target_ND @ whitening_DD, dim=1
    )


def _scaled(rows_ND: Tensor, has_roots: bool) -> Tensor:
    return F.normalize(rows_ND.sqrt() if has_roots else rows_ND, dim=1)


def _directions(source_SD: Tensor, target_ND: Tensor, has_roots: bool) -> Tensor:
    """Return the principal directions of a sample of both; the same for the same rows."""
    generator = torch_generator(source_SD.device, 0, "compared.directions")
    count = len(source_SD) + len(target_ND)
    chosen_N = torch.arange(count, device=source_SD.device)
    if count > MOST_ROWS:
        order_N = torch.randperm(count, generator=generator, device=source_SD.device)
        chosen_N = order_N[:MOST_ROWS]
    of_target_N = chosen_N[chosen_N >= len(source_SD)] - len(source_SD)
    of_source_N = chosen_N[chosen_N < len(source_SD)]
    sample_ND = torch.cat([source_SD[of_source_N], target_ND[of_target_N]])
    return principal_directions(_scaled(sample_ND, has_roots), MAX_DIMS, generator)


def whitening(rows_SD: Tensor, labels_S: Tensor, num_classes: int) -> Tensor:
    """Return (S + r I)^-1/2, D x D, for the covariance S within classes.

    The ridge r is 0.25 tr S^2 / tr S: it follows the scale of S, and is larger the fewer directions
    S has.
    """
    rows_SD = rows_SD.double()
    sums_CD = class_sums(rows_SD, labels_S, num_classes)
    counts_C = torch.bincount(labels_S, minlength=num_classes).clamp(min=1)
    residuals_SD = rows_SD - (sums_CD / counts_C[:, None])[labels_S]
    covariance_DD = residuals_SD.T @ residuals_SD / len(rows_SD)
    trace = covariance_DD.trace()
    if trace <= 0:  # one image per class, so the spread within classes is unknown
        return torch.eye(len(covariance_DD), device=rows_SD.device)
    ridge = RIDGE * covariance_DD.square().sum() / trace
    values_D, vectors_DD = torch.linalg.eigh(covariance_DD)
    scales_D = (values_D.clamp(min=0) + ridge).rsqrt()
    whitening_DD: Tensor = vectors_DD * scales_D @ vectors_DD.T
    return whitening_DD.float()
