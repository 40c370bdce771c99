"""Runs on frozen features, from images and from files of features, by the command line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import certvol
from certvol import api
from certvol.cli import _main as cli
from certvol.errors import Interrupted
from certvol.methods import discover
from support.commands import words_of
from support.images import HUES, tiny_head, write_domain
from support.run_folders import read_table
from support.stop_at import StopAt

CLOSED_FORM = [name for name, method in discover().items() if method.closed_form]


def test_images_are_predicted_like_their_features(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    run = certvol.adapt(*folders, out=tmp_path / "run", **tiny_head(model__adapter=True))
    before, after = (
        load_file(run.path / f"{name}.safetensors") for name in ("pretrained", "model")
    )
    left_out = after.keys() - before.keys()
    assert left_out
    assert all(name.startswith("network.backbone.") for name in left_out)
    assert not torch.equal(before["network.adapter.up.weight"], after["network.adapter.up.weight"])
    table = {row["path"]: row for row in read_table(run.path / "predictions.csv")}
    model = certvol.load(run.path, "cpu")
    paths = sorted(table)
    found = model.predict([folders[1] / path for path in paths])
    assert found.labels == [table[path]["label"] for path in paths]
    assert found.sigma is not None
    assert np.allclose(found.sigma, [float(table[path]["sigma"]) for path in paths], atol=1e-4)
    figures = api.evaluate(run.path, folders[1], "cpu")
    assert run.metrics is not None
    for name in ("source_only", "adapted"):
        assert figures[name]["accuracy"] == run.metrics[name]["accuracy"]


@pytest.mark.parametrize("teacher", [0.0, 0.9])
def test_a_frozen_backbone_is_stored_once(
    teacher: float, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = tiny_head(
        guard__keep="all", training__teacher=teacher, training__checkpoint_seconds=0
    )
    run = certvol.adapt(*folders, out=tmp_path / "run", **settings)
    files = sorted(run.path.rglob("*.safetensors"))
    assert len([file for file in files if file.name.startswith(("best-", "state-"))]) > 4
    model = load_file(run.path / "model.safetensors")
    backbone = sum(t.nbytes for name, t in model.items() if name.startswith("network.backbone."))
    heads = sum(t.nbytes for name, t in model.items()) - backbone
    assert backbone > 2 * heads
    for file in files:
        assert ("network.backbone" in file.read_bytes().decode("latin-1")) == (
            file.name == "model.safetensors"
        ), file
    without_model = sum(file.stat().st_size for file in files) - model_size(run.path)
    assert without_model < 30 * heads + 100_000


def model_size(run: Path) -> int:
    return (run / "model.safetensors").stat().st_size


@pytest.mark.parametrize("method", ["cvp", "coral"])
def test_files_of_features_go_from_extract_to_predictions(
    method: str, files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, settings = tmp_path / "run", tiny_head(method__name=method)
    settings.pop("model.backbone")
    settings |= {"source": files[0], "target": files[1], "out": run}
    assert cli.run(["adapt", *words_of(settings)]) == 0
    table = read_table(run / "predictions.csv")
    assert {row["path"] for row in table} == {f"{name}/{i}.png" for name in HUES for i in range(12)}
    right = np.mean([row["label"] == row["path"].split("/")[0] for row in table])
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["adapted"]["accuracy"] == pytest.approx(right)
    places = {"out": tmp_path / "p.csv", "device": "cpu"}
    assert cli.run(["predict", str(run), str(files[1]), *words_of(places)]) == 0
    assert (tmp_path / "p.csv").read_bytes() == (run / "predictions.csv").read_bytes()
    evaluated = tmp_path / "e.json"
    places = {"data": files[1], "json": evaluated, "device": "cpu"}
    assert cli.run(["evaluate", str(run), *words_of(places)]) == 0
    assert json.loads(evaluated.read_text())["adapted"] == metrics["adapted"]
    capsys.readouterr()
    absent = str(files[0].parent / "nothing.npz")
    assert cli.run(["predict", str(run), absent, "--out", str(tmp_path / "q.csv")]) == 2
    assert "there is no file" in capsys.readouterr().err


def test_a_run_on_files_resumes_to_the_same_bytes(files: tuple[Path, Path], tmp_path: Path) -> None:
    whole = certvol.adapt(*files, out=tmp_path / "whole", **tiny_head()).path
    with pytest.raises(Interrupted):
        certvol.adapt(*files, out=tmp_path / "parts", stop_signal=StopAt(45), **tiny_head())
    certvol.adapt(resume=tmp_path / "parts")
    for name in ("model.safetensors", "predictions.csv", "history.jsonl"):
        assert (tmp_path / "parts" / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.parametrize("method", ["coral", "jda", "gtda", "rwa", "adrem", "prda"])
def test_removing_a_shift_is_not_mistaken_for_a_collapse(method: str, tmp_path: Path) -> None:
    """The target's mean moves from one class towards another.

    A fitted model classifies by the target's mean, so held-out source images get wrong classes.
    This does no harm.
    """
    rng = np.random.default_rng(0)
    means_CD, labels_N = 0.8 * rng.normal(size=(5, 32)), np.repeat(np.arange(5), 60)
    shift_D = 2 * (means_CD[0] - means_CD[1])
    for name, moved_D in (("source", 0 * shift_D), ("target", shift_D)):
        rows_ND = means_CD[labels_N] + rng.normal(size=(300, 32)) + moved_D
        np.savez(tmp_path / f"{name}.npz", features=rows_ND.astype(np.float32), labels=labels_N)
    given: dict[str, Any] = {
        "method.name": method,
        "training.pretrain_steps": 100,
        "training.batch_size": 64,
        "training.device": "cpu",
    }
    run = certvol.adapt(
        tmp_path / "source.npz", tmp_path / "target.npz", out=tmp_path / "run", **given
    )
    assert run.delivery.model == "last"
    assert run.metrics is not None
    assert run.metrics["source_only"]["accuracy"] < 0.5
    if method in ("coral", "gtda", "prda"):  # the others take both domains' features as they are
        assert run.metrics["adapted"]["accuracy"] > 0.9


def test_extract_writes_labels_only_from_class_folders(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    flat = write_domain(tmp_path / "flat", per_class=2, flat=True)
    model, data = {"backbone": "small_cnn", "weights": "none"}, {"image_size": 8, "views": 3}
    api.extract(flat, tmp_path / "flat.npz", model=model, data=data)
    with np.load(tmp_path / "flat.npz", allow_pickle=False) as file:
        assert sorted(file.files) == ["about", "features", "paths"]
        assert file["features"].shape[:2] == (6, 3)
    for folder, out in ((flat, "f.csv"), (tmp_path / "no", "f.npz")):
        words = words_of({"backbone": "small_cnn", "out": tmp_path / out})
        assert cli.run(["extract", str(folder), *words]) == 2


@pytest.mark.parametrize("given", [pytest.param("images", marks=pytest.mark.slow), "files"])
def test_a_run_on_features_is_measured_reported_and_exported(
    given: str,
    files: tuple[Path, Path],
    folders: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, target = files if given == "files" else folders
    run = certvol.adapt(source, target, out=tmp_path / "run", **tiny_head(model__adapter=True))
    measures = read_table(run.path / "measures.csv")
    assert [row["path"] for row in measures] == [
        row["path"] for row in read_table(run.path / "predictions.csv")
    ]
    assert all(row["truth"] == row["path"].split("/")[0] for row in measures)
    evaluation = json.loads((run.path / "evaluation.json").read_text())
    assert run.metrics is not None
    assert evaluation["accuracy"] == run.metrics["adapted"]["accuracy"]
    assert evaluation["oscillation"]["images"] > 0

    # The features that are shown are those that the residual layer has moved.
    model, shown = certvol.load(run.path, "cpu"), load_file(run.path / "features.safetensors")
    network = model.method.network
    assert network.adapter is not None
    paths = [measures[i]["path"] for i in shown["indices"].tolist()]
    with torch.no_grad(), np.load(files[1]) as file:
        by_path = dict(zip(file["paths"].tolist(), torch.from_numpy(file["features"]), strict=True))
        views = torch.stack([by_path[path] for path in paths])
        given_ND = (
            views
            if given == "files"
            else network.backbone(model._view([folders[1] / path for path in paths]))
        )
        moved = network.features(given_ND)
    assert torch.allclose(moved, shown["adapted"].float(), rtol=1e-2, atol=1e-2)
    assert not torch.allclose(given_ND, shown["adapted"].float(), rtol=1e-2, atol=1e-2)

    for coverage, measure in ((0.5, "sigma"), (0.8, "entropy"), (0.8, "mcd_mu")):
        given_words = {"out": tmp_path / "p.csv", "device": "cpu"}
        given_words |= {"coverage": coverage, "measure": measure}
        assert cli.run(["predict", str(run.path), str(target), *words_of(given_words)]) == 0
        accepted = [row["accepted"] == "true" for row in read_table(tmp_path / "p.csv")]
        assert np.mean(accepted) == pytest.approx(coverage, abs=1.5 / len(accepted))

    exported = tmp_path / "model.pt2"
    assert cli.run(["export", str(run.path), "--format", "torch", "--out", str(exported)]) == 0
    assert f"input `{'features' if given == 'files' else 'images'}`" in capsys.readouterr().out
    assert cli.run(["report", str(run.path)]) == 0
    assert ("given features, not images" in (run.path / "report.html").read_text()) == (
        given == "files"
    )


def test_images_are_refused_by_a_model_of_features(
    files: tuple[Path, Path],
    folders: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = str(certvol.adapt(*files, out=tmp_path / "run", **tiny_head(training__cycles=1)).path)
    for command in (
        ["predict", run, str(folders[1]), "--out", "p.csv"],
        ["evaluate", run, "--data", str(folders[1])],
    ):
        assert cli.run([*command, "--device", "cpu"]) == 2
        assert "not images" in capsys.readouterr().err


def test_features_of_another_backbone_are_refused(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They may have as many dimensions, and predictions from them would be arbitrary."""
    run = str(certvol.adapt(*files, out=tmp_path / "run", **tiny_head(training__cycles=1)).path)
    with np.load(files[0]) as file:
        arrays = {name: file[name] for name in file.files}
    new, out = str(tmp_path / "new.npz"), str(tmp_path / "p.csv")
    commands = (
        ["predict", run, new, "--out", out],
        ["predict", run, new, "--out", out, "--use", "pretrained"],
        ["evaluate", run, "--data", new],
    )
    for about, code in (("another backbone", 2), ("", 0)):
        np.savez(new, **{**arrays, "about": np.array(about)})
        for command in commands:
            assert cli.run([*command, "--device", "cpu"]) == code
            assert ("made by another backbone" in capsys.readouterr().err) == (code == 2)


def test_rejected_rows_of_features_cannot_be_collected(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["predict", "run", str(files[1]), "--out", "p.csv", "--coverage", "0.5"]
    assert cli.run([*words, "--rejected-dir", str(tmp_path / "rejected")]) == 2
    assert "files of features hold none" in capsys.readouterr().err
    assert not (tmp_path / "rejected").exists()


@pytest.mark.parametrize("method", CLOSED_FORM)
def test_a_fitted_method_is_evaluated(
    method: str, files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = certvol.adapt(*files, out=tmp_path / "run", **tiny_head(method__name=method))
    assert run.metrics is not None
    found = api.evaluate(run.path, files[1], "cpu")
    assert found["adapted"] == run.metrics["adapted"]
    assert found["accuracy"] == run.metrics["adapted"]["accuracy"]
    out = tmp_path / "found.json"
    words = words_of({"data": files[1], "device": "cpu", "json": out})
    assert cli.run(["evaluate", str(run.path), "--oscillation", *words]) == 0
    said, written = capsys.readouterr(), json.loads(out.read_text())
    assert "the oscillation is left out" in said.err
    assert "AUROC" in said.out
    assert set(written) == {*found, "left_out"}
    assert written["auroc"] == found["auroc"]
    assert "linear layers" in written["left_out"]["oscillation"]


def test_rows_that_share_a_path_are_adapted_to_if_no_labels_are_given_by_path(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    with np.load(files[1]) as given:
        arrays = dict(given)
    arrays["paths"] = np.array(["frame.jpg"] * len(arrays["features"]))
    np.savez(tmp_path / "target.npz", **arrays)
    run = certvol.adapt(files[0], tmp_path / "target.npz", out=tmp_path / "run", **tiny_head())
    assert (run.path / "predictions.csv").read_text().count("frame.jpg") == len(arrays["paths"])
