"""What a run and `certvol evaluate` say about certainty, with and without labels, with and without sigma."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from scipy import stats
from sklearn.metrics import confusion_matrix, roc_auc_score

import certvol
from certvol import analysis
from certvol.analysis import Measured
from certvol.cli import run as cli
from certvol.data.augment import cache_size
from certvol.data.domains import open_target
from certvol.inference import Outputs
from certvol.nn.norm import TARGET
from certvol.training.checkpoint import read_about
from certvol.uncertainty import MEASURES
from images import tiny, write_domain

COLUMNS = "path prediction truth probability entropy sigma logit logit_gt logit_diff mcd_mu mcd_sigma".split()
CLASSES = ["apple", "leaf", "sky"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("analysis")
    write_domain(root / "source")
    write_domain(root / "target", shift=60, seed=1)
    write_domain(root / "flat", shift=60, seed=1, flat=True)
    for number in range(4):  # so that some predictions are wrong
        swapped = [(root / "target" / name / f"{number}.png") for name in ("apple", "leaf")]
        contents = [path.read_bytes() for path in swapped]
        for path, content in zip(swapped, reversed(contents), strict=True):
            path.write_bytes(content)
    return root


@pytest.fixture(scope="module")
def labelled(root: Path) -> certvol.Run:
    return certvol.adapt(root / "source", root / "target", out=root / "labelled", **tiny())


@pytest.fixture(scope="module")
def unlabelled(root: Path) -> certvol.Run:
    """Without labels, and by a method without sigma."""
    return certvol.adapt(root / "source", root / "flat", out=root / "unlabelled", **tiny(method__name="basic"))


def rows(run: certvol.Run, name: str = "measures.csv") -> list[dict[str, str]]:
    with (run.path / name).open(newline="") as file:
        return list(csv.DictReader(file))


def evaluation(run: certvol.Run) -> dict[str, Any]:
    return dict(json.loads((run.path / "evaluation.json").read_text()))


def column(run: certvol.Run, name: str) -> NDArray[np.float32]:
    return np.array([row[name] for row in rows(run)], dtype=np.float32)


def test_measures_go_with_predictions(labelled: certvol.Run) -> None:
    measures, predictions = rows(labelled), rows(labelled, "predictions.csv")
    assert list(measures[0]) == COLUMNS
    for measured, predicted in zip(measures, predictions, strict=True):
        assert measured["path"] == predicted["path"]
        assert measured["prediction"] == predicted["label"]
        assert measured["truth"] == measured["path"].split("/")[0]
        assert measured["probability"] == predicted["probability"]
        assert measured["sigma"] == predicted["sigma"]


def test_every_measure_is_what_its_definition_says(labelled: certvol.Run) -> None:
    """From the images again, in plain PyTorch."""
    model = labelled.model()
    paths = [labelled.path.parent / "target" / row["path"] for row in rows(labelled)]
    probabilities = torch.from_numpy(model.predict(paths).probabilities)
    truth = torch.tensor([CLASSES.index(row["truth"]) for row in rows(labelled)])
    images = model._view(paths)
    with torch.no_grad(), model.method.network.rows_of(domain=TARGET):
        logits = model.method.network.classifier(model.method.network.features(images))
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
        assert {name for name in COLUMNS if row[name] == ""} == {"truth", "sigma", "logit_gt"}


def test_evaluation_of_a_labelled_run_against_scipy_and_scikit_learn(labelled: certvol.Run) -> None:
    found = evaluation(labelled)
    right = np.array([row["prediction"] == row["truth"] for row in rows(labelled)])
    assert 0 < right.sum() < len(right), "both kinds are needed here"
    assert found["images"] == 36
    assert found["labelled"] is True
    assert found["accuracy"] == pytest.approx(right.mean())
    turned = {name: column(labelled, name) * (1 if about.more_is_certain else -1) for name, about in MEASURES.items()}
    assert list(found["correlations"]["pearson"]) == ["logit", "logit_gt", "logit_diff", "mcd_mu", "mcd_sigma"]
    for name in found["correlations"]["pearson"]:
        pearson, spearman = (found["correlations"][kind][name] for kind in ("pearson", "spearman"))
        assert pearson == pytest.approx(stats.pearsonr(turned["sigma"], turned[name]).statistic, abs=1e-6)
        assert spearman == pytest.approx(stats.spearmanr(turned["sigma"], turned[name]).statistic, abs=1e-6)
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
    assert found["confusion"]["counts"] == confusion_matrix(truth, predicted, labels=CLASSES).tolist()
    assert found["oscillation"]["images"] == 15
    assert found["oscillation"]["total"] >= found["oscillation"]["floor"]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_evaluation_without_labels_leaves_out_what_needs_them(unlabelled: certvol.Run) -> None:
    found = evaluation(unlabelled)
    assert found["labelled"] is False
    assert found["correlations"] is None
    assert set(found) == {"format", "images", "labelled", "measures", "correlations", "thresholds"}
    assert set(found["measures"]) == {"probability", "entropy", "logit", "logit_diff", "mcd_mu", "mcd_sigma"}
    assert set(found["thresholds"]) == set(found["measures"])


def test_labels_do_not_change_label_free_figures(root: Path, labelled: certvol.Run) -> None:
    flat = certvol.adapt(root / "source", root / "flat", out=root / "flat-cvp", **tiny())
    one, other = evaluation(labelled), evaluation(flat)
    assert other["thresholds"] == one["thresholds"]
    assert "logit_gt" not in other["correlations"]["pearson"]
    assert other["correlations"]["pearson"].items() <= one["correlations"]["pearson"].items()


def test_thresholds_cover_what_they_say(labelled: certvol.Run) -> None:
    for name, by_share in evaluation(labelled)["thresholds"].items():
        values = column(labelled, name)
        for share, threshold in by_share.items():
            passed = values >= threshold if MEASURES[name].more_is_certain else values <= threshold
            assert passed.sum() == math.ceil(float(share) * 36 - 1e-9), (name, share)


def test_features_are_those_of_both_models(labelled: certvol.Run) -> None:
    path = labelled.path / "features.safetensors"
    assert read_about(path) == {"format": "certvol/1"}
    features = load_file(path)
    assert sorted(features["indices"].tolist()) == list(range(36))
    files = [labelled.path.parent / "target" / rows(labelled)[i]["path"] for i in features["indices"]]
    for name, which, statistics in (("adapted", "model", 1), ("pretrained", "pretrained", 0)):
        model = certvol.load(labelled.path, which=which)  # type: ignore[arg-type]
        with torch.no_grad(), model.method.network.rows_of(domain=statistics):
            expected = model.method.network.features(model._view(files))
        assert features[name].dtype == torch.float16
        assert torch.allclose(features[name].float(), expected, atol=2e-2, rtol=2e-3), name
    assert not torch.equal(features["adapted"], features["pretrained"])


def test_at_most_2000_images_show_their_features() -> None:
    images = analysis.feature_images(5000, seed=0)
    assert len(np.unique(images)) == 2000
    assert (np.diff(images) > 0).all()
    assert images.max() < 5000
    assert not np.array_equal(images, analysis.feature_images(5000, seed=1))
    assert analysis.feature_images(3, seed=0).tolist() == [0, 1, 2]


def test_batches_of_any_size_measure_the_same(labelled: certvol.Run) -> None:
    model = labelled.model()
    images = open_target(str(labelled.path.parent / "target"), cache_size(model.info.image_size), model.config.data)
    from certvol.data.augment import test_view

    pixels = torch.from_numpy(images.pixels[images.rows])
    views = test_view(pixels, model.info.image_size, model.info.mean, model.info.std)
    kept = np.array([0, 4, 5, 35])
    settings = model.config.training
    whole, parts = (
        analysis.measure(model.method, views.split(size), TARGET, settings, kept_K=kept) for size in (36, 5)
    )
    assert whole.predicted_N.tolist() == parts.predicted_N.tolist()
    for name, values in whole.values.items():
        assert parts.values[name] == pytest.approx(values, abs=1e-4), name
    assert parts.features_KD.shape == (4, 128)
    assert parts.features_KD == pytest.approx(whole.features_KD, abs=1e-4)


def made(right: list[bool], probability: list[float]) -> tuple[Measured, NDArray[np.int64]]:
    values = np.array(probability, dtype=np.float32)
    truth = np.zeros(len(right), np.int64)
    predicted = np.where(right, 0, 1).astype(np.int64)
    return Measured(predicted, {"probability": values, "entropy": 1 - values}, np.empty((0, 0), np.float32)), truth


@pytest.mark.parametrize("right", [True, False], ids=["all right", "all wrong"])
def test_all_right_or_all_wrong(right: bool) -> None:
    measured, truth = made([right] * 4, [0.9, 0.8, 0.8, 0.7])
    found = analysis.figures(measured, ["a", "b"], truth)
    assert found["auroc"] == {"probability": None, "entropy": None}
    assert found["aurc"]["probability"] == (0 if right else 1)
    assert found["accuracy_at_coverage"]["entropy"] == dict.fromkeys(("0.8", "0.9", "0.95"), 1.0 if right else 0.0)


def test_a_measure_that_points_down_is_turned() -> None:
    measured, truth = made([True, True, False, False], [0.9, 0.8, 0.3, 0.2])
    found = analysis.figures(measured, ["a", "b"], truth)
    assert found["auroc"] == {"probability": 1, "entropy": 1}
    assert found["thresholds"]["probability"]["0.5"] == pytest.approx(0.8)
    assert found["thresholds"]["entropy"]["0.5"] == pytest.approx(0.2)


def test_a_linear_classifier_of_an_office_task_oscillates_for_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer is interpolated at 31 numbers a point; two are multiplied at every point."""

    def cheap(layers: int) -> bool:
        shapes = [(2048, 2048), (31, 2048)][-layers:]
        found = [(torch.empty(shape, device="cpu"), torch.empty(shape[0])) for shape in shapes]
        monkeypatch.setattr(analysis, "linear_layers", lambda method: found)
        return analysis.oscillation_is_cheap(5 * 31, None)  # type: ignore[arg-type]

    assert (cheap(1), cheap(2)) == (True, False)


def test_one_image_and_long_curves() -> None:
    measured, truth = made([True], [0.5])
    assert analysis.figures(measured, ["a", "b"], truth)["risk_coverage"]["entropy"] == {"coverage": [1], "risk": [0]}
    measured, truth = made([True] * 5000, list(np.linspace(0, 1, 5000)))
    curve = analysis.figures(measured, ["a", "b"], truth)["risk_coverage"]["probability"]
    assert len(curve["coverage"]) == len(curve["risk"]) == 200


def test_open_set_by_hand() -> None:
    known, _ = made([True] * 4, [0.9, 0.8, 0.7, 0.6])
    unknown, _ = made([True] * 2, [0.65, 0.1])
    found = analysis.open_set(known, unknown)
    assert found == {
        "images": 2,
        "auroc": {"probability": 7 / 8, "entropy": 7 / 8},
        "fpr_at_95_tpr": {"probability": 0.5, "entropy": 0.5},
    }


def test_names_are_escaped(tmp_path: Path) -> None:
    measured = analysis.measured_by(Outputs(np.array([[1.0, 0.0]], np.float32), None))
    path = tmp_path / "measures.csv"
    analysis.write_measures(path, ["=cmd\r|\n.png"], ["=1+1", "b"], measured, np.array([0]))
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["path"] == "./=cmd\r|\n.png"
    assert row["prediction"] == row["truth"] == "'=1+1"


def test_evaluate_gives_what_the_run_has_written(
    labelled: certvol.Run, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    words = ["evaluate", str(labelled.path), "--data", str(root / "target"), "--json", str(out), "--oscillation"]
    assert cli([*words, "--unknown", str(root / "source" / "sky")]) == 0
    found, written = json.loads(out.read_text()), evaluation(labelled)
    assert set(written) <= set(found)
    assert found["confusion"] == written["confusion"]
    assert found["oscillation"]["total"] == pytest.approx(written["oscillation"]["total"], abs=0.005)
    for key in ("auroc", "aurc", "ece"):
        assert found[key] == pytest.approx(written[key], abs=1e-3), key
    assert found["unknown"]["images"] == 12
    assert set(found["unknown"]["auroc"]) == set(found["auroc"])
    printed = capsys.readouterr().out
    for words_of_a_table in ("AUROC", "Pearson", "FPR at 95 % TPR", "oscillation", "AURC", "90 % kept"):
        assert words_of_a_table in printed
    assert f"{found['auroc']['sigma']:.3f}" in printed


def test_evaluate_of_a_method_without_sigma(
    unlabelled: certvol.Run, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = certvol.evaluate(unlabelled.path, root / "target")
    assert found["correlations"] is None
    assert "sigma" not in found["auroc"]
    assert "oscillation" not in found
    assert cli(["evaluate", str(unlabelled.path), "--data", str(root / "target")]) == 0
    printed = capsys.readouterr().out
    assert "AUROC" in printed
    assert "Pearson" not in printed


def test_an_unknown_folder_that_is_not_there(
    labelled: certvol.Run, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(["evaluate", str(labelled.path), "--data", str(root / "target"), "--unknown", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.slow
def test_held_back_digits_are_less_certain(tmp_path: Path) -> None:
    """Trained without the digits 8 and 9, a run is less certain of them than of those it knows, by every measure of one pass."""
    from certvol.data.digits import write_digits

    source, target = write_digits(tmp_path / "digits", per_class=100)
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    for digit in "89":
        for folder in (source, target):
            place = unknown / digit if folder == target else tmp_path / f"unused-{digit}"
            (folder / digit).rename(place)
    settings = {
        "augment.flip": False,
        "data.image_size": 16,
        "model.norm": "per_domain",
        "training.pretrain_steps": 200,
        "training.cycles": 15,
        "training.device": "cpu",
    }
    run = certvol.adapt(source, target, out=tmp_path / "run", preset="quick", **settings)
    found = certvol.evaluate(run.path, target, unknown=unknown)
    assert len(found["confusion"]["classes"]) == 8
    assert found["unknown"]["images"] == 354
    for name in ("sigma", "probability", "entropy", "logit", "logit_diff", "mcd_mu"):
        assert found["unknown"]["auroc"][name] > 0.6, (name, found["unknown"])
        assert found["unknown"]["fpr_at_95_tpr"][name] < 0.95, (name, found["unknown"])
