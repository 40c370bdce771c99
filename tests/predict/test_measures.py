"""The measures of certainty and their figures, with and without labels and sigma."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from sklearn.metrics import confusion_matrix, roc_auc_score

import certvol
from certvol.data.augment import cache_size
from certvol.data.domains import open_target
from certvol.nn.norm import TARGET
from certvol.predict import measures as measuring
from certvol.predict.forward import Outputs
from certvol.scores import metrics
from certvol.scores.uncertainty import MEASURES
from support.images import tiny
from support.run_folders import read_table

CLASSES = ["apple", "leaf", "sky"]


def evaluation(run: certvol.Run) -> dict[str, Any]:
    return dict(json.loads((run.path / "evaluation.json").read_text()))


def rows(run: certvol.Run) -> list[dict[str, str]]:
    return read_table(run.path / "measures.csv")


def column(run: certvol.Run, name: str) -> NDArray[np.float32]:
    return np.array([row[name] for row in rows(run)], dtype=np.float32)


def test_every_measure_agrees_with_plain_pytorch(labelled: certvol.Run) -> None:
    model = labelled.model()
    paths = [labelled.path.parent / "target" / row["path"] for row in rows(labelled)]
    probabilities = torch.from_numpy(model.predict(paths).probabilities)
    truth = torch.tensor([CLASSES.index(row["truth"]) for row in rows(labelled)])
    images = model._view(paths)
    with torch.no_grad(), model.method.network.rows_of(domain=TARGET):
        logits = model.method.network.classifier(model.method.network.features(images))
    logits = logits / model.temperature
    ordered = logits.sort(dim=1).values
    entropy = -(probabilities * probabilities.log()).sum(dim=1)
    expected = {
        "probability": probabilities.amax(dim=1),
        "entropy": entropy,
        "logit": ordered[:, -1],
        "logit_gt": logits[torch.arange(len(truth)), truth],
        "logit_diff": ordered[:, -1] - ordered[:, -2],
    }
    for name, values in expected.items():
        assert column(labelled, name) == pytest.approx(values.numpy(), abs=1e-4), name
    assert ((column(labelled, "mcd_mu") >= 1 / 3) & (column(labelled, "mcd_mu") <= 1)).all()
    assert ((column(labelled, "mcd_sigma") > 0) & (column(labelled, "mcd_sigma") <= 0.5)).all()


def test_without_labels_and_sigma_their_columns_are_empty(unlabelled: certvol.Run) -> None:
    for row in rows(unlabelled):
        assert {name for name, cell in row.items() if cell == ""} == {"truth", "sigma", "logit_gt"}


def test_evaluation_of_a_labelled_run_against_scipy_and_scikit_learn(labelled: certvol.Run) -> None:
    found = evaluation(labelled)
    right = np.array([row["prediction"] == row["truth"] for row in rows(labelled)])
    assert 0 < right.sum() < len(right), "both kinds are needed here"
    assert found["images"] == 36
    assert found["labelled"] is True
    assert found["accuracy"] == pytest.approx(right.mean())
    turned = {
        name: column(labelled, name) * (1 if about.more_is_certain else -1)
        for name, about in MEASURES.items()
    }
    assert list(found["correlations"]["pearson"]) == [
        "logit",
        "logit_gt",
        "logit_diff",
        "mcd_mu",
        "mcd_sigma",
    ]
    for name in found["correlations"]["pearson"]:
        pearson, spearman = (found["correlations"][kind][name] for kind in ("pearson", "spearman"))
        assert pearson == pytest.approx(
            stats.pearsonr(turned["sigma"], turned[name]).statistic, abs=1e-6
        )
        assert spearman == pytest.approx(
            stats.spearmanr(turned["sigma"], turned[name]).statistic, abs=1e-6
        )
    label_free = [name for name in MEASURES if name != "logit_gt"]
    for key in ("auroc", "aurc", "risk_coverage", "accuracy_at_coverage", "thresholds"):
        assert list(found[key]) == label_free, key
    for name in label_free:
        assert found["auroc"][name] == pytest.approx(roc_auc_score(right, turned[name]))
        curve = found["risk_coverage"][name]
        assert curve["coverage"][-1] == 1
        assert curve["risk"][-1] == pytest.approx(1 - right.mean())
        best = np.argsort(-turned[name], kind="stable")[:29]  # 80 % of 36 images are 29
        assert found["accuracy_at_coverage"][name]["0.8"] == pytest.approx(right[best].mean())
    assert sum(each["images"] for each in found["reliability"]) == 36
    truth, predicted = ([row[name] for row in rows(labelled)] for name in ("truth", "prediction"))
    assert found["confusion"]["classes"] == CLASSES
    assert (
        found["confusion"]["counts"] == confusion_matrix(truth, predicted, labels=CLASSES).tolist()
    )
    assert found["oscillation"]["images"] == 15
    assert found["oscillation"]["total"] >= found["oscillation"]["floor"]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_evaluation_without_labels_holds_only_label_free_figures(unlabelled: certvol.Run) -> None:
    found = evaluation(unlabelled)
    assert found["labelled"] is False
    assert found["correlations"] is None
    assert set(found) == {"format", "images", "labelled", "measures", "correlations", "thresholds"}
    assert set(found["measures"]) == {
        "probability",
        "entropy",
        "logit",
        "logit_diff",
        "mcd_mu",
        "mcd_sigma",
    }
    assert set(found["thresholds"]) == set(found["measures"])


def test_labels_do_not_change_label_free_figures(root: Path, labelled: certvol.Run) -> None:
    flat = certvol.adapt(root / "source", root / "flat", out=root / "flat-cvp", **tiny())
    one, other = evaluation(labelled), evaluation(flat)
    assert other["thresholds"] == one["thresholds"]
    assert "logit_gt" not in other["correlations"]["pearson"]
    assert other["correlations"]["pearson"].items() <= one["correlations"]["pearson"].items()


def test_thresholds_accept_the_share_they_are_named_for(labelled: certvol.Run) -> None:
    for name, by_share in evaluation(labelled)["thresholds"].items():
        values = column(labelled, name)
        for share, threshold in by_share.items():
            passed = values >= threshold if MEASURES[name].more_is_certain else values <= threshold
            assert passed.sum() == math.ceil(float(share) * 36 - 1e-9), (name, share)


def test_batches_of_any_size_measure_the_same(labelled: certvol.Run) -> None:
    model = labelled.model()
    images = open_target(
        str(labelled.path.parent / "target"), cache_size(model.info.image_size), model.config.data
    )
    from certvol.data.augment import centre_view

    pixels = torch.from_numpy(images.pixels[images.rows])
    views = centre_view(pixels, model.info)
    kept = np.array([0, 4, 5, 35])
    settings = model.config.training
    whole, parts = (
        measuring.run_with_measures(
            model.method, torch.split(views, size), TARGET, settings, kept_K=kept
        )
        for size in (36, 5)
    )
    assert whole.labels_N.tolist() == parts.labels_N.tolist()
    for name, values in whole.measures.items():
        assert parts.measures[name] == pytest.approx(values, abs=1e-4), name
    assert parts.features_KD.shape == (4, 128)
    assert parts.features_KD == pytest.approx(whole.features_KD, abs=1e-4)


def made(right: list[bool], probability: list[float]) -> tuple[Outputs, NDArray[np.int64]]:
    """Outputs whose class is 0 where `right`, with the true classes: all 0."""
    labels = np.where(right, 0, 1)
    probabilities = np.zeros((len(right), 2), np.float32)
    probabilities[np.arange(len(right)), labels] = probability
    entropy = 1 - np.array(probability, np.float32)
    return Outputs(probabilities, None, {"entropy": entropy}), np.zeros(len(right), np.int64)


@pytest.mark.parametrize("right", [True, False], ids=["all right", "all wrong"])
def test_all_right_or_all_wrong(right: bool) -> None:
    measured, truth = made([right] * 4, [0.9, 0.8, 0.8, 0.7])
    found = measuring.certainty_figures(measured, ["a", "b"], truth)
    assert found["auroc"] == {"probability": None, "entropy": None}
    assert found["aurc"]["probability"] == (0 if right else 1)
    assert found["accuracy_at_coverage"]["entropy"] == dict.fromkeys(
        ("0.8", "0.9", "0.95"), 1.0 if right else 0.0
    )


def test_a_measure_that_falls_with_certainty_is_negated_for_figures() -> None:
    measured, truth = made([True, True, False, False], [0.9, 0.8, 0.3, 0.2])
    found = measuring.certainty_figures(measured, ["a", "b"], truth)
    assert found["auroc"] == {"probability": 1, "entropy": 1}
    assert found["thresholds"]["probability"]["0.5"] == pytest.approx(0.8)
    assert found["thresholds"]["entropy"]["0.5"] == pytest.approx(0.2)


def test_a_linear_classifier_of_an_office_task_oscillates_for_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One layer is interpolated at 31 numbers a point; two are multiplied at every point."""

    def cheap(layers: int) -> bool:
        shapes = [(2048, 2048), (31, 2048)][-layers:]
        found = [(torch.empty(shape, device="cpu"), torch.empty(shape[0])) for shape in shapes]
        monkeypatch.setattr(measuring, "linear_layers", lambda method: found)
        return measuring.oscillation_is_cheap(5 * 31, None)  # type: ignore[arg-type]

    assert (cheap(1), cheap(2)) == (True, False)


def test_one_image_and_long_curves() -> None:
    measured, truth = made([True], [0.5])
    assert measuring.certainty_figures(measured, ["a", "b"], truth)["risk_coverage"]["entropy"] == {
        "coverage": [1],
        "risk": [0],
    }
    measured, truth = made([True] * 5000, list(np.linspace(0, 1, 5000)))
    curve = measuring.certainty_figures(measured, ["a", "b"], truth)["risk_coverage"]["probability"]
    assert len(curve["coverage"]) == len(curve["risk"]) == 200


def test_open_set_by_hand() -> None:
    known, _ = made([True] * 4, [0.9, 0.8, 0.7, 0.6])
    unknown, _ = made([True] * 2, [0.65, 0.1])
    found = measuring.open_set_figures(known, unknown)
    assert found == {
        "images": 2,
        "auroc": {"probability": 7 / 8, "entropy": 7 / 8},
        "fpr_at_95_tpr": {"probability": 0.5, "entropy": 0.5},
    }


def test_another_measure_is_recommended_only_if_it_is_clearly_better() -> None:
    def choice(sigma: float | None, entropy: float, usual: str = "sigma") -> str:
        return measuring.recommended({"entropy": entropy, "sigma": sigma}, 60, 40, usual)

    spread = metrics.auroc_spread(0.9, 60, 40)
    assert choice(0.9 - 1.1 * spread, 0.9) == "entropy"
    assert choice(0.9 - 0.9 * spread, 0.9) == "sigma"
    assert choice(0.9, 0.5) == choice(None, 0.9) == "sigma"
    assert choice(0.9, 0.5, "entropy") == "sigma"
    assert choice(0.5, 0.9, "entropy") == "entropy"
