"""The mean of 18 shifted and mirrored views: in training, evaluation, prediction and export."""

from pathlib import Path

import numpy as np
import pytest
import torch

import certvol
from certvol import api
from certvol.data.augment import cache_size, centre_view, shifted_views
from certvol.errors import UserError
from certvol.nn.backbones import create_backbone
from certvol.predict import export
from certvol.predict.evaluate import evaluate
from certvol.predict.extract import shifted_features
from support.images import tiny, tiny_head
from support.tables import rows_of

SHIFTED = {"data.view_set": "shifted", "method.name": "rwa", "method.steps": 3}


@pytest.fixture(scope="module")
def run(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shifted") / "run"
    api.adapt(*folders, out, **{**tiny_head(method__name="rwa"), **SHIFTED})
    return out


def test_the_square_has_room_for_two_shifts_of_a_seventh() -> None:
    assert [cache_size(side, "shifted") for side in (224, 299, 8)] == [288, 385, 10]
    assert cache_size(224) == 256


def test_views_are_nine_crops_and_their_mirror_images() -> None:
    info = create_backbone("small_cnn", None, 8)[1]
    pixels = torch.randint(0, 256, (2, 10, 10, 3), dtype=torch.uint8)
    found = list(shifted_views(pixels, info))
    expected = []
    for down in range(3):
        for right in range(3):
            crop = centre_view(pixels[:, down : down + 8, right : right + 8], info)
            expected += [crop, torch.flip(crop, dims=[3])]
    assert len(found) == 18
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(found[8], centre_view(pixels, info)), "the middle one is the centre"


def test_features_are_the_mean_over_the_views() -> None:
    module, info = create_backbone("small_cnn", None, 8)
    module.eval()
    pixels = torch.randint(0, 256, (3, 10, 10, 3), dtype=torch.uint8)
    with torch.no_grad():
        each = np.array([module(view).numpy() for view in shifted_views(pixels, info)])
    assert shifted_features(module, pixels, info) == pytest.approx(each.mean(axis=0), abs=1e-5)


def test_evaluation_and_prediction_repeat_what_the_run_predicted(
    run: Path, folders: tuple[Path, Path]
) -> None:
    rows = rows_of(run / "predictions.csv")
    model = certvol.load(run)
    found = model.predict([folders[1] / row["path"] for row in rows])
    assert found.labels == [row["label"] for row in rows]
    shown = [float(row["probability"]) for row in rows]
    assert found.probabilities.max(axis=1) == pytest.approx(shown, abs=1e-4)
    metrics = evaluate(run, folders[1])
    assert metrics["adapted"]["accuracy"] == pytest.approx(
        np.mean([row["label"] == row["path"].split("/")[0] for row in rows])
    )


def test_an_extracted_file_holds_one_view_and_says_so(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    network = {"backbone": "small_cnn"}
    shifted = {"image_size": 8, "view_set": "shifted"}
    api.extract(folders[0], tmp_path / "f.npz", model=network, data=shifted)
    with np.load(tmp_path / "f.npz") as file:
        assert file["features"].ndim == 2
        assert str(file["about"]).endswith("mean of shifted views")
    api.extract(folders[1], tmp_path / "plain.npz", model=network, data={"image_size": 8})
    with pytest.raises(UserError, match="extract both with the same backbone"):
        api.adapt(tmp_path / "f.npz", tmp_path / "plain.npz", tmp_path / "run", **tiny_head())


def test_an_exported_model_averages_the_views_too(run: Path) -> None:
    model = certvol.load(run, "cpu")
    module = export.ExportedShifted(model.method, model.temperature).eval()
    metadata = export.describe(run, model)
    assert metadata["input_size"] == 10
    pixels = torch.randint(0, 256, (4, 10, 10, 3), dtype=torch.uint8)
    program = export._program(module, metadata)
    found = torch.softmax(program.module()(pixels)[0], dim=1)
    assert found.numpy() == pytest.approx(model.predict(pixels).probabilities, abs=1e-4)


def test_a_trained_backbone_cannot_average_views(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"set `model.train head`"):
        api.adapt(*folders, tmp_path / "run", **{**tiny(), "data.view_set": "shifted"})
    assert not (tmp_path / "run").exists()
