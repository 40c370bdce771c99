"""Validators: scores that say, without target labels, how well a model does on the target.

The collapse guard watches them in every cycle, trials of norm modes are decided by them, and
`guard.select` can choose the delivered cycle by one. P is N x C probabilities.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.special import entr

from certvol.progress import percent

Probabilities = NDArray[np.float32]
Scores = Mapping[str, float | None]
ModeScores = Mapping[str, Scores | None]

SND_TEMPERATURE = 0.05
SND_ROWS = 512  # rows computed at a time, because N x N may not fit into memory
SND_IMAGES = 512  # images per cycle, because the cost grows with their square
CLEARLY_BETTER = 0.05  # of the largest possible entropy or mutual information
NEARLY_ALL = 0.92  # of the classes
NormModeTried = Literal["frozen", "mixed", "per_domain"]
NORM_MODES: tuple[NormModeTried, ...] = get_args(NormModeTried)
"""Norm modes that a trial compares; the later ones fit the target more closely."""
SPREADING, STILL_AGREEING = 1.3, 0.75
HARDLY_LEARNT, TIMES_CHANCE = 0.6, 3
MIN_HELD_OUT = 10  # held-out source images that accuracy is measured on
_SPREADING_TEXT = "predictions now use"


def _entropy(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the entropy, in nats, of each row."""
    return np.asarray(entr(p).sum(axis=-1))


def mean_entropy(probabilities_NC: Probabilities) -> float:
    return float(_entropy(probabilities_NC.astype(np.float64)).mean())


def mutual_information(probabilities_NC: Probabilities) -> float:
    """H(mean of p) - mean of H(p): high if predictions are confident and use all classes."""
    p = probabilities_NC.astype(np.float64)
    return float(_entropy(p.mean(axis=0)) - _entropy(p).mean())


def classes_in_use(probabilities_NC: Probabilities) -> float:
    """Return the effective number of predicted classes: exp of the entropy of their shares."""
    counts = np.bincount(probabilities_NC.argmax(axis=1), minlength=probabilities_NC.shape[1])
    return effective_number(counts)


def effective_number(counts_C: NDArray[np.int64] | NDArray[np.float64]) -> float:
    """Return exp of the entropy of the classes' shares; 0 without any image."""
    return float(np.exp(_entropy(counts_C / counts_C.sum()))) if counts_C.any() else 0.0


def agreement(probabilities_NC: Probabilities, reference_NC: Probabilities) -> float:
    """Return the share of images that two models put into the same class."""
    return float((probabilities_NC.argmax(axis=1) == reference_NC.argmax(axis=1)).mean())


def batch_nuclear_norm(probabilities_NC: Probabilities) -> float:
    """BNM: sum of the singular values of P, over N. High if confident and using many classes."""
    # P = QR has the singular values of R, which has only C rows.
    triangle = np.linalg.qr(probabilities_NC.astype(np.float64), mode="r")
    return float(np.linalg.svd(triangle, compute_uv=False).sum() / len(probabilities_NC))


def soft_neighbourhood_density(
    probabilities_NC: Probabilities, temperature: float = SND_TEMPERATURE
) -> float:
    """SND: mean over images of the entropy of softmax(cosine to each other image / temperature).

    High if clusters are dense. It is also high if all images fall into one cluster, so it is only
    meaningful for a model that the guard finds healthy.
    """
    if len(probabilities_NC) < 2:
        return 0.0
    p = probabilities_NC.astype(np.float32)
    unit_NC = p / np.linalg.norm(p, axis=1, keepdims=True)
    total = 0.0
    for start in range(0, len(unit_NC), SND_ROWS):
        rows = unit_NC[start : start + SND_ROWS]
        near_RN = (rows @ unit_NC.T - 1) / temperature  # at most 0: exp cannot overflow
        weight_RN = np.exp(near_RN)
        itself = (np.arange(len(rows)), np.arange(start, start + len(rows)))
        weight_RN[itself], near_RN[itself] = 0, 0
        sum_R = weight_RN.sum(axis=1, dtype=np.float64)
        total += float((np.log(sum_R) - np.einsum("rn,rn->r", weight_RN, near_RN) / sum_R).sum())
    return total / len(unit_NC)


def class_correlation(probabilities_NC: Probabilities) -> float:
    """Corr-C: trace of P'P over its Frobenius norm.

    It is sqrt(C) if predictions are confident and balanced, 1 if they are all of one class or all
    uniform. More is therefore better, although some published code picks the smallest.
    """
    p = probabilities_NC.astype(np.float64)
    together_CC = p.T @ p
    return float(np.trace(together_CC) / np.linalg.norm(together_CC))


def ensemble_agreement(candidates: Iterable[Probabilities]) -> list[float]:
    """EnsV: each candidate's share of images that it classifies as the mean of all candidates does.

    Candidates are read one by one, because all at once may not fit into memory.
    """
    labels: list[NDArray[np.int64]] = []
    sum_NC = np.zeros((), dtype=np.float32)
    for probabilities_NC in candidates:
        sum_NC = sum_NC + probabilities_NC
        labels.append(probabilities_NC.argmax(axis=1))
    return [float((own_N == sum_NC.argmax(axis=1)).mean()) for own_N in labels]


@dataclass(frozen=True)
class WatchedOutputs:
    """The outputs of a cycle's model for the watched images, which validators score."""

    probabilities_NC: Probabilities
    sigma_N: NDArray[np.float32] | None = None
    """None if the method has no sigma."""
    source_accuracy: float | None = None
    """The accuracy on held-out source images; None without any."""


@dataclass(frozen=True)
class Validator:
    """A label-free score that can choose a cycle.

    `function` scores one model; None compares the models of a run (`ensemble_agreement`, and cycle
    by cycle `ModelChoice`).
    """

    function: Callable[[WatchedOutputs], float | None] | None
    direction: Literal[1, -1] = 1
    """-1: less is better."""
    needs: Literal["held_out_source", "sigma"] | None = None
    """What a run must have for this score."""


def _median_sigma(seen: WatchedOutputs) -> float | None:
    return None if seen.sigma_N is None else float(np.median(seen.sigma_N))


# A new validator is one entry: the names are the choices of `guard.select` beside `last`.
VALIDATORS = {
    "mutual_information": Validator(lambda seen: mutual_information(seen.probabilities_NC)),
    "bnm": Validator(lambda seen: batch_nuclear_norm(seen.probabilities_NC)),
    "snd": Validator(lambda seen: soft_neighbourhood_density(seen.probabilities_NC[:SND_IMAGES])),
    "corr_c": Validator(lambda seen: class_correlation(seen.probabilities_NC)),
    "entropy": Validator(lambda seen: mean_entropy(seen.probabilities_NC), direction=-1),
    "source_accuracy": Validator(lambda seen: seen.source_accuracy, needs="held_out_source"),
    "sigma": Validator(_median_sigma, needs="sigma"),
    "ensv": Validator(None),
}
DIRECTION = {name: each.direction for name, each in VALIDATORS.items() if each.function is not None}


def label_free_scores(
    seen: WatchedOutputs, pretrained_NC: Probabilities
) -> dict[str, float | None]:
    """Return the scores that are logged per cycle: the validators' and what the guard watches."""
    functions = {name: each.function for name, each in VALIDATORS.items()}
    scores = {name: score(seen) for name, score in functions.items() if score is not None}
    return {
        **scores,
        "classes_in_use": classes_in_use(seen.probabilities_NC),
        "agreement_with_pretrained": agreement(seen.probabilities_NC, pretrained_NC),
    }


def signs_of_collapse(
    scores: Scores, pretrained: Scores, least_spread: float, least_source_accuracy: float
) -> list[str]:
    """Describe each sign that a model has collapsed since pretraining; empty if it is healthy.

    Using few classes is not a collapse if few are expected: `classes_expected` of `pretrained` is
    the number that a target prior or the first labels leave.
    """
    signs = []
    used, used_before = scores["classes_in_use"], pretrained["classes_in_use"]
    expected = pretrained.get("classes_expected")
    if used is not None and used_before is not None:
        least = used_before if expected is None else min(used_before, expected)
        if used < least_spread * least:
            signs.append(f"predictions use only {used:.1f} classes, down from {used_before:.1f}")
    right, before = scores["source_accuracy"], pretrained["source_accuracy"]
    if right is not None and before is not None and right < least_source_accuracy * before:
        change = f"{percent(right, 0)} %, down from {percent(before, 0)} %"
        signs.append(f"accuracy on held-out source images is {change}")
    return signs


def unfounded_change(scores: Scores, pretrained: Scores) -> str | None:
    """Describe a change of most predictions that cannot be defended; None if it can.

    After a large domain shift, adaptation may rightly change most predictions. They then say more
    about the images than before. If they say less, the pretrained model is the safer one.
    """
    agree = scores.get("agreement_with_pretrained")
    now, before = scores.get("mutual_information"), pretrained.get("mutual_information")
    if agree is None or now is None or before is None or agree >= 0.5 or now >= before:
        return None
    return (
        f"{percent(1 - agree, 0)} % of the predictions changed, and their mutual information with "
        f"the images fell from {before:.2f} to {now:.2f}"
    )


def spreading_warning(scores: Scores, pretrained: Scores) -> str | None:
    """Warn if predictions use far more classes than the pretrained model's did.

    That is success if the domain shift had hidden classes, and harm if the target lacks them. A
    score without labels cannot distinguish the two, so the user has to look.
    """
    now, before = scores["classes_in_use"], pretrained["classes_in_use"]
    agree = scores["agreement_with_pretrained"]
    if now is None or before is None or agree is None:
        return None
    if now < SPREADING * before or agree > STILL_AGREEING:
        return None
    return (
        f"{_SPREADING_TEXT} {now:.1f} classes, the pretrained model's {before:.1f}, and the two "
        f"agree on {percent(agree, 0)} % of the images. This is a gain if the domain shift had "
        "hidden classes, and harm if the target lacks classes of the source or has few images of "
        "them. Training sees no target labels and cannot tell which: look at some predictions, "
        "and compare with `--method source_only`"
    )


def is_spreading_warning(text: str) -> bool:
    return text.startswith(_SPREADING_TEXT)


def norm_margin(num_classes: int) -> float:
    """Return the nats by which a norm mode must lead those that fit the target less."""
    return CLEARLY_BETTER * float(np.log(num_classes))


def fits_better(scores: Scores, other: Scores, num_classes: int) -> bool:
    """Return whether a mode whose statistics fit the target more closely is better than `other`.

    Statistics that do not suit the target leave its predictions uncertain. This holds both ways:
    shared ones under a large shift, and the target's own where it lacks classes. A shift can also
    push nearly all images into few classes, with certainty. Predictions that then spread over
    nearly all classes prove that these are there: a target that lacks classes never spreads so far.
    """
    margin = norm_margin(num_classes)
    surer = _score(scores, "entropy") < _score(other, "entropy") - margin
    gains = _score(scores, "mutual_information") > _score(other, "mutual_information") + margin
    return surer or (gains and _score(scores, "classes_in_use") >= NEARLY_ALL * num_classes)


def _score(scores: Scores, name: str) -> float:
    value = scores.get(name)
    return float("nan") if value is None else value


def preferred_mode(trials: ModeScores, num_classes: int) -> NormModeTried:
    """Choose a norm mode by its scores after a short trial; None stands for a collapse.

    A mode that fits the target more must be better than all that fit it less: `frozen` statistics
    ignore the target, `mixed` ones share a set with the source, `per_domain` ones are the target's
    own. If all collapsed, the choice is `mixed`.
    """
    healthy = [(mode, each) for mode in NORM_MODES if (each := trials.get(mode)) is not None]
    while healthy:
        mode, scores = healthy.pop()
        if all(fits_better(scores, other, num_classes) for _, other in healthy):
            return mode
    return "mixed"


def drop_modes_that_lost_source(trials: ModeScores, least: float) -> dict[str, Scores | None]:
    """Return the trials in the order of `NORM_MODES`, with None for a mode that lost the source.

    A mode is out if its accuracy on held-out source images is below the share `least` of the best
    mode's: the trial compares models that were pretrained differently too.
    """
    accuracies = {mode: (each or {}).get("source_accuracy") for mode, each in trials.items()}
    bar = least * max((each for each in accuracies.values() if each is not None), default=0.0)

    def kept(mode: str) -> Scores | None:
        accuracy = accuracies[mode]
        return None if accuracy is not None and accuracy < bar else trials[mode]

    return {mode: kept(mode) for mode in NORM_MODES if mode in trials}


def pretraining_warning(accuracy: float | None, images: int, num_classes: int) -> str | None:
    """Warn if the pretrained model is poor on held-out source images.

    The bar depends on chance: 60 % is poor with two classes, and 10 % is good with a hundred.
    """
    if accuracy is None or images < MIN_HELD_OUT:
        return None
    if accuracy >= min(HARDLY_LEARNT, TIMES_CHANCE / num_classes):
        return None
    return (
        f"pretraining reached only {percent(accuracy, 0)} % on held-out source images of "
        f"{num_classes} classes, so predictions will be poor with or without adaptation: raise "
        "`training.pretrain_steps`, try another `training.learning_rate`, and check that the "
        "source folders hold what their names say"
    )
