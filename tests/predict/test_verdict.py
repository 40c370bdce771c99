"""The verdict of a run: the rule, its words and the file, on evidence made for each case."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from certvol.errors import UserError
from certvol.predict.estimates import Evidence
from certvol.predict.max_error import Judged
from certvol.predict.verdict import describe, make_verdict, read_verdict
from certvol.runs.tables import json_text

CLASSES = ["ant", "bee", "cat", "dog"]
LABELS_S = np.arange(80) % 4
LABELS_N = np.arange(200) % 4


def _sure(labels: np.ndarray, confidence: float = 0.95) -> np.ndarray:
    """Return probabilities that give each row's label this share, and the others the rest."""
    rest = (1 - confidence) / (len(CLASSES) - 1)
    return np.where(np.arange(len(CLASSES)) == labels[:, None], confidence, rest).astype(np.float32)


def _with_errors(labels: np.ndarray, wrong: int) -> np.ndarray:
    """Return labels of which the first `wrong` name the next class."""
    return np.where(np.arange(len(labels)) < wrong, (labels + 1) % 4, labels)


def _evidence(**changed: Any) -> Evidence:
    found: dict[str, Any] = {
        "labels_S": LABELS_S,
        "before_SC": _sure(_with_errors(LABELS_S, 4)),
        "after_SC": _sure(_with_errors(LABELS_S, 4)),
        "before_NC": _sure(LABELS_N),
        "after_NC": _sure(LABELS_N),
    }
    return Evidence(**{**found, **changed})


def _held_out(images: int) -> dict[str, Any]:
    """Return evidence on the first of the held-out source images only."""
    labels_S = LABELS_S[:images]
    return {"labels_S": labels_S, "before_SC": _sure(labels_S), "after_SC": _sure(labels_S)}


def test_a_run_without_any_sign_of_trouble_can_be_used() -> None:
    found = make_verdict(_evidence(), CLASSES)
    assert found["verdict"] == "use it"
    assert found["reasons"] == ["an estimated 97 % of the predictions are correct"]
    assert found["line"] == f"use it: {found['reasons'][0]}"


@pytest.mark.parametrize(
    ("word", "reason", "changed"),
    [
        (
            "do not use it",
            "the source was not learnt: 40 % of its held-out images are correct",
            {"before_SC": _sure(_with_errors(LABELS_S, 48))},
        ),
        (
            "do not use it",
            "accuracy on held-out source images fell from 95 % to 50 %",
            {"after_SC": _sure(_with_errors(LABELS_S, 40))},
        ),
        (
            "look first",
            "adaptation changed 40 % of the predictions; look at some of them",
            {"after_NC": _sure(_with_errors(LABELS_N, 80))},
        ),
        (
            "look first",
            "adaptation predicts more classes than before; look at bee, dog",
            {"before_NC": _sure(LABELS_N // 2 * 2)},
        ),
        (
            "look first",
            "20 target images are too few to judge; look at all of them",
            {"before_NC": _sure(LABELS_N[:20]), "after_NC": _sure(LABELS_N[:20])},
        ),
        (
            "look first",
            "no source images are held out, so accuracy was not measured; raise `data.holdout`",
            _held_out(0),
        ),
        (
            "look first",
            "only 9 source images are held out, too few to measure accuracy; raise `data.holdout` "
            "or add source images",
            _held_out(9),
        ),
    ],
)
def test_each_sign_of_trouble_has_its_word_and_its_reason(
    word: str, reason: str, changed: dict[str, Any]
) -> None:
    found = make_verdict(_evidence(**changed), CLASSES)
    assert found["verdict"] == word
    assert reason in found["reasons"]


def test_predictions_of_one_class_are_named_first_unless_no_other_is_possible() -> None:
    one_N = np.where(np.arange(200) < 4, LABELS_N, 2)
    found = make_verdict(_evidence(before_NC=_sure(one_N), after_NC=_sure(one_N)), CLASSES)
    assert found["line"].startswith("look first: 98 % of the predictions are cat; if the target")
    only_NC = np.zeros((200, 4), np.float32)
    only_NC[:, 2] = 1
    found = make_verdict(_evidence(before_NC=only_NC, after_NC=only_NC), CLASSES)
    assert "of the predictions are cat" not in found["line"]


def test_the_most_serious_reason_comes_first() -> None:
    changed = {
        "after_SC": _sure(_with_errors(LABELS_S, 40)),
        "after_NC": _sure(_with_errors(LABELS_N, 80)),
    }
    found = make_verdict(_evidence(**changed), CLASSES)
    assert found["verdict"] == "do not use it"
    assert found["reasons"][0].startswith("accuracy on held-out source images fell")
    assert found["reasons"][-1].startswith("adaptation changed")


def test_random_labels_correct_the_estimate_but_no_sign_of_trouble() -> None:
    wrong_n = np.arange(60) < 45
    judged = Judged(np.arange(60), wrong_n, np.zeros(60, dtype=bool))
    without, found = (make_verdict(_evidence(), CLASSES, each) for each in (None, judged))
    assert 0.25 < found["accuracy"]["estimate"] < without["accuracy"]["estimate"]
    assert found["verdict"] != "use it"
    assert found["accuracy"]["labels"] == 60
    assert "from 60 random labels" in "\n".join(describe(found))


def test_the_figures_and_the_lines_say_what_adaptation_changed() -> None:
    found = make_verdict(_evidence(after_NC=_sure(np.where(LABELS_N == 0, 1, LABELS_N))), CLASSES)
    assert found["changed"] == {"images": 50, "share": 0.25}
    assert found["classes"]["ant"] == {"before": 50, "after": 0}
    assert found["classes"]["bee"] == {"before": 50, "after": 100}
    assert found["source"] == {"images": 80, "before": 0.95, "after": 0.95}
    lines = describe(found)
    assert lines[0] == f"verdict: {found['line']}"
    assert "accuracy on 80 held-out source images: 95.0 % before adaptation, 95.0 % after" in lines
    assert lines[-1] == (
        "adaptation changed 50 of 200 predictions (25 %); predicted images per class: "
        "ant 50 to 0, bee 50 to 100"
    )


def test_the_lines_say_if_the_counts_are_of_a_sample() -> None:
    changed = _evidence(after_NC=_sure(np.where(LABELS_N == 0, 1, LABELS_N)))
    found = make_verdict(changed, CLASSES, target_images=5000)
    assert (found["images"], found["target_images"]) == (200, 5000)
    assert describe(found)[-1] == (
        "adaptation changed 50 of 200 sampled predictions (25 %); predictions of sampled images "
        "per class: ant 50 to 0, bee 50 to 100"
    )
    del found["target_images"]  # as in files of older versions
    assert describe(found)[-1].startswith(
        "adaptation changed 50 of 200 predictions (25 %); predicted images per class"
    )


def test_a_method_in_closed_form_is_not_judged_by_the_source() -> None:
    found = make_verdict(_evidence(after_SC=_sure(LABELS_S[:0])), CLASSES)
    assert found["source"]["after"] is None
    assert all("fell from" not in reason for reason in found["reasons"])
    assert any(line.endswith("95.0 % before adaptation") for line in describe(found))


def test_the_file_is_read_back_and_refused_if_damaged(tmp_path: Path) -> None:
    found, file = make_verdict(_evidence(), CLASSES), tmp_path / "verdict.json"
    file.write_text(json_text(found))
    assert read_verdict(file) == json.loads(file.read_text())
    for damaged in ({**found, "verdict": "maybe"}, {**found, "format": "certvol/0"}, [1]):
        file.write_text(json.dumps(damaged))
        with pytest.raises(UserError, match=r"verdict\.json"):
            read_verdict(file)
