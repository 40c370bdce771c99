"""Linear support vector machines without a bias, and votes of several (for `rwa` and `adrem`).

Fitting takes and returns numpy arrays in float64; prediction uses torch tensors. N, S and T rows
(any, source, target), D features, C classes, R voters.
"""

import warnings

import numpy as np
import torch
from torch import Tensor

from certvol.methods._closed_form import SMALLEST_SCALE, Array, ClosedFormMethod, Labels

STRENGTHS = (1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1e3, 1e4)
TOLERANCE = 0.1  # liblinear's default for this loss; a tighter one takes twice the time
LEAST_SHARE = 1e-12  # of the votes, in logits


def joint_scale(source_SD: Array, target_TD: Array) -> Array:
    """Return each feature's deviation over both domains' rows, with n - 1; 1 for a constant one."""
    rows_ND = np.concatenate([source_SD, target_TD])
    scale_D = rows_ND.std(axis=0, ddof=1 if len(rows_ND) > 1 else 0)
    return np.where(scale_D > SMALLEST_SCALE, scale_D, 1.0)


def linear_svm(
    rows_ND: Array,
    labels_N: Labels,
    num_classes: int,
    strength: float,
    copies_N: Array | Labels | None = None,
) -> Array:
    """Fit one class against the others with the hinge loss and an L2 penalty; return W, C x D.

    `strength` is the weight of the data against the penalty. A row counts `copies_N` times. A class
    without rows has weights 0. If there is one class only, its weights are its mean row.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.svm import LinearSVC

    if copies_N is not None:
        used_N = copies_N > 0
        rows_ND, labels_N, copies_N = rows_ND[used_N], labels_N[used_N], copies_N[used_N]
    weight_CD = np.zeros((num_classes, rows_ND.shape[1]))
    classes = np.unique(labels_N)
    if len(classes) < 2:
        weight_CD[classes] = rows_ND.mean(axis=0) if len(rows_ND) else 0.0
        return weight_CD
    model = LinearSVC(C=strength, loss="hinge", fit_intercept=False, tol=TOLERANCE, random_state=0)
    with warnings.catch_warnings():
        # A large strength needs more rounds than liblinear's limit, but gains nothing from them.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(rows_ND, labels_N, sample_weight=copies_N)
    # Two classes have one row, for the second against the first.
    coef = np.concatenate([-model.coef_, model.coef_]) if len(classes) == 2 else model.coef_
    weight_CD[classes] = coef
    return weight_CD


def best_strength(
    rows_ND: Array, labels_N: Labels, num_classes: int, draws: np.random.Generator
) -> float:
    """Return the strength of `STRENGTHS` with the best two-fold accuracy; the first of equals."""
    order_N = draws.permutation(len(rows_ND))
    halves = (order_N[::2], order_N[1::2])
    right = []
    for strength in STRENGTHS:
        hits = 0
        for fitted, judged in (halves, halves[::-1]):
            weight_CD = linear_svm(rows_ND[fitted], labels_N[fitted], num_classes, strength)
            hits += int((classify(rows_ND[judged], weight_CD) == labels_N[judged]).sum())
        right.append(hits)
    return STRENGTHS[int(np.argmax(right))]


def classify(rows_ND: Array, weight_CD: Array) -> Labels:
    """Return the class of the highest score; a class with weights of 0 was not fitted."""
    scores_NC = np.where(weight_CD.any(axis=1), rows_ND @ weight_CD.T, -np.inf)
    return np.asarray(scores_NC.argmax(axis=1))


def vote_shares(rows_ND: Tensor, weight_RCD: Tensor) -> Tensor:
    """Return the share of voters for each class, N x C; the smaller class wins a voter's tie.

    A voter does not vote for a class for which its weights are 0.
    """
    voters, classes, dim = weight_RCD.shape
    scores_NV = rows_ND @ weight_RCD.reshape(voters * classes, dim).T
    fitted_RC = (weight_RCD != 0).any(dim=2)
    scores_NRC = scores_NV.reshape(-1, voters, classes).masked_fill(~fitted_RC, -torch.inf)
    votes_NR = scores_NRC.argmax(dim=2)
    one_hot = votes_NR[..., None] == torch.arange(classes, device=votes_NR.device)
    shares_NC: Tensor = one_hot.to(rows_ND.dtype).mean(dim=1)
    return shares_NC


class VotingMethod(ClosedFormMethod):
    """A method whose prediction is a vote of linear classifiers; shares are the probabilities."""

    arrays = ("weight_RCD",)
    weight_RCD: Tensor

    @staticmethod
    def moments(source_SD: Array, target_TD: Array) -> list[tuple[Array, Array]]:
        """Divide the features of both domains by one scale, without centring."""
        scale_D = joint_scale(source_SD, target_TD)
        return [(np.zeros_like(scale_D), scale_D)] * 2

    def fitted_logits(self, rows_ND: Tensor) -> Tensor:
        return vote_shares(rows_ND, self.weight_RCD).clamp_min(LEAST_SHARE).log()
