"""Runs on frozen features, from images and from files of features, by the command line's own ways."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import certvol
from certvol import api, cli
from certvol.api import resolve_settings
from certvol.config import read_settings_file
from certvol.errors import Interrupted, UserError
from certvol.methods import discover
from certvol.nn.network import seeded_backbone
from images import HUES, tiny, write_domain
from training.test_trainer import StopAt

CLOSED_FORM = [name for name, method in discover().items() if method.closed_form]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("domains")
    return write_domain(root / "source"), write_domain(root / "target", shift=20, seed=1)


@pytest.fixture(scope="module")
def files(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("files")
    torch.manual_seed(0)
    backbone = certvol.nn.small_cnn.SmallCNN()
    save_file(backbone.state_dict(), root / "weights.safetensors")
    for name, folder in zip(("source", "target"), folders, strict=True):
        api.extract(
            folder, root / f"{name}.npz", "small_cnn", str(root / "weights.safetensors"), image_size=8, device="cpu"
        )
    return root / "source.npz", root / "target.npz"


def head(**changed: object) -> dict[str, object]:
    return tiny(model__train="head", model__norm="auto", training__pretrain_steps=40, **changed)


def rows_of(table: Path) -> list[dict[str, str]]:
    with table.open() as file:
        return list(csv.DictReader(file))


def test_a_frozen_run_extracts_once_for_all_seeds_and_methods(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CERTVOL_CACHE", str(tmp_path / "cache"))
    from certvol import extraction

    forward, calls = extraction._forward, []
    monkeypatch.setattr(extraction, "_forward", lambda *a: (calls.append(1), forward(*a))[1])
    weights = tmp_path / "w.safetensors"
    save_file(certvol.nn.small_cnn.SmallCNN().state_dict(), weights)
    for seed, method in ((0, "cvp"), (1, "cvp"), (0, "basic")):
        settings = head(training__seed=seed, method__name=method, model__weights=str(weights), data__views=3)
        run = certvol.adapt(*folders, out=tmp_path / f"{method}-{seed}", **settings)
        assert run.delivery.mode == "frozen"
    assert len(calls) == 2 * 3  # one chunk of each domain, in three views


def test_the_backbone_stays_and_images_are_predicted_as_their_features_were(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    run = certvol.adapt(*folders, out=tmp_path / "run", **head())
    before, after = (load_file(run.path / f"{name}.safetensors") for name in ("pretrained", "model"))
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved
    assert not any(name.startswith("network.backbone") for name in moved)
    assert "network.adapter.up.weight" in moved
    table = {row["path"]: row for row in rows_of(run.path / "predictions.csv")}
    model = certvol.load(run.path, "cpu")
    paths = sorted(table)
    found = model.predict([folders[1] / path for path in paths])
    assert found.labels == [table[path]["label"] for path in paths]
    assert found.sigma is not None
    assert np.allclose(found.sigma, [float(table[path]["sigma"]) for path in paths], atol=1e-4)
    figures = api.evaluate(run.path, folders[1], "cpu")
    assert run.metrics is not None
    assert figures["adapted"]["accuracy"] == run.metrics["adapted"]["accuracy"]


def test_a_kill_while_features_are_extracted_costs_one_chunk(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CERTVOL_CACHE", str(tmp_path / "cache"))
    from certvol import extraction

    monkeypatch.setattr(extraction, "CHUNK", 8)
    forward, calls = extraction._forward, []

    def failing(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == 12:
            raise KeyboardInterrupt
        return forward(*arguments)

    monkeypatch.setattr(extraction, "_forward", failing)
    with pytest.raises(KeyboardInterrupt):
        certvol.adapt(*folders, out=tmp_path / "run", **head(data__views=2))
    run = certvol.adapt(resume=tmp_path / "run")
    assert len(calls) == 12 + 2 * (5 + 5) - 10  # 36 images are five chunks; five of the ten were whole
    monkeypatch.setenv("CERTVOL_CACHE", str(tmp_path / "other"))
    again = certvol.adapt(*folders, out=tmp_path / "again", **head(data__views=2))
    assert (run.path / "model.safetensors").read_bytes() == (again.path / "model.safetensors").read_bytes()


@pytest.mark.parametrize("method", ["cvp", "coral"])
def test_files_of_features_from_extract_to_predictions(
    method: str, files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    arguments = ["adapt", "--source", str(files[0]), "--target", str(files[1]), "--out", str(run), "--method", method]
    arguments += [
        f"--{k}={v}" for k, v in head().items() if k != "model.backbone" and (method == "cvp" or "num_samples" not in k)
    ]
    assert cli.run(arguments) == 0
    table = rows_of(run / "predictions.csv")
    assert {row["path"] for row in table} == {f"{name}/{i}.png" for name in HUES for i in range(12)}
    right = np.mean([row["label"] == row["path"].split("/")[0] for row in table])
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["adapted"]["accuracy"] == pytest.approx(right)
    assert cli.run(["predict", str(run), str(files[1]), "--out", str(tmp_path / "p.csv"), "--device", "cpu"]) == 0
    assert (tmp_path / "p.csv").read_bytes() == (run / "predictions.csv").read_bytes()
    evaluated = tmp_path / "e.json"
    assert cli.run(["evaluate", str(run), "--data", str(files[1]), "--json", str(evaluated), "--device", "cpu"]) == 0
    assert json.loads(evaluated.read_text())["adapted"] == metrics["adapted"]
    capsys.readouterr()
    assert cli.run(["predict", str(run), str(files[0].parent / "nothing.npz"), "--out", str(tmp_path / "q.csv")]) == 2
    assert "there is no file" in capsys.readouterr().err


def test_the_order_and_the_labels_of_a_target_file_do_not_reach_training(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    with np.load(files[1]) as file:
        arrays = dict(file)
    turned = np.random.default_rng(0).permutation(len(arrays["features"]))
    wrong = np.random.default_rng(1).choice(list(HUES), len(turned))
    variants = {
        "as-it-is": arrays,
        "turned": {name: value if name == "about" else value[turned] for name, value in arrays.items()},
        "wrong": {**arrays, "labels": wrong},
        "without": {"features": arrays["features"]},
    }
    found = {}
    for name, content in variants.items():
        np.savez(tmp_path / f"{name}.npz", **content)
        run = certvol.adapt(files[0], tmp_path / f"{name}.npz", out=tmp_path / name, **head())
        found[name] = [
            (run.path / f).read_bytes() for f in ("model.safetensors", "pretrained.safetensors", "history.jsonl")
        ]
        assert (run.metrics is None) == (name == "without")
    assert found["as-it-is"] == found["turned"] == found["wrong"] == found["without"]


def test_a_run_on_files_resumes_to_the_same_bytes(files: tuple[Path, Path], tmp_path: Path) -> None:
    whole = certvol.adapt(*files, out=tmp_path / "whole", **head()).path
    with pytest.raises(Interrupted):
        certvol.adapt(*files, out=tmp_path / "parts", stop_signal=StopAt(45), **head())
    certvol.adapt(resume=tmp_path / "parts")
    for name in ("model.safetensors", "predictions.csv", "history.jsonl"):
        assert (tmp_path / "parts" / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.parametrize("method", CLOSED_FORM)
def test_a_method_in_closed_form_freezes_the_backbone_and_says_so(
    method: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    from training.test_trainer import Ear

    ear, weights = Ear(), tmp_path / "w.safetensors"
    torch.manual_seed(0)
    save_file(certvol.nn.small_cnn.SmallCNN().state_dict(), weights)
    run = certvol.adapt(
        *folders,
        out=tmp_path / "run",
        reporter=ear,
        **tiny(method__name=method, training__pretrain_steps=40, model__weights=str(weights)),
    )
    assert any("`model.train` is set to head" in text for text in ear.said)
    first, last = load_file(weights), load_file(run.path / "model.safetensors")
    assert all(torch.equal(first[name], last[f"network.backbone.{name}"]) for name in first if "stages.0.0" in name)
    assert run.metrics is not None
    assert run.metrics["adapted"]["accuracy"] > 0.6
    table = {row["path"]: row for row in rows_of(run.path / "predictions.csv")}
    model = certvol.load(run.path, "cpu")
    paths = sorted(table)
    found = model.predict([folders[1] / path for path in paths])
    assert found.labels == [table[path]["label"] for path in paths]
    assert np.allclose(found.probabilities.sum(1), 1, atol=1e-5)
    pretrained = certvol.load(run.path, "cpu", which="pretrained")
    assert len(pretrained.predict([folders[1] / path for path in paths]).labels) == len(paths)


@pytest.mark.parametrize(
    ("method", "norm"), [*((method, "auto") for method in CLOSED_FORM), (CLOSED_FORM[0], "per_domain")]
)
def test_without_pretrained_weights_a_method_in_closed_form_is_fitted_on_what_pretraining_made(
    method: str, norm: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = {"training__pretrain_steps": 60, "model__norm": norm, "training__teacher": 0.9}
    run = certvol.adapt(*folders, out=tmp_path / "run", **tiny(method__name=method, **settings))
    config = read_settings_file(run.path / "config.yaml")
    assert config["model.train"] == "all"
    assert config["model.norm"] == run.delivery.mode == ("mixed" if norm == "auto" else norm)
    assert not list((run.path / "cycles").glob("trial-*"))
    baseline = certvol.adapt(*folders, out=tmp_path / "baseline", **tiny(method__name="source_only", **settings))
    trained, same = (load_file(path / "pretrained.safetensors") for path in (run.path, baseline.path))
    assert all(torch.equal(tensor, trained[name]) for name, tensor in same.items()), "pretraining is the baseline's"
    untrained, _ = seeded_backbone(resolve_settings(settings=tiny()).model, 8, 0)
    weight = next(iter(untrained.state_dict()))
    assert not torch.equal(untrained.state_dict()[weight], trained[f"network.backbone.{weight}"])
    last = load_file(run.path / "model.safetensors")
    moved = [
        name for name, tensor in trained.items() if "network.backbone" in name and not torch.equal(tensor, last[name])
    ]
    assert all("running" in name for name in moved) if norm == "per_domain" else not moved
    assert run.metrics is not None
    assert run.metrics["adapted"]["accuracy"] > 0.8

    paths = sorted(path for path in folders[1].rglob("*.png"))
    table = {row["path"]: row["label"] for row in rows_of(run.path / "predictions.csv")}
    found = certvol.load(run.path, "cpu").predict(paths)
    assert found.labels == [table[str(path.relative_to(folders[1]))] for path in paths]


@pytest.mark.parametrize("method", ["coral", "jda", "gtda"])
def test_a_shift_that_a_method_removes_is_not_taken_for_a_collapse(method: str, tmp_path: Path) -> None:
    """The target's mean is moved from one class towards another. What is fitted classifies by the target's own mean, in which
    held-out images of the source fall into wrong classes: that is no harm."""
    rng = np.random.default_rng(0)
    means_CD, labels_N = 0.8 * rng.normal(size=(5, 32)), np.repeat(np.arange(5), 60)
    shift_D = 2 * (means_CD[0] - means_CD[1])
    for name, moved_D in (("source", 0 * shift_D), ("target", shift_D)):
        rows_ND = means_CD[labels_N] + rng.normal(size=(300, 32)) + moved_D
        np.savez(tmp_path / f"{name}.npz", features=rows_ND.astype(np.float32), labels=labels_N)
    given = {"method.name": method, "training.pretrain_steps": 100, "training.batch_size": 64, "training.device": "cpu"}
    run = certvol.adapt(tmp_path / "source.npz", tmp_path / "target.npz", out=tmp_path / "run", **given)
    assert run.delivery.model == "last"
    assert run.metrics is not None
    assert run.metrics["source_only"]["accuracy"] < 0.5
    if method != "jda":  # which takes both domains' features as they are
        assert run.metrics["adapted"]["accuracy"] > 0.9


def test_held_out_source_images_do_not_judge_what_is_fitted(files: tuple[Path, Path], tmp_path: Path) -> None:
    given = {**head(), "method.name": "coral", "guard.select": "source_accuracy", "data.holdout": 0.3}
    given.pop("method.num_samples", None)
    with pytest.raises(UserError, match="does not go with coral"):
        certvol.adapt(*files, out=tmp_path / "run", **given)


def test_a_domain_is_aligned_by_its_own_statistics(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    fit = discover()["coral"].fit_features
    monkeypatch.setattr(
        discover()["coral"], "fit_features", lambda self, *given: (seen.append(given), fit(self, *given))[1]
    )
    for number, norm in enumerate(("mixed", "per_domain")):
        certvol.adapt(*folders, out=tmp_path / str(number), **tiny(method__name="coral", model__norm=norm))
    (source, _, target), (own_source, _, own_target) = seen
    assert torch.equal(source, own_source)
    assert not torch.equal(target, own_target)


def test_what_does_not_fit_is_said(files: tuple[Path, Path], folders: tuple[Path, Path], tmp_path: Path) -> None:
    with np.load(files[1]) as file:
        np.savez(tmp_path / "short.npz", features=file["features"][:, :5])
    with pytest.raises(UserError, match="dimensions"):
        certvol.adapt(files[0], tmp_path / "short.npz", out=tmp_path / "a", **head())
    with pytest.raises(UserError, match="features for both"):
        certvol.adapt(files[0], folders[1], out=tmp_path / "b", **head())
    with pytest.raises(UserError, match="for files of features"):
        certvol.adapt(*folders, out=tmp_path / "c", **head(model__backbone="features-5"))
    assert not list(tmp_path.glob("[abc]"))
    run = certvol.adapt(*files, out=tmp_path / "run", **head(training__cycles=1))
    model = certvol.load(run.path, "cpu")
    with pytest.raises(UserError, match="not images"):
        model.predict([next(folders[1].rglob("*.png"))])
    with pytest.raises(UserError, match="takes"):
        model.predict(np.zeros((2, 5), np.float32))
    assert len(model.predict(np.zeros((2, model.info.dim), np.float32)).labels) == 2
    trained = certvol.load(certvol.adapt(*folders, out=tmp_path / "trained", **tiny(training__cycles=1)).path, "cpu")
    with pytest.raises(UserError, match="backbone was trained"):
        trained.predict(np.zeros((2, trained.info.dim), np.float32))


def test_extract_writes_labels_only_where_folders_tell_them(folders: tuple[Path, Path], tmp_path: Path) -> None:
    flat = write_domain(tmp_path / "flat", per_class=2, flat=True)
    api.extract(flat, tmp_path / "flat.npz", "small_cnn", "none", image_size=8, views=3)
    with np.load(tmp_path / "flat.npz", allow_pickle=False) as file:
        assert sorted(file.files) == ["about", "features", "paths"]
        assert file["features"].shape[:2] == (6, 3)
    assert cli.run(["extract", str(flat), "--backbone", "small_cnn", "--out", str(tmp_path / "f.csv")]) == 2
    assert cli.run(["extract", str(tmp_path / "no"), "--backbone", "small_cnn", "--out", str(tmp_path / "f.npz")]) == 2


@pytest.mark.parametrize("given", [pytest.param("images", marks=pytest.mark.slow), "files"])
def test_a_run_on_features_is_measured_reported_and_exported_like_any_other(
    given: str, files: tuple[Path, Path], folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = files if given == "files" else folders
    run = certvol.adapt(source, target, out=tmp_path / "run", **head())
    measures = rows_of(run.path / "measures.csv")
    assert [row["path"] for row in measures] == [row["path"] for row in rows_of(run.path / "predictions.csv")]
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
        given_ND = views if given == "files" else network.backbone(model._view([folders[1] / path for path in paths]))
        moved = network.features(given_ND)
    assert torch.allclose(moved, shown["adapted"].float(), rtol=1e-2, atol=1e-2)
    assert not torch.allclose(given_ND, shown["adapted"].float(), rtol=1e-2, atol=1e-2)

    for coverage, measure in ((0.5, "sigma"), (0.8, "entropy"), (0.8, "mcd_mu")):
        arguments = ["predict", str(run.path), str(target), "--out", str(tmp_path / "p.csv"), "--device", "cpu"]
        assert cli.run([*arguments, "--coverage", str(coverage), "--measure", measure]) == 0
        accepted = [row["accepted"] == "true" for row in rows_of(tmp_path / "p.csv")]
        assert np.mean(accepted) == pytest.approx(coverage, abs=1.5 / len(accepted))

    exported = tmp_path / "model.pt2"
    assert cli.run(["export", str(run.path), "--format", "torch", "--out", str(exported)]) == 0
    assert f"input `{'features' if given == 'files' else 'images'}`" in capsys.readouterr().out
    assert cli.run(["report", str(run.path)]) == 0
    assert ("given features instead of images" in (run.path / "report.html").read_text()) == (given == "files")


def test_images_are_refused_by_a_model_of_features(
    files: tuple[Path, Path], folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(certvol.adapt(*files, out=tmp_path / "run", **head(training__cycles=1)).path)
    for command in (["predict", run, str(folders[1]), "--out", "p.csv"], ["evaluate", run, "--data", str(folders[1])]):
        assert cli.run([*command, "--device", "cpu"]) == 2
        assert "not images" in capsys.readouterr().err


def test_rows_of_features_are_no_images_to_collect(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["predict", "run", str(files[1]), "--out", "p.csv", "--coverage", "0.5", "--rejected-dir"]
    assert cli.run([*arguments, str(tmp_path / "rejected")]) == 2
    assert "which files of features do not hold" in capsys.readouterr().err
    assert not (tmp_path / "rejected").exists()


@pytest.mark.parametrize("method", CLOSED_FORM)
def test_a_fitted_method_is_evaluated_and_exported_as_fitted(
    method: str, files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = certvol.adapt(*files, out=tmp_path / "run", **head(method__name=method))
    assert run.metrics is not None
    found = api.evaluate(run.path, files[1], "cpu")
    assert found["adapted"] == run.metrics["adapted"]
    assert found["accuracy"] == run.metrics["adapted"]["accuracy"]
    fixed = method == "coral"  # the others walk through their stored rows by as many steps as there are images
    code = cli.run(["export", str(run.path), "--format", "torch", "--out", str(tmp_path / "m.pt2")])
    assert code == (0 if fixed else 2)
    assert ("cannot be exported" in capsys.readouterr().err) == (not fixed)
    out = tmp_path / "found.json"
    words = ["evaluate", str(run.path), "--data", str(files[1]), "--oscillation", "--device", "cpu", "--json", str(out)]
    assert cli.run(words) == 0
    said, written = capsys.readouterr(), json.loads(out.read_text())
    assert "the oscillation is left out" in said.err
    assert "AUROC" in said.out
    assert set(written) == {*found, "left_out"}
    assert written["auroc"] == found["auroc"]
    assert "linear layers" in written["left_out"]["oscillation"]


def test_a_frozen_backbone_is_not_compiled(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(torch, "compile", refuse)
    always = {"training__compile": "always", "training__cycles": 1}
    certvol.adapt(*folders, out=tmp_path / "run", **head(**always))
    with pytest.raises(AssertionError, match="compiled"):
        certvol.adapt(*folders, out=tmp_path / "trained", **tiny(**always))
