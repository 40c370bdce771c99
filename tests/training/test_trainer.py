"""Whole runs on tiny images: what they leave, and what it does not depend on."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import certvol
from certvol.data.folders import folder_labels
from certvol.errors import Interrupted, RunFailed
from certvol.methods import discover
from certvol.methods._base import Labelled, Survey
from certvol.runs.checkpoint import read_tensors, without_prefix
from certvol.training.pseudo_labels._labeller import Labeller
from certvol.training.step import Stepper
from support.images import HUES, tiny
from support.run_folders import weights
from support.stop_at import StopAt
from support.watched_steps import Step, watch_steps

METHODS = list(discover())


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_leaves_its_documented_files(folders: tuple[Path, Path], tmp_path: Path) -> None:
    source, target = folders
    run = certvol.adapt(source, target, out=tmp_path / "run", **tiny())
    folder = run.path
    for name in (
        "config.yaml environment.json history.jsonl timing.jsonl pretrained.safetensors "
        "model.safetensors predictions.csv metrics.json checkpoint/latest.json "
        "cycles/scores.jsonl measures.csv evaluation.json features.safetensors"
    ).split():
        assert (folder / name).exists(), name
    history = lines(folder / "history.jsonl")
    assert [line["step"] for line in history if line["phase"] == "pretrain"] == [2, 4, 6, 8, 10, 12]
    adapt = [line for line in history if line["phase"] == "adapt"]
    assert [(line["cycle"], line["step"]) for line in adapt] == [
        (1, 2),
        (1, 4),
        (2, 6),
        (2, 8),
        (3, 10),
        (3, 12),
    ]
    for key in ("lr", "loss", "ce", "samples_ce", "antagonistic", "sigma_source", "sigma_target"):
        assert isinstance(adapt[0][key], float), key
    assert not any("time" in key or "second" in key for line in history for key in line)
    assert [line["cycle"] for line in lines(folder / "cycles" / "scores.jsonl")] == [0, 1, 2, 3]
    assert load_file(folder / "cycles" / "0003.safetensors")["probabilities"].shape == (36, 3)
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["device"]["type"] == "cpu"


def test_predictions_and_metrics_agree(folders: tuple[Path, Path], tmp_path: Path) -> None:
    run = certvol.adapt(*folders, out=tmp_path / "run", **tiny())
    with (run.path / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["path"] for row in rows] == sorted(
        f"{name}/{i}.png" for name in HUES for i in range(12)
    )
    assert all(0 < float(row["probability"]) <= 1 and float(row["sigma"]) > 0 for row in rows)
    right = np.mean([row["label"] == row["path"].split("/")[0] for row in rows])
    metrics = json.loads((run.path / "metrics.json").read_text())
    assert metrics["adapted"]["accuracy"] == pytest.approx(right)
    assert set(metrics["adapted"]["per_class"]) == set(HUES)
    assert metrics["delivered"]["model"] == "last"
    assert run.metrics == metrics


@pytest.mark.parametrize("method", ["cvp", "source_only", "coral", "can", "rsda_mstn", "shot"])
def test_a_seed_decides_every_byte_of_a_run(
    method: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """A slow test below stops and resumes a run of every method, and compares bytes too."""
    settings = tiny(method__name=method)
    first, second, other = (
        certvol.adapt(*folders, out=tmp_path / name, **{**settings, "training.seed": seed}).path
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    for file in ("model.safetensors", "pretrained.safetensors", "predictions.csv", "history.jsonl"):
        assert weights(first, file) == weights(second, file), file
    assert weights(first) != weights(other)


def test_the_layout_of_the_target_folder_does_not_change_the_weights(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    source, target = folders
    files = sorted(target.rglob("*.png"))
    rng = np.random.default_rng(0)
    layouts = {
        "flat": tmp_path / "flat",
        "shuffled": tmp_path / "shuffled",
        "renamed": tmp_path / "renamed",
    }
    for folder in layouts.values():
        folder.mkdir()
    for number, file in enumerate(files):
        shutil.copy(file, layouts["flat"] / f"{file.parent.name}-{file.name}")
        shuffled = layouts["shuffled"] / str(rng.choice(list(HUES)))
        shuffled.mkdir(exist_ok=True)
        shutil.copy(file, shuffled / f"{number}.png")
        shutil.copy(file, layouts["renamed"] / f"{rng.integers(10**9)}.png")
    expected = certvol.adapt(source, target, out=tmp_path / "classes-run", **tiny()).path
    for name, folder in layouts.items():
        run = certvol.adapt(source, folder, out=tmp_path / f"{name}-run", **tiny()).path
        for left in ("model.safetensors", "pretrained.safetensors", "history.jsonl"):
            assert weights(run, left) == weights(expected, left), (name, left)
        assert (run / "metrics.json").exists() == (name == "shuffled")


def test_training_does_not_read_target_labels(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During training, the function that turns folders into labels raises."""
    from certvol.predict import evaluate as evaluation
    from certvol.training.trainer import Trainer

    fit = Trainer.fit
    training = False

    def watched_fit(self: Trainer) -> object:
        nonlocal training
        training = True
        try:
            return fit(self)
        finally:
            training = False

    def watched_labels(*arguments: Any) -> object:
        assert not training
        return folder_labels(*arguments)

    monkeypatch.setattr(Trainer, "fit", watched_fit)
    monkeypatch.setattr(evaluation, "folder_labels", watched_labels)
    run = certvol.adapt(*folders, out=tmp_path / "run", **tiny())
    assert run.metrics is not None


@pytest.mark.parametrize("norm", ["mixed", "per_domain", "dsbn", "frozen", "auto"])
@pytest.mark.parametrize("train", ["all", "last_block", "head"])
def test_every_norm_mode_goes_with_every_trained_part(
    norm: str, train: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    run = certvol.adapt(
        *folders,
        out=tmp_path / "run",
        **tiny(model__norm=norm, model__train=train, training__cycles=2),
    )
    before, after = (
        load_file(run.path / f"{name}.safetensors") for name in ("pretrained", "model")
    )
    first_convolution = "network.backbone.stages.0.0.weight"
    if train == "head":
        assert first_convolution not in before  # a frozen backbone is stored once
        assert first_convolution in after
    else:
        assert torch.equal(before[first_convolution], after[first_convolution]) == (train != "all")
    output = "network.classifier.output.weight"
    assert not torch.equal(before[output], after[output])


def test_a_learning_rate_far_too_high_fails_the_run(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = tiny(training__learning_rate=1e6, training__pretrain_steps=60)
    with pytest.raises(RunFailed, match=r"training\.learning_rate"):
        certvol.adapt(*folders, out=tmp_path / "run", **settings)
    assert not (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize("method", ["source_only", "cvp"])
def test_weights_ruined_by_the_last_step_are_never_written(
    method: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """The loss is computed before the step, so it does not show the ruin."""
    settings = tiny(method__name=method, training__learning_rate=1e30, training__pretrain_steps=1)
    with pytest.raises(RunFailed, match="no longer finite"):
        certvol.adapt(*folders, out=tmp_path / "run", **settings)
    assert not list((tmp_path / "run").rglob("*.safetensors"))


@pytest.mark.parametrize("images", [1, 2, 17])
@pytest.mark.parametrize("norm", ["per_domain", "auto"])
def test_a_target_of_few_images_trains(
    images: int, norm: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "target").mkdir()
    for number, file in enumerate(sorted(folders[1].rglob("*.png"))[:images]):
        shutil.copy(file, tmp_path / "target" / f"{number}.png")
    run = certvol.adapt(
        folders[0],
        tmp_path / "target",
        out=tmp_path / "run",
        **tiny(model__norm=norm, training__batch_size=16),
    )
    assert (run.path / "predictions.csv").read_text().count("\n") == images + 1


def test_config_yaml_repeats_the_run(folders: tuple[Path, Path], tmp_path: Path) -> None:
    first = certvol.adapt(*folders, out=tmp_path / "a", **tiny()).path
    second = certvol.adapt(out=tmp_path / "b", config=first / "config.yaml").path
    assert weights(first) == weights(second)


def _newest_state(run: Path) -> dict[str, torch.Tensor]:
    newest = json.loads((run / "checkpoint" / "latest.json").read_text())[0]
    return load_file(run / "checkpoint" / newest["file"])


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_with_plain_batches_a_teacher_and_bf16(
    method: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """A run that is stopped twice ends with the same bytes and predicts what it wrote."""
    settings = tiny(
        method__name=method,
        training__pretrain_steps=4,
        training__batches="plain",
        training__teacher=0.9,
        training__precision="bf16",
        training__cycles=2,
    )
    whole = certvol.adapt(*folders, out=tmp_path / "whole", **settings)
    by_steps = discover()[method].adapts and not discover()[method].closed_form
    places = {"source": folders[0], "target": folders[1], "out": tmp_path / "parts"}
    begin: dict[str, Any] = {**places, **settings}
    for steps in (2, 5) if by_steps else (3,):  # in pretraining, and within the first cycle
        with pytest.raises(Interrupted):
            certvol.adapt(stop_signal=StopAt(steps), **begin)
        begin = {"resume": tmp_path / "parts"}
    parts = certvol.adapt(**begin)
    for file in ("model.safetensors", "predictions.csv", "history.jsonl"):
        assert weights(parts.path, file) == weights(whole.path, file), file
    files = sorted(folders[1].rglob("*.png"))
    found = whole.model().predict(files)
    written = dict(
        line.split(",")[:2]
        for line in (whole.path / "predictions.csv").read_text().splitlines()[1:]
    )
    agree = [
        written[str(file.relative_to(folders[1]))] == label
        for file, label in zip(files, found.labels, strict=True)
    ]
    assert np.mean(agree) > 0.9


def test_a_run_delivers_its_teacher(folders: tuple[Path, Path], tmp_path: Path) -> None:
    run = certvol.adapt(*folders, out=tmp_path / "run", **tiny(training__teacher=0.9)).path
    state = without_prefix("method", _newest_state(run))
    delivered = read_tensors(run / "model.safetensors")
    assert not any(name.startswith("teacher.") for name in delivered)
    student, teacher = (
        state["network.classifier.output.weight"],
        state["teacher.network/classifier/output/weight"],
    )
    assert torch.equal(delivered["network.classifier.output.weight"], teacher)
    assert not torch.equal(student, teacher)
    assert not any(
        name.startswith("teacher.") for name in read_tensors(run / "pretrained.safetensors")
    )


def test_a_stage_starts_from_the_pretrained_weights_with_the_labels_of_the_stage_before(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[int, float, bool]] = []
    surveyed: list[int] = []
    label_target = Labeller.label_target

    def watched_labels(self: Labeller, survey: Survey) -> Labelled:
        surveyed.append(survey.stage)
        return label_target(self, survey)

    def look(stepper: Stepper, step: Step) -> None:
        if step.adapting:
            now = stepper.method.network.classifier.output.weight.detach()
            start = read_tensors(tmp_path / "run" / "pretrained.safetensors")[
                "network.classifier.output.weight"
            ]
            begun.append((step.place, step.progress, torch.equal(now, start)))
            assert step.rate == pytest.approx(0.01 / (1 + 10 * step.progress) ** 0.75)

    watch_steps(monkeypatch, look)
    monkeypatch.setattr(Labeller, "label_target", watched_labels)
    settings = tiny(
        method__name="rsda_dann", method__rounds=2, training__cycles=2, training__cycle_steps=2
    )
    run = certvol.adapt(*folders, out=tmp_path / "run", **settings).path
    assert surveyed == [0, 1, 2]
    assert [place for place, _, pretrained in begun if pretrained] == [0, 4, 8]
    assert [progress for _, progress, _ in begun] == [0, 0.25, 0.5, 0.75] * 3
    tables = without_prefix("tables", _newest_state(run))
    assert tables["in_rounds"].tolist() == [1.0] * 36
