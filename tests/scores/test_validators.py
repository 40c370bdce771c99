import math

import numpy as np
import pytest

import score_references as references
from certvol.scores import validators


def _one_hot(labels: list[int], classes: int) -> np.ndarray:
    return np.asarray(np.eye(classes, dtype=np.float32)[labels])


def test_mutual_information_of_confident_balanced_predictions_is_log_c() -> None:
    assert validators.mutual_information(_one_hot([0, 1, 2, 3], 4)) == pytest.approx(
        math.log(4), abs=1e-6
    )


@pytest.mark.parametrize("p", [_one_hot([2, 2, 2], 4), np.full((5, 4), 0.25, np.float32)])
def test_mutual_information_of_collapsed_or_undecided_predictions_is_zero(p: np.ndarray) -> None:
    assert validators.mutual_information(p) == pytest.approx(0, abs=1e-6)


def test_mutual_information_by_hand() -> None:
    p = np.array([[0.9, 0.1], [0.3, 0.7]], np.float32)

    def entropy(a: float) -> float:
        return -a * math.log(a) - (1 - a) * math.log(1 - a)

    assert validators.mutual_information(p) == pytest.approx(
        entropy(0.6) - (entropy(0.9) + entropy(0.3)) / 2, abs=1e-6
    )


def test_mean_entropy_by_hand() -> None:
    assert validators.mean_entropy(_one_hot([0, 1, 1], 4)) == pytest.approx(0, abs=1e-6)
    assert validators.mean_entropy(np.full((5, 4), 0.25, np.float32)) == pytest.approx(math.log(4))
    halves = np.array([[0.5, 0.5, 0], [1, 0, 0]], np.float32)
    assert validators.mean_entropy(halves) == pytest.approx(math.log(2) / 2)


def test_classes_in_use_by_hand() -> None:
    assert validators.classes_in_use(_one_hot([0, 1, 2, 3], 9)) == pytest.approx(4)
    assert validators.classes_in_use(_one_hot([5, 5, 5], 9)) == pytest.approx(1)
    assert 1 < validators.classes_in_use(_one_hot([5, 5, 5, 1], 9)) < 2


def test_agreement_by_hand() -> None:
    assert validators.agreement(_one_hot([0, 1, 2], 3), _one_hot([0, 1, 1], 3)) == pytest.approx(
        2 / 3
    )


CONFIDENT_AND_BALANCED = _one_hot([0, 1, 2, 3] * 5, 4)
ONE_CLASS = _one_hot([2] * 20, 4)
UNDECIDED = np.full((20, 4), 0.25, np.float32)


def _random(images: int, classes: int, seed: int) -> np.ndarray:
    raw = np.random.default_rng(seed).gamma(0.3, size=(images, classes)).astype(np.float32) + 1e-4
    return np.asarray(raw / raw.sum(axis=1, keepdims=True))


@pytest.mark.parametrize(
    ("p", "expected"), [(CONFIDENT_AND_BALANCED, 2), (ONE_CLASS, 1), (UNDECIDED, 1)]
)
def test_class_correlation_closed_forms(p: np.ndarray, expected: float) -> None:
    assert validators.class_correlation(p) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("p", "expected"),
    # singular values: sqrt(N / C) for each of C classes; sqrt(N) once; sqrt(N / C) once
    [
        (CONFIDENT_AND_BALANCED, 4 * math.sqrt(5) / 20),
        (ONE_CLASS, math.sqrt(20) / 20),
        (UNDECIDED, math.sqrt(5) / 20),
    ],
)
def test_nuclear_norm_closed_forms(p: np.ndarray, expected: float) -> None:
    assert validators.batch_nuclear_norm(p) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("p", "expected"),
    # all images equal: 19 equally near ones; four clusters of five: 4 near ones
    [
        (ONE_CLASS, math.log(19)),
        (UNDECIDED, math.log(19)),
        (CONFIDENT_AND_BALANCED, math.log(4)),
        (ONE_CLASS[:1], 0),
    ],
)
def test_neighbourhood_density_closed_forms(p: np.ndarray, expected: float) -> None:
    assert validators.soft_neighbourhood_density(p) == pytest.approx(expected, abs=1e-5)


def test_ensemble_agreement_by_hand() -> None:
    first, second, third = _one_hot([0, 0, 1], 3), _one_hot([0, 1, 1], 3), _one_hot([0, 1, 2], 3)
    assert validators.ensemble_agreement([first, second, third]) == pytest.approx([2 / 3, 1, 2 / 3])
    assert validators.ensemble_agreement([first]) == [1]


@pytest.mark.parametrize(("images", "classes"), [(3, 7), (40, 5), (1100, 3)])
def test_validators_equal_the_plain_loops(images: int, classes: int) -> None:
    p = _random(images, classes, seed=images)
    plain = p.tolist()
    assert validators.class_correlation(p) == pytest.approx(
        references.class_correlation(plain), rel=1e-6
    )
    assert validators.batch_nuclear_norm(p) == pytest.approx(
        references.nuclear_norm(plain), rel=1e-6
    )
    if images < 1000:
        expected = references.soft_neighbourhood_density(plain, 0.05)
        assert validators.soft_neighbourhood_density(p) == pytest.approx(expected, rel=1e-4)
    others = [p, _random(images, classes, seed=1), _random(images, classes, seed=2)]
    assert validators.ensemble_agreement(others) == references.ensemble_agreement(
        [other.tolist() for other in others]
    )


def test_neighbourhood_density_does_not_depend_on_the_number_of_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p = _random(50, 4, seed=0)
    whole = validators.soft_neighbourhood_density(p)
    monkeypatch.setattr(validators, "SND_ROWS", 7)
    assert validators.soft_neighbourhood_density(p) == pytest.approx(whole, rel=1e-6)


def test_scores_per_cycle_have_a_value_for_every_validator() -> None:
    seen = validators.WatchedOutputs(_random(9, 3, 0), np.array([1, 5, 2], np.float32), 0.5)
    scores = validators.label_free_scores(seen, _random(9, 3, 1))
    assert set(scores) - set(validators.VALIDATORS) == {
        "classes_in_use",
        "agreement_with_pretrained",
    }
    assert set(validators.VALIDATORS) - set(scores) == {"ensv"}  # it compares models
    assert None not in scores.values()
    assert (scores["sigma"], scores["source_accuracy"]) == (2, 0.5)
    assert scores["bnm"] == validators.batch_nuclear_norm(_random(9, 3, 0))


def test_a_score_is_none_if_the_run_lacks_what_it_needs() -> None:
    scores = validators.label_free_scores(
        validators.WatchedOutputs(_random(9, 3, 0)), _random(9, 3, 1)
    )
    lacking = {name for name, value in scores.items() if value is None}
    assert lacking == {name for name, each in validators.VALIDATORS.items() if each.needs}


def test_a_new_validator_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    new = validators.Validator(lambda seen: float(seen.probabilities_NC.max()))
    monkeypatch.setitem(validators.VALIDATORS, "largest", new)
    seen = validators.WatchedOutputs(_random(9, 3, 0))
    scores = validators.label_free_scores(seen, seen.probabilities_NC)
    assert scores["largest"] == seen.probabilities_NC.max()


def _scores(**changed: float | None) -> dict[str, float | None]:
    return {"classes_in_use": 10.0, "source_accuracy": 0.9, "mutual_information": 1.0, **changed}


@pytest.mark.parametrize(
    ("changed", "signs"),
    [
        ({}, 0),
        ({"classes_in_use": 4.0}, 1),
        ({"source_accuracy": 0.4}, 1),
        ({"classes_in_use": 4.0, "source_accuracy": 0.4}, 2),
        ({"source_accuracy": None}, 0),
        ({"classes_in_use": 7.0, "source_accuracy": 0.8}, 0),
    ],
)
def test_signs_of_collapse(changed: dict[str, float | None], signs: int) -> None:
    assert len(validators.signs_of_collapse(_scores(**changed), _scores(), 0.6, 0.75)) == signs


@pytest.mark.parametrize(
    ("agree", "information", "defended"),
    [(0.4, 0.9, False), (0.4, 1.1, True), (0.6, 0.9, True), (None, 0.9, True), (0.4, None, True)],
)
def test_most_predictions_may_change_only_if_they_say_more(
    agree: float | None, information: float | None, defended: bool
) -> None:
    scores = _scores(agreement_with_pretrained=agree, mutual_information=information)
    found = validators.unfounded_change(scores, _scores())
    assert (found is None) == defended
    if found is not None:
        assert "60 % of the predictions changed" in found
        assert "from 1.00 to 0.90" in found


def _trial(
    entropy: float | None, information: float = 1.0, classes: float = 5.0
) -> validators.Scores | None:
    """Return the scores of a norm mode's trial; None for a mode that collapsed."""
    if entropy is None:
        return None
    return {"entropy": entropy, "mutual_information": information, "classes_in_use": classes}


@pytest.mark.parametrize(
    ("frozen", "mixed", "per_domain", "preferred"),
    [
        (0.5, 0.45, 0.4, "frozen"),  # log 10 / 20 = 0.115
        (0.5, 0.3, 0.25, "mixed"),
        (0.5, 0.3, 0.1, "per_domain"),
        (0.5, 0.4, 0.3, "frozen"),  # per_domain leads frozen, but not mixed too
        (0.5, 0.5, 0.3, "per_domain"),
        (None, 0.5, 0.4, "mixed"),
        (0.5, None, None, "frozen"),
        (None, None, 0.5, "per_domain"),
        (None, None, None, "mixed"),
    ],
)
def test_a_mode_must_be_clearly_surer_than_all_that_fit_the_target_less(
    frozen: float | None, mixed: float | None, per_domain: float | None, preferred: str
) -> None:
    trials = {"mixed": _trial(mixed), "per_domain": _trial(per_domain), "frozen": _trial(frozen)}
    assert validators.preferred_mode(trials, 10) == preferred


@pytest.mark.parametrize(
    ("information", "classes", "preferred"),
    [
        (1.2, 9.5, "per_domain"),
        (1.1, 9.5, "mixed"),  # more mutual information, but by less than 0.115
        (1.9, 9.1, "mixed"),  # some classes stay unused, so the target may lack them
    ],
)
def test_a_mode_that_finds_nearly_all_classes_need_not_be_surer(
    information: float, classes: float, preferred: str
) -> None:
    trials = {"mixed": _trial(0.4), "per_domain": _trial(0.5, information, classes)}
    assert validators.preferred_mode(trials, 10) == preferred


def test_a_mode_that_lost_the_source_is_out() -> None:
    trials: dict[str, validators.Scores | None] = {
        "mixed": {"source_accuracy": 0.6},
        "per_domain": {"source_accuracy": 0.81},
        "frozen": {"source_accuracy": 0.9},
    }
    kept = validators.drop_modes_that_lost_source(trials, 0.75)
    assert kept == {**trials, "mixed": None}
    assert list(kept) == list(validators.NORM_MODES)
    unknown = {"mixed": trials["mixed"], "per_domain": None, "frozen": {"source_accuracy": None}}
    assert validators.drop_modes_that_lost_source(unknown, 0.75) == unknown


@pytest.mark.parametrize(
    ("accuracy", "images", "classes", "warned"),
    [
        (0.59, 10, 2, True),  # chance is 50 %
        (0.61, 10, 2, False),
        (0.29, 100, 10, True),
        (0.31, 100, 10, False),
        (0.09, 281, 31, True),
        (0.1, 281, 31, False),
        (0.1, 9, 2, False),  # too few to judge by
        (None, 0, 2, False),
    ],
)
def test_failed_pretraining_is_warned_of(
    accuracy: float | None, images: int, classes: int, warned: bool
) -> None:
    text = validators.pretraining_warning(accuracy, images, classes)
    assert (text is not None) is warned
    assert not warned or "training.pretrain_steps" in str(text)


@pytest.mark.parametrize(
    ("now", "before", "agree", "said"),
    [
        (6.4, 3.5, 0.57, True),
        (9.6, 9.3, 0.6, False),
        (6.4, 3.5, 0.95, False),
        (3.0, 9.0, 0.3, False),
    ],
)
def test_a_warning_tells_if_predictions_spread_over_new_classes(
    now: float, before: float, agree: float, said: bool
) -> None:
    scores = {"classes_in_use": now, "agreement_with_pretrained": agree}
    warning = validators.spreading_warning(scores, {"classes_in_use": before})
    assert (warning is not None) == said
    assert (
        validators.is_spreading_warning(warning or "cycle 1: predictions use only 1.0 classes")
        == said
    )
