"""The estimate of a run's target accuracy, and the temperatures that follow from it."""

import numpy as np
import pytest

from certvol.predict.estimates import (
    Evidence,
    estimates,
    target_accuracy,
    temperatures,
    with_labels,
)
from certvol.scores.calibration import at_temperature


def _probabilities(count: int, classes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(classes, 0.3), count).astype(np.float32)


NO_CHANGE = _probabilities(300, 5, 1)


def _evidence(held_out: int = 60) -> Evidence:
    source_SC = _probabilities(held_out, 5, 0)
    labels_S = source_SC.argmax(axis=1)
    labels_S[: held_out // 4] = (labels_S[: held_out // 4] + 1) % 5
    before_NC, after_NC = _probabilities(300, 5, 1), _probabilities(300, 5, 2)
    return Evidence(labels_S, source_SC, source_SC, before_NC, after_NC)


def test_the_estimate_is_the_mean_of_the_chosen_estimators() -> None:
    evidence = _evidence()
    found = estimates(evidence)
    before_N, after_N = evidence.before_NC.argmax(axis=1), evidence.after_NC.argmax(axis=1)
    assert found["agreement"] == pytest.approx((before_N == after_N).mean())
    chosen = [found[name] for name in ("doc before", "second opinion", "agreement")]
    assert target_accuracy(found) == pytest.approx(np.mean([each for each in chosen if each]))
    found["nearest means"] = 0.25
    assert target_accuracy(found) == pytest.approx(np.mean([*chosen, 0.25]))


def test_held_out_images_that_are_all_right_make_no_model_surer_of_the_target() -> None:
    evidence = _evidence()
    right_S = evidence.before_SC.argmax(axis=1)
    sure = Evidence(right_S, evidence.before_SC, evidence.after_SC, evidence.before_NC, NO_CHANGE)
    found = estimates(sure)
    confidence = float(sure.before_NC.max(axis=1).mean())
    assert found["confidence before"] == pytest.approx(confidence, abs=1e-6)
    assert temperatures(sure, 0.5)[0] == 1.0
    unsure = estimates(evidence)["confidence before"]
    assert unsure is not None
    assert unsure < confidence


def test_estimates_that_need_held_out_images_are_none_without_them() -> None:
    found = estimates(_evidence(held_out=0))
    missing = {name for name, value in found.items() if value is None}
    assert missing == {"doc before", "doc after", "atc before", "atc after"} | {
        name for name in ("dropout", "nearest means") if found[name] is None
    }
    known = [found["second opinion"], found["agreement"]]
    assert target_accuracy(found) == pytest.approx(np.mean([each for each in known if each]))


def test_labels_take_over_from_the_estimate_as_they_grow_in_number() -> None:
    assert with_labels(0.9, 0.08, 0, 0) == pytest.approx(0.9)
    shares = [with_labels(0.9, 0.08, count // 2, count) for count in (10, 100, 10_000)]
    assert 0.9 > shares[0] > shares[1] > shares[2]
    assert shares[2] == pytest.approx(0.5, abs=0.01)


def test_at_its_temperature_the_delivered_model_is_as_sure_as_it_is_right() -> None:
    evidence = _evidence()
    before, after = temperatures(evidence, 0.7)
    confidence = at_temperature(evidence.after_NC, after).max(axis=1).mean()
    assert confidence == pytest.approx(0.7, abs=1e-4)
    assert before > 1, "it is wrong more often than its probabilities say"
    assert temperatures(_evidence(held_out=0), 0.7)[0] == 1
