"""Signs, without any target label, of how well a model does on the target. P: N x C probabilities.

The collapse guard watches them in every cycle; the trial of normalisation modes is decided by them, and so is the checkpoint
that a run delivers where it is asked to choose.
"""

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

Probabilities = NDArray[np.float32]
_TINY = 1e-12
CLEARLY = 0.05
SPREADING, STILL_ALIKE = 1.3, 0.75
_SPREADS = "predictions now use"
SND_TEMPERATURE, SND_ROWS = 0.05, 512
SND_IMAGES = 512  # per cycle: its cost grows with the square of their number


def _entropy(p: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(-(p * np.log(p + _TINY)).sum(axis=-1))


def mean_entropy(probabilities_NC: Probabilities) -> float:
    return float(_entropy(probabilities_NC.astype(np.float64)).mean())


def mutual_information(probabilities_NC: Probabilities) -> float:
    """H(mean of p) - mean of H(p): high where images are classified with confidence and all classes are in use."""
    p = probabilities_NC.astype(np.float64)
    return float(_entropy(p.mean(axis=0)) - _entropy(p).mean())


def classes_in_use(probabilities_NC: Probabilities) -> float:
    """Effective number of predicted classes: exp of the entropy of their frequencies. 1 where all images get one class."""
    counts = np.bincount(probabilities_NC.argmax(axis=1), minlength=probabilities_NC.shape[1])
    return float(np.exp(_entropy(counts / counts.sum())))


def agreement(probabilities_NC: Probabilities, reference_NC: Probabilities) -> float:
    """Share of images that two models classify alike."""
    return float((probabilities_NC.argmax(axis=1) == reference_NC.argmax(axis=1)).mean())


def batch_nuclear_norm(probabilities_NC: Probabilities) -> float:
    """BNM: sum of the singular values of P, over N. Large where predictions are confident and of many classes."""
    # Those of the triangle of a QR decomposition are the same, and it has C rows instead of N.
    triangle = np.linalg.qr(probabilities_NC.astype(np.float64), mode="r")
    return float(np.linalg.svd(triangle, compute_uv=False).sum() / len(probabilities_NC))


def soft_neighbourhood_density(probabilities_NC: Probabilities, temperature: float = SND_TEMPERATURE) -> float:
    """SND: mean over images of the entropy of softmax(cosine to each other image / temperature). High where clusters are dense.

    It is as high where all images fall into one cluster: the guard must have found the model healthy.
    """
    if len(probabilities_NC) < 2:
        return 0.0
    p = probabilities_NC.astype(np.float32)
    unit_NC = p / np.linalg.norm(p, axis=1, keepdims=True)
    total = 0.0
    for start in range(0, len(unit_NC), SND_ROWS):  # a few rows at a time: N x N need not fit
        rows = unit_NC[start : start + SND_ROWS]
        near_RN = (rows @ unit_NC.T - 1) / temperature  # at most 0, so that nothing overflows
        weight_RN = np.exp(near_RN)
        itself = (np.arange(len(rows)), np.arange(start, start + len(rows)))
        weight_RN[itself], near_RN[itself] = 0, 0
        sum_R = weight_RN.sum(axis=1, dtype=np.float64)
        total += float((np.log(sum_R) - np.einsum("rn,rn->r", weight_RN, near_RN) / sum_R).sum())
    return total / len(unit_NC)


def class_correlation(probabilities_NC: Probabilities) -> float:
    """Corr-C: trace of P'P over its Frobenius norm: sqrt(C) where predictions are confident and balanced, 1 where they are all
    of one class or all uniform. So more is better; some code of others takes the least for the best.
    """
    p = probabilities_NC.astype(np.float64)
    together_CC = p.T @ p
    return float(np.trace(together_CC) / np.linalg.norm(together_CC))


def ensemble_agreement(candidates: Iterable[Probabilities]) -> list[float]:
    """EnsV, of each candidate: share of images that it classifies as the mean of all candidates does.

    Taken one by one: all at once may not fit into memory.
    """
    labels: list[NDArray[np.int64]] = []
    sum_NC = np.zeros((), dtype=np.float32)
    for probabilities_NC in candidates:
        sum_NC = sum_NC + probabilities_NC
        labels.append(probabilities_NC.argmax(axis=1))
    return [float((own_N == sum_NC.argmax(axis=1)).mean()) for own_N in labels]


# Scores of one model that a checkpoint can be chosen by; -1 where less is better. `ensv` needs several models at once.
DIRECTION = {
    "mutual_information": 1,
    "bnm": 1,
    "snd": 1,
    "corr_c": 1,
    "entropy": -1,
    "source_accuracy": 1,
    "sigma": 1,
}
SELECTORS = (*DIRECTION, "ensv")


def label_free_scores(
    probabilities_NC: Probabilities, pretrained_NC: Probabilities, source_accuracy: float | None
) -> dict[str, float | None]:
    """What is logged per cycle. `source_accuracy`: on held-out source images, None where none are held out."""
    return {
        "mutual_information": mutual_information(probabilities_NC),
        "bnm": batch_nuclear_norm(probabilities_NC),
        "snd": soft_neighbourhood_density(probabilities_NC[:SND_IMAGES]),
        "corr_c": class_correlation(probabilities_NC),
        "entropy": mean_entropy(probabilities_NC),
        "classes_in_use": classes_in_use(probabilities_NC),
        "agreement_with_pretrained": agreement(probabilities_NC, pretrained_NC),
        "source_accuracy": source_accuracy,
    }


def signs_of_collapse(
    scores: Mapping[str, float | None],
    pretrained: Mapping[str, float | None],
    least_spread: float,
    least_source_accuracy: float,
) -> list[str]:
    """In words, each sign that this cycle's model has collapsed against the pretrained one; empty for a healthy model."""
    signs = []
    used, used_before = scores["classes_in_use"], pretrained["classes_in_use"]
    if used is not None and used_before is not None and used < least_spread * used_before:
        signs.append(f"predictions have fallen onto {used:.1f} classes, from {used_before:.1f}")
    right, right_before = scores["source_accuracy"], pretrained["source_accuracy"]
    if right is not None and right_before is not None and right < least_source_accuracy * right_before:
        signs.append(f"accuracy on held-out source images has fallen to {right:.0%}, from {right_before:.0%}")
    return signs


def sign_of_spreading(scores: Mapping[str, float | None], pretrained: Mapping[str, float | None]) -> str | None:
    """In words, where predictions now use far more classes than the pretrained model's did.

    That is success where the shift between the domains had hidden classes, and ruin where the target lacks them: no score
    without labels tells the two apart, so a person must.
    """
    now, before = scores["classes_in_use"], pretrained["classes_in_use"]
    agree = scores["agreement_with_pretrained"]
    if now is None or before is None or agree is None or now < SPREADING * before or agree > STILL_ALIKE:
        return None
    return (
        f"{_SPREADS} {now:.1f} classes, the pretrained model's {before:.1f}, and the two agree on {agree:.0%} of the images. "
        "That is a gain where the shift between the domains had hidden classes, and harm where the target lacks classes of "
        "the source or has few images of them. Training, which sees no target labels, cannot tell which: look at some "
        "predictions, and compare with `--method source_only`"
    )


def tells_of_spreading(warning: str) -> bool:
    """Whether this is what `sign_of_spreading` says."""
    return warning.startswith(_SPREADS)


def choose_mode(mixed: float | None, per_domain: float | None, num_classes: int) -> int:
    """0 for the paper's mixed statistics, 1 for those of each domain, by the mutual information of a short trial of each.

    Statistics of each domain must be clearly better, by a twentieth of the most there can be: they make predictions a
    little more confident whether or not they make them better. None stands for a trial that collapsed.
    """
    if mixed is None or per_domain is None:
        return int(mixed is None and per_domain is not None)
    return int(per_domain > mixed + CLEARLY * np.log(num_classes))
