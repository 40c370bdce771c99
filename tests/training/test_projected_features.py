"""Runs on frozen features that are reduced to fewer dimensions before training."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import certvol
from certvol import api
from certvol.api import resolve_settings
from certvol.errors import Interrupted, RunFailed
from certvol.predict.export import export
from certvol.settings import read_settings_file
from support.images import tiny, write_domain
from support.stop_at import StopAt

DIM, DIMS, CLASSES = 40, 10, 3


def write_features(path: Path, shift: float, seed: int) -> Path:
    rng, means = np.random.default_rng(seed), np.random.default_rng(9).normal(size=(CLASSES, DIM))
    labels = np.arange(45) % CLASSES
    features = means[labels] + rng.normal(size=(45, DIM)) * 0.5 + shift
    np.savez(path, features=features.astype(np.float32), labels=labels)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("files")
    return write_features(root / "s.npz", 0.0, 0), write_features(root / "t.npz", 0.2, 1)


def head(**changed: Any) -> dict[str, Any]:
    given = {"model__train": "head", "model__norm": "auto", "model__feature_dims": DIMS, **changed}
    return tiny(training__pretrain_steps=40, **given)


@pytest.fixture(scope="module")
def run(files: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certvol.adapt(*files, out=tmp_path_factory.mktemp("run") / "run", **head()).path


@pytest.mark.parametrize("preset", ["paper", "authors"])
def test_presets_that_reproduce_keep_all_dimensions(preset: str) -> None:
    assert resolve_settings(preset).model.feature_dims == 0


def test_the_delivered_model_takes_features_as_they_are(
    run: Path, files: tuple[Path, Path], tmp_path: Path
) -> None:
    tensors = load_file(run / "model.safetensors")
    assert tensors["network.projection.basis_DR"].shape == (DIM, DIMS)
    assert tensors["network.classifier.output.weight"].shape == (CLASSES, DIMS)
    assert read_settings_file(run / "config.yaml")["model.feature_dims"] == DIMS
    with (run / "predictions.csv").open() as file:
        table = {int(row["path"]): row for row in csv.DictReader(file)}
    features = np.load(files[1])["features"]
    found = certvol.load(run, "cpu").predict(features)
    assert found.labels == [table[i]["label"] for i in range(len(features))]
    expected = [float(table[i]["probability"]) for i in range(len(features))]
    np.testing.assert_allclose(found.probabilities.max(axis=1), expected, atol=1e-4)
    before = certvol.load(run, "cpu", "pretrained")
    assert torch.equal(
        before.method.network.projection.basis_DR,  # type: ignore[union-attr]
        tensors["network.projection.basis_DR"],
    )
    metadata = export(run, tmp_path / "m.pt2", "torch")
    assert metadata["input_size"] == DIM


def test_evaluation_gives_the_accuracy_of_the_run(run: Path, files: tuple[Path, Path]) -> None:
    metrics = json.loads((run / "metrics.json").read_text())
    found = api.evaluate(run, files[1], "cpu")
    for model in ("source_only", "adapted"):
        assert found[model] == metrics[model]


@pytest.mark.parametrize("teacher", [0.0, 0.9])
def test_a_resumed_run_ends_with_the_same_bytes(
    teacher: float, files: tuple[Path, Path], tmp_path: Path
) -> None:
    given = head(training__teacher=teacher)
    whole = certvol.adapt(*files, out=tmp_path / "whole", **given).path
    with pytest.raises(Interrupted):
        certvol.adapt(*files, out=tmp_path / "parts", stop_signal=StopAt(45), **given)
    certvol.adapt(resume=tmp_path / "parts")
    for name in ("model.safetensors", "predictions.csv", "history.jsonl"):
        assert (tmp_path / "parts" / name).read_bytes() == (whole / name).read_bytes(), name


def test_a_resumed_run_reads_the_projection_that_it_began_with(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    with pytest.raises(Interrupted):
        certvol.adapt(*files, out=out, stop_signal=StopAt(45), **head())
    monkeypatch.setattr("certvol.training.setup.fit_projection", None)
    place = out / "checkpoint" / "projection.safetensors"
    kept = place.read_bytes()
    certvol.adapt(resume=out)
    assert load_file(out / "model.safetensors")["network.projection.basis_DR"].shape == (DIM, DIMS)
    place.write_bytes(kept[:100])
    (out / "model.safetensors").unlink()
    with pytest.raises(RunFailed, match="damaged"):
        certvol.adapt(resume=out)


@pytest.mark.parametrize("method", ["can", "mstn", "rsda_mstn", "symnets", "ubr2s", "coral"])
def test_methods_with_networks_of_their_own_train_in_fewer_dimensions(
    method: str, files: tuple[Path, Path], tmp_path: Path
) -> None:
    given = head(method__name=method, training__cycles=1)
    finished = certvol.adapt(*files, out=tmp_path / "run", **given)
    assert certvol.load(finished.path, "cpu").predict(np.load(files[1])["features"]).labels


def test_features_of_images_are_projected_too(tmp_path: Path) -> None:
    folders = write_domain(tmp_path / "s"), write_domain(tmp_path / "t", shift=20, seed=1)
    finished = certvol.adapt(*folders, out=tmp_path / "run", **head(data__views=2))
    model = certvol.load(finished.path, "cpu")
    assert model.method.network.dim == DIMS
    with (finished.path / "predictions.csv").open() as file:
        table = list(csv.DictReader(file))
    found = model.predict([folders[1] / row["path"] for row in table])
    assert found.labels == [row["label"] for row in table]
