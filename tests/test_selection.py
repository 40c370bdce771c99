import math

import numpy as np
import pytest

import references
from certvol import selection


def _one_hot(labels: list[int], classes: int) -> np.ndarray:
    return np.eye(classes, dtype=np.float32)[labels]


def test_mutual_information_of_confident_balanced_predictions_is_log_c() -> None:
    assert selection.mutual_information(_one_hot([0, 1, 2, 3], 4)) == pytest.approx(math.log(4), abs=1e-6)


@pytest.mark.parametrize("p", [_one_hot([2, 2, 2], 4), np.full((5, 4), 0.25, np.float32)])
def test_mutual_information_of_collapsed_or_undecided_predictions_is_zero(p: np.ndarray) -> None:
    assert selection.mutual_information(p) == pytest.approx(0, abs=1e-6)


def test_mutual_information_by_hand() -> None:
    p = np.array([[0.9, 0.1], [0.3, 0.7]], np.float32)

    def entropy(a: float) -> float:
        return -a * math.log(a) - (1 - a) * math.log(1 - a)

    assert selection.mutual_information(p) == pytest.approx(entropy(0.6) - (entropy(0.9) + entropy(0.3)) / 2, abs=1e-6)


def test_mean_entropy_closed_forms() -> None:
    assert selection.mean_entropy(_one_hot([0, 1, 1], 4)) == pytest.approx(0, abs=1e-6)
    assert selection.mean_entropy(np.full((5, 4), 0.25, np.float32)) == pytest.approx(math.log(4))
    halves = np.array([[0.5, 0.5, 0], [1, 0, 0]], np.float32)
    assert selection.mean_entropy(halves) == pytest.approx(math.log(2) / 2)


def test_classes_in_use() -> None:
    assert selection.classes_in_use(_one_hot([0, 1, 2, 3], 9)) == pytest.approx(4)
    assert selection.classes_in_use(_one_hot([5, 5, 5], 9)) == pytest.approx(1)
    assert 1 < selection.classes_in_use(_one_hot([5, 5, 5, 1], 9)) < 2


def test_agreement() -> None:
    assert selection.agreement(_one_hot([0, 1, 2], 3), _one_hot([0, 1, 1], 3)) == pytest.approx(2 / 3)


CONFIDENT_AND_BALANCED = _one_hot([0, 1, 2, 3] * 5, 4)
ONE_CLASS = _one_hot([2] * 20, 4)
UNDECIDED = np.full((20, 4), 0.25, np.float32)


def _random(images: int, classes: int, seed: int) -> np.ndarray:
    raw = np.random.default_rng(seed).gamma(0.3, size=(images, classes)).astype(np.float32) + 1e-4
    return raw / raw.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(("p", "expected"), [(CONFIDENT_AND_BALANCED, 2), (ONE_CLASS, 1), (UNDECIDED, 1)])
def test_class_correlation_closed_forms(p: np.ndarray, expected: float) -> None:
    assert selection.class_correlation(p) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("p", "expected"),
    # singular values: sqrt(N / C) for each of C classes; sqrt(N) once; sqrt(N / C) once
    [(CONFIDENT_AND_BALANCED, 4 * math.sqrt(5) / 20), (ONE_CLASS, math.sqrt(20) / 20), (UNDECIDED, math.sqrt(5) / 20)],
)
def test_nuclear_norm_closed_forms(p: np.ndarray, expected: float) -> None:
    assert selection.batch_nuclear_norm(p) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("p", "expected"),
    # all alike: every other image is as near; in four clusters of five: as good as only the four others of one's own
    [(ONE_CLASS, math.log(19)), (UNDECIDED, math.log(19)), (CONFIDENT_AND_BALANCED, math.log(4)), (ONE_CLASS[:1], 0)],
)
def test_neighbourhood_density_closed_forms(p: np.ndarray, expected: float) -> None:
    assert selection.soft_neighbourhood_density(p) == pytest.approx(expected, abs=1e-5)


def test_agreement_with_the_ensemble_by_hand() -> None:
    first, second, third = _one_hot([0, 0, 1], 3), _one_hot([0, 1, 1], 3), _one_hot([0, 1, 2], 3)
    assert selection.ensemble_agreement([first, second, third]) == pytest.approx([2 / 3, 1, 2 / 3])
    assert selection.ensemble_agreement([first]) == [1]


@pytest.mark.parametrize(("images", "classes"), [(3, 7), (40, 5), (1100, 3)])
def test_validators_against_plain_loops(images: int, classes: int) -> None:
    p = _random(images, classes, seed=images)
    plain = p.tolist()
    assert selection.class_correlation(p) == pytest.approx(references.class_correlation(plain), rel=1e-6)
    assert selection.batch_nuclear_norm(p) == pytest.approx(references.nuclear_norm(plain), rel=1e-6)
    if images < 1000:
        expected = references.soft_neighbourhood_density(plain, 0.05)
        assert selection.soft_neighbourhood_density(p) == pytest.approx(expected, rel=1e-4)
    others = [p, _random(images, classes, seed=1), _random(images, classes, seed=2)]
    assert selection.ensemble_agreement(others) == references.ensemble_agreement([other.tolist() for other in others])


def test_neighbourhood_density_does_not_depend_on_how_many_rows_are_taken_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p = _random(50, 4, seed=0)
    whole = selection.soft_neighbourhood_density(p)
    monkeypatch.setattr(selection, "SND_ROWS", 7)
    assert selection.soft_neighbourhood_density(p) == pytest.approx(whole, rel=1e-6)


def test_scores_per_cycle_have_a_value_for_every_validator() -> None:
    scores = selection.label_free_scores(_random(9, 3, 0), _random(9, 3, 1), 0.5)
    assert set(selection.DIRECTION) - {"sigma"} <= set(scores)  # sigma is the method's, and added by the trainer


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
    assert len(selection.signs_of_collapse(_scores(**changed), _scores(), 0.6, 0.75)) == signs


@pytest.mark.parametrize(
    ("mixed", "per_domain", "chosen"),
    [
        (2.0, 2.05, 0),  # better, but not clearly: log 10 / 20 is 0.115
        (2.0, 2.2, 1),
        (2.2, 2.0, 0),
        (None, 0.1, 1),
        (0.1, None, 0),
        (None, None, 0),
    ],
)
def test_choice_of_mode(mixed: float | None, per_domain: float | None, chosen: int) -> None:
    assert selection.choose_mode(mixed, per_domain, 10) == chosen


@pytest.mark.parametrize(
    ("now", "before", "agree", "said"),
    [(6.4, 3.5, 0.57, True), (9.6, 9.3, 0.6, False), (6.4, 3.5, 0.95, False), (3.0, 9.0, 0.3, False)],
)
def test_spreading_over_classes_the_pretrained_model_hardly_saw(
    now: float, before: float, agree: float, said: bool
) -> None:
    scores = {"classes_in_use": now, "agreement_with_pretrained": agree}
    sign = selection.sign_of_spreading(scores, {"classes_in_use": before})
    assert (sign is not None) == said
    assert selection.tells_of_spreading(sign or "cycle 1: predictions have fallen onto 1.0 classes") == said
