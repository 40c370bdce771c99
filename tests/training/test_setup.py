"""Inputs and settings of a run: images or features, frozen backbones, mistakes that are refused."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import certvol
from certvol.api import resolve_settings
from certvol.errors import UserError
from certvol.methods import discover
from certvol.nn.network import seeded_backbone
from certvol.settings import read_settings_file
from support.images import HUES, tiny, tiny_head, write_domain
from support.run_folders import read_table

CLOSED_FORM = [name for name, method in discover().items() if method.closed_form]


def test_features_are_extracted_once_for_all_seeds_and_methods(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CERTVOL_CACHE", str(tmp_path / "cache"))
    from certvol.predict import extract as extraction

    forward, calls = extraction._forward, []
    monkeypatch.setattr(extraction, "_forward", lambda *a: (calls.append(1), forward(*a))[1])
    weights = tmp_path / "w.safetensors"
    save_file(certvol.nn.small_cnn.SmallCNN().state_dict(), weights)
    for seed, method in ((0, "cvp"), (1, "cvp"), (0, "basic")):
        settings = tiny_head(
            training__seed=seed, method__name=method, model__weights=str(weights), data__views=3
        )
        run = certvol.adapt(*folders, out=tmp_path / f"{method}-{seed}", **settings)
        assert run.delivery.mode == "frozen"
    assert len(calls) == 2 * 3  # one chunk of each domain, in three views


def test_a_kill_during_extraction_costs_one_chunk(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CERTVOL_CACHE", str(tmp_path / "cache"))
    from certvol.predict import extract as extraction

    monkeypatch.setattr(extraction, "CHUNK", 8)
    forward, calls = extraction._forward, []

    def failing(*arguments: Any) -> object:
        calls.append(1)
        if len(calls) == 12:
            raise KeyboardInterrupt
        return forward(*arguments)

    monkeypatch.setattr(extraction, "_forward", failing)
    with pytest.raises(KeyboardInterrupt):
        certvol.adapt(*folders, out=tmp_path / "run", **tiny_head(data__views=2))
    run = certvol.adapt(resume=tmp_path / "run")
    assert (
        len(calls) == 12 + 2 * (5 + 5) - 10
    )  # 36 images are five chunks; five of the ten were whole
    monkeypatch.setenv("CERTVOL_CACHE", str(tmp_path / "other"))
    again = certvol.adapt(*folders, out=tmp_path / "again", **tiny_head(data__views=2))
    assert (run.path / "model.safetensors").read_bytes() == (
        again.path / "model.safetensors"
    ).read_bytes()


def test_the_order_and_the_labels_of_a_target_file_do_not_reach_training(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    with np.load(files[1]) as file:
        arrays = dict(file)
    turned = np.random.default_rng(0).permutation(len(arrays["features"]))
    wrong = np.random.default_rng(1).choice(list(HUES), len(turned))
    variants = {
        "as-it-is": arrays,
        "turned": {
            name: value if name == "about" else value[turned] for name, value in arrays.items()
        },
        "wrong": {**arrays, "labels": wrong},
        "without": {"features": arrays["features"]},
    }
    found = {}
    for name, content in variants.items():
        np.savez(tmp_path / f"{name}.npz", **content)
        run = certvol.adapt(files[0], tmp_path / f"{name}.npz", out=tmp_path / name, **tiny_head())
        found[name] = [
            (run.path / f).read_bytes()
            for f in ("model.safetensors", "pretrained.safetensors", "history.jsonl")
        ]
        assert (run.metrics is None) == (name == "without")
    assert found["as-it-is"] == found["turned"] == found["wrong"] == found["without"]


@pytest.mark.parametrize("method", CLOSED_FORM)
def test_a_method_in_closed_form_freezes_the_backbone_and_says_so(
    method: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    from support.reporter import RecordingReporter

    reporter, weights = RecordingReporter(), tmp_path / "w.safetensors"
    torch.manual_seed(0)
    save_file(certvol.nn.small_cnn.SmallCNN().state_dict(), weights)
    run = certvol.adapt(
        *folders,
        out=tmp_path / "run",
        reporter=reporter,
        **tiny(
            method__name=method,
            training__pretrain_steps=40,
            model__weights=str(weights),
            model__train="all",
        ),
    )
    assert any("`model.train` is set to head" in text for text in reporter.said)
    first, last = load_file(weights), load_file(run.path / "model.safetensors")
    assert all(
        torch.equal(first[name], last[f"network.backbone.{name}"])
        for name in first
        if "stages.0.0" in name
    )
    assert run.metrics is not None
    assert run.metrics["adapted"]["accuracy"] > 0.6
    table = {row["path"]: row for row in read_table(run.path / "predictions.csv")}
    model = certvol.load(run.path, "cpu")
    paths = sorted(table)
    found = model.predict([folders[1] / path for path in paths])
    assert found.labels == [table[path]["label"] for path in paths]
    assert np.allclose(found.probabilities.sum(1), 1, atol=1e-5)
    pretrained = certvol.load(run.path, "cpu", which="pretrained")
    assert len(pretrained.predict([folders[1] / path for path in paths]).labels) == len(paths)


@pytest.mark.parametrize(
    ("preset", "weights", "train"),
    [
        ("default", "a file", "head"),
        ("default", "none", "all"),
        ("paper", "a file", "all"),
        ("authors", "a file", "all"),
    ],
)
def test_the_default_preset_freezes_a_backbone_with_pretrained_weights(
    preset: str, weights: str, train: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    if weights != "none":
        weights = str(tmp_path / "w.safetensors")
        save_file(certvol.nn.small_cnn.SmallCNN().state_dict(), weights)
    short = tiny(model__weights=weights, training__pretrain_steps=0, training__cycles=0)
    del short["training.pseudo_labels"], short["training.settled"]
    run = certvol.adapt(*folders, out=tmp_path / "run", preset=preset, **short)
    assert read_settings_file(run.path / "config.yaml")["model.train"] == train


def _trained_features(norm: str) -> dict[str, Any]:
    return {"training__pretrain_steps": 60, "model__norm": norm, "training__teacher": 0.9}


@pytest.fixture(scope="module")
def baseline(
    folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, torch.Tensor]]:
    """The pretrained weights of a run that does not adapt, for a norm mode."""

    @cache
    def pretrained(norm: str) -> dict[str, torch.Tensor]:
        settings = tiny(method__name="source_only", **_trained_features(norm))
        run = certvol.adapt(*folders, out=tmp_path_factory.mktemp(norm) / "run", **settings)
        return load_file(run.path / "pretrained.safetensors")

    return pretrained


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "norm"),
    [*((method, "auto") for method in CLOSED_FORM), (CLOSED_FORM[0], "per_domain")],
)
def test_without_pretrained_weights_a_method_in_closed_form_is_fitted_on_trained_features(
    method: str,
    norm: str,
    folders: tuple[Path, Path],
    tmp_path: Path,
    baseline: Callable[[str], dict[str, torch.Tensor]],
) -> None:
    settings = tiny(method__name=method, **_trained_features(norm))
    run = certvol.adapt(*folders, out=tmp_path / "run", **settings)
    config = read_settings_file(run.path / "config.yaml")
    assert config["model.train"] == "all"
    assert config["model.norm"] == run.delivery.mode == ("mixed" if norm == "auto" else norm)
    assert not list((run.path / "cycles").glob("trial-*"))
    trained = load_file(run.path / "pretrained.safetensors")
    assert all(torch.equal(tensor, trained[name]) for name, tensor in baseline(norm).items()), (
        "pretraining is the baseline's"
    )
    untrained, _ = seeded_backbone(resolve_settings(settings=tiny()).model, 8, 0)
    weight = next(iter(untrained.state_dict()))
    assert not torch.equal(untrained.state_dict()[weight], trained[f"network.backbone.{weight}"])
    last = load_file(run.path / "model.safetensors")
    moved = [
        name
        for name, tensor in trained.items()
        if "network.backbone" in name and not torch.equal(tensor, last[name])
    ]
    assert all("running" in name for name in moved) if norm == "per_domain" else not moved
    assert run.metrics is not None
    assert run.metrics["adapted"]["accuracy"] > 0.8

    paths = sorted(path for path in folders[1].rglob("*.png"))
    table = {row["path"]: row["label"] for row in read_table(run.path / "predictions.csv")}
    found = certvol.load(run.path, "cpu").predict(paths)
    assert found.labels == [table[str(path.relative_to(folders[1]))] for path in paths]


def test_source_accuracy_cannot_choose_a_fitted_model(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    given: dict[str, Any] = {
        **tiny_head(),
        "method.name": "coral",
        "guard.select": "source_accuracy",
        "data.holdout": 0.3,
    }
    given.pop("method.num_samples", None)
    with pytest.raises(UserError, match=r"cannot judge .* coral"):
        certvol.adapt(*files, out=tmp_path / "run", **given)


def test_features_of_a_domain_use_its_own_statistics(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    fit = discover()["coral"].fit_features
    monkeypatch.setattr(
        discover()["coral"],
        "fit_features",
        lambda self, *given: (seen.append(given), fit(self, *given))[1],
    )
    for number, norm in enumerate(("mixed", "per_domain")):
        certvol.adapt(
            *folders, out=tmp_path / str(number), **tiny(method__name="coral", model__norm=norm)
        )
    (source, _, target), (own_source, _, own_target) = seen
    assert torch.equal(source, own_source)
    assert not torch.equal(target, own_target)


def test_inputs_that_do_not_go_together_are_refused(
    files: tuple[Path, Path], folders: tuple[Path, Path], tmp_path: Path
) -> None:
    with np.load(files[1]) as file:
        np.savez(tmp_path / "short.npz", features=file["features"][:, :5])
    with pytest.raises(UserError, match="dimensions"):
        certvol.adapt(files[0], tmp_path / "short.npz", out=tmp_path / "a", **tiny_head())
    with pytest.raises(UserError, match="features for both"):
        certvol.adapt(files[0], folders[1], out=tmp_path / "b", **tiny_head())
    with pytest.raises(UserError, match="for files of features"):
        certvol.adapt(*folders, out=tmp_path / "c", **tiny_head(model__backbone="features-5"))
    assert not list(tmp_path.glob("[abc]"))
    run = certvol.adapt(*files, out=tmp_path / "run", **tiny_head(training__cycles=1))
    model = certvol.load(run.path, "cpu")
    with pytest.raises(UserError, match="not images"):
        model.predict([next(folders[1].rglob("*.png"))])
    with pytest.raises(UserError, match="takes"):
        model.predict(np.zeros((2, 5), np.float32))
    rows = np.zeros((2, model.info.dim))
    for value in (np.nan, np.inf, 1e300):
        with pytest.raises(UserError, match="not finite numbers"):
            model.predict(np.concatenate([rows, rows + value]))
    with pytest.raises(UserError, match="real features"):
        model.predict(rows + 1j)
    assert len(model.predict(rows).labels) == 2
    trained = certvol.load(
        certvol.adapt(*folders, out=tmp_path / "trained", **tiny(training__cycles=1)).path, "cpu"
    )
    with pytest.raises(UserError, match="trained its backbone"):
        trained.predict(np.zeros((2, trained.info.dim), np.float32))


def test_a_frozen_backbone_is_not_compiled(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("compiled")

    monkeypatch.setattr(torch, "compile", refuse)
    always = {"training__compile": "always", "training__cycles": 1}
    certvol.adapt(*folders, out=tmp_path / "run", **tiny_head(**always))
    with pytest.raises(AssertionError, match="compiled"):
        certvol.adapt(*folders, out=tmp_path / "trained", **tiny(**always))


def test_a_validator_that_the_run_cannot_have_is_refused(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="basic has none"):
        certvol.adapt(
            *folders, out=tmp_path / "a", **tiny(method__name="basic", guard__select="sigma")
        )
    with pytest.raises(UserError, match="held-out source"):
        certvol.adapt(
            *folders, out=tmp_path / "b", **tiny(data__holdout=0.0, guard__select="source_accuracy")
        )
    few = write_domain(tmp_path / "few", per_class=4)
    with pytest.raises(UserError, match="none of the 3 classes has 5 images"):
        certvol.adapt(few, folders[1], out=tmp_path / "c", **tiny(guard__select="source_accuracy"))
    assert not [name for name in "abc" if (tmp_path / name).exists()]
