"""The files that a run leaves at its end."""

import csv
import io
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

import certvol
from certvol.predict.forward import Outputs
from certvol.predict.outcome import feature_images, measures_csv, predictions_csv
from certvol.runs.checkpoint import read_about
from certvol.scores.uncertainty import MEASURES
from support.run_folders import read_table

PATHS = [
    "=cmd.png",
    "+1.png",
    "-2.png",
    "@x.png",
    "\tt.png",
    "a,b.png",
    'q".png',
    "new\nline.png",
    "plain.png",
]


def test_no_cell_is_a_formula_and_paths_stay_valid() -> None:
    probabilities_NC = np.tile(np.array([[0.2, 0.8]], np.float32), (len(PATHS), 1))
    outputs = Outputs(probabilities_NC, np.arange(len(PATHS), dtype=np.float32))
    text = predictions_csv(PATHS, ["a", "=SUM(1)"], outputs)
    rows = list(csv.DictReader(io.StringIO(text)))
    for row in rows:
        assert not any(cell.startswith(("=", "+", "-", "@", "\t", "\r")) for cell in row.values())
        assert row["label"] == "'=SUM(1)"
    assert sorted(row["path"].removeprefix("./") for row in rows) == sorted(PATHS)
    assert {row["path"] for row in rows if row["path"].startswith("./")} == {
        f"./{p}" for p in PATHS[:5]
    }


def test_numbers_are_read_back_exactly() -> None:
    sigma = np.random.default_rng(0).random(50).astype(np.float32)
    text = predictions_csv(
        [str(i) for i in range(50)], ["a"], Outputs(np.ones((50, 1), np.float32), sigma)
    )
    read = {row["path"]: np.float32(row["sigma"]) for row in csv.DictReader(io.StringIO(text))}
    assert all(read[str(i)] == sigma[i] for i in range(50))


def test_a_method_without_sigma_leaves_the_column_empty() -> None:
    text = predictions_csv(["x"], ["a"], Outputs(np.ones((1, 1), np.float32), None))
    assert text.splitlines() == ["path,label,probability,sigma", "x,a,1.0000,"]


def test_measures_agree_with_predictions(labelled: certvol.Run) -> None:
    measures, predictions = (
        read_table(labelled.path / name) for name in ("measures.csv", "predictions.csv")
    )
    assert list(measures[0]) == ["path", "prediction", "truth", *MEASURES]
    for measured, predicted in zip(measures, predictions, strict=True):
        assert measured["path"] == predicted["path"]
        assert measured["prediction"] == predicted["label"]
        assert measured["truth"] == measured["path"].split("/")[0]
        assert f"{float(measured['probability']):.4f}" == predicted["probability"]
        assert measured["sigma"] == predicted["sigma"]


def test_features_are_those_of_both_models(labelled: certvol.Run) -> None:
    path = labelled.path / "features.safetensors"
    assert read_about(path) == {}
    features = load_file(path)
    assert sorted(features["indices"].tolist()) == list(range(36))
    files = [
        labelled.path.parent / "target" / read_table(labelled.path / "measures.csv")[i]["path"]
        for i in features["indices"]
    ]
    for name, which, statistics in (("adapted", "delivered", 1), ("pretrained", "pretrained", 0)):
        model = certvol.load(labelled.path, which=which)  # type: ignore[arg-type]
        with torch.no_grad(), model.method.network.rows_of(domain=statistics):
            expected = model.method.network.features(model._view(files))
        assert features[name].dtype == torch.float16
        assert torch.allclose(features[name].float(), expected, atol=2e-2, rtol=2e-3), name
    assert not torch.equal(features["adapted"], features["pretrained"])


def test_features_of_at_most_2000_images_are_kept() -> None:
    images = feature_images(5000, seed=0)
    assert len(np.unique(images)) == 2000
    assert (np.diff(images) > 0).all()
    assert images.max() < 5000
    assert not np.array_equal(images, feature_images(5000, seed=1))
    assert feature_images(3, seed=0).tolist() == [0, 1, 2]


def test_names_in_measures_are_not_formulas(tmp_path: Path) -> None:
    outputs = Outputs(np.array([[1.0, 0.0]], np.float32))
    path = tmp_path / "measures.csv"
    path.write_text(measures_csv(["=cmd\r|\n.png"], ["=1+1", "b"], outputs, np.array([0])))
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert row["path"] == "./=cmd\r|\n.png"
    assert row["prediction"] == row["truth"] == "'=1+1"
