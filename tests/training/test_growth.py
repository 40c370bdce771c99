"""What some methods ask of the trainer: labels of the whole target, stages, a teacher; and plain batches, for all."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import certvol
from certvol.errors import Interrupted, UserError
from certvol.methods import basic, discover
from certvol.methods.protocol import Labelled, Survey
from certvol.nn.norm import SOURCE, TARGET
from certvol.training.checkpoint import read_tensors, without_prefix
from certvol.training.labeller import Labeller
from certvol.training.stepper import Stepper
from images import tiny, write_domain
from training.test_trainer import StopAt, weights

METHODS = list(discover())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("domains")
    return write_domain(root / "source"), write_domain(root / "target", shift=20, seed=1)


def _newest_state(run: Path) -> dict[str, torch.Tensor]:
    newest = json.loads((run / "checkpoint" / "latest.json").read_text())[0]
    return load_file(run / "checkpoint" / newest["file"])


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_plain_batches_a_teacher_and_mixed_precision(
    method: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """And goes on from a stop in the middle of a cycle to the same bytes, and predicts what it wrote."""
    settings = tiny(
        method__name=method,
        training__batches="plain",
        training__teacher=0.9,
        training__precision="bf16",
        training__cycles=2,
    )
    whole = certvol.adapt(*folders, out=tmp_path / "whole", **settings)
    by_steps = discover()[method].adapts and not discover()[method].closed_form
    with pytest.raises(Interrupted):
        certvol.adapt(*folders, out=tmp_path / "parts", stop_signal=StopAt(15 if by_steps else 10), **settings)
    parts = certvol.adapt(resume=tmp_path / "parts")
    for file in ("model.safetensors", "predictions.csv", "history.jsonl"):
        assert weights(parts.path, file) == weights(whole.path, file), file
    files = sorted(folders[1].rglob("*.png"))
    found = whole.model().predict(files)
    written = dict(line.split(",")[:2] for line in (whole.path / "predictions.csv").read_text().splitlines()[1:])
    agree = [
        written[str(file.relative_to(folders[1]))] == label for file, label in zip(files, found.labels, strict=True)
    ]
    assert np.mean(agree) > 0.9


def test_the_teacher_is_what_a_run_delivers(folders: tuple[Path, Path], tmp_path: Path) -> None:
    run = certvol.adapt(*folders, out=tmp_path / "run", **tiny(training__teacher=0.9)).path
    state = without_prefix("method", _newest_state(run))
    delivered = read_tensors(run / "model.safetensors")
    assert not any(name.startswith("teacher.") for name in delivered)
    student, teacher = state["network.classifier.output.weight"], state["teacher.network/classifier/output/weight"]
    assert torch.equal(delivered["network.classifier.output.weight"], teacher)
    assert not torch.equal(student, teacher)
    assert not any(name.startswith("teacher.") for name in read_tensors(run / "pretrained.safetensors"))


def test_a_teacher_starts_from_the_pretrained_model_and_follows_every_step(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    averages: list[torch.Tensor] = []
    step = Stepper.step

    def watched(self: Stepper, *arguments: Any) -> Any:
        found = step(self, *arguments)
        weight = self.method.network.classifier.output.weight.detach()
        if arguments[4]:
            averages.append(0.9 * averages[-1] + 0.1 * weight)
        else:
            averages[:] = [weight.clone()]
        return found

    monkeypatch.setattr(Stepper, "step", watched)
    run = certvol.adapt(*folders, out=tmp_path / "run", **tiny(training__teacher=0.9)).path
    delivered = read_tensors(run / "model.safetensors")["network.classifier.output.weight"]
    assert len(averages) == 1 + 3 * 4
    assert torch.allclose(delivered, averages[-1], atol=1e-6)


def test_without_decay_the_teacher_is_the_student(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """A teacher that follows at once changes nothing but rounding."""
    plain = certvol.adapt(*folders, out=tmp_path / "plain", **tiny()).path
    taught = certvol.adapt(*folders, out=tmp_path / "taught", **tiny(training__teacher=1e-9)).path
    for key, value in load_file(plain / "model.safetensors").items():
        assert torch.allclose(value, load_file(taught / "model.safetensors")[key], atol=1e-3), key


def test_a_teacher_of_1_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"training\.teacher"):
        certvol.adapt(*folders, out=tmp_path / "run", **tiny(training__teacher=1.0))


def test_plain_batches_label_exactly_what_they_draw(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labelled: list[int] = []
    label_images = Labeller.label_images

    def watched(self: Labeller, cycle: int, images_N: Any, between: Any) -> Any:
        labelled.append(len(images_N))
        return label_images(self, cycle, images_N, between)

    drawn: dict[int, set[int]] = {}
    step = Stepper.step

    def watched_step(self: Stepper, plan: Any, index: int, *rest: Any) -> Any:
        if rest[2]:
            images = plan.images_SN[index, plan.num_source_S[index] :].tolist()
            drawn.setdefault(len(labelled), set()).update(images)
        return step(self, plan, index, *rest)

    monkeypatch.setattr(Labeller, "label_images", watched)
    monkeypatch.setattr(Stepper, "step", watched_step)
    certvol.adapt(*folders, out=tmp_path / "run", **tiny(training__batches="plain", training__batch_size=12))
    assert labelled == [len(images) for images in drawn.values()] == [24, 24, 24]  # 4 steps of 6, of 36 images


@pytest.mark.parametrize("method", ["can", "rsda_mstn"])
def test_labels_of_the_whole_target_come_from_the_images_alone(
    method: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Flat and under other names, the same images give the same bytes."""
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, file in enumerate(sorted(folders[1].rglob("*.png"), key=lambda path: (path.name, path.parent.name))):
        shutil.copy(file, flat / f"{number}.png")
    runs = [
        certvol.adapt(folders[0], target, out=tmp_path / f"run-{target.name}", **tiny(method__name=method)).path
        for target in (folders[1], flat)
    ]
    assert weights(runs[0]) == weights(runs[1])
    assert weights(runs[0], "history.jsonl") == weights(runs[1], "history.jsonl")


class _Noted(basic.Method):
    """Labels every second target image, and notes its number."""

    labels_whole_target = True
    surveys_source = True
    surveys: list[Survey] = []  # noqa: RUF012
    seen: list[torch.Tensor] = []  # noqa: RUF012

    def label_target(self, survey: Survey) -> Labelled:
        self.surveys.append(survey)
        numbers = torch.arange(len(survey.features_ND))
        return Labelled(torch.where(numbers % 2 == 0, numbers // 2 % 3, -1), {"number": numbers})

    def loss_terms(self, batch: Any) -> dict[str, torch.Tensor]:
        if batch.adapting:
            self.seen.append(batch.tables["number"])
            assert torch.equal(batch.tables["number"] // 2 % 3, batch.labels_N[batch.num_source :])
        return super().loss_terms(batch)


@pytest.mark.parametrize("batches", ["balanced", "plain"])
def test_a_method_may_label_the_whole_target_and_leave_images_out(
    batches: str, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(basic, "Method", _Noted)
    _Noted.surveys.clear()
    _Noted.seen.clear()
    certvol.adapt(*folders, out=tmp_path / "run", **tiny(method__name="basic", training__batches=batches))
    assert len(_Noted.surveys) == 3  # one per cycle
    survey = _Noted.surveys[0]
    assert survey.features_ND.shape == (36, 128)
    assert survey.probabilities_NC.sum(1).tolist() == pytest.approx([1.0] * 36, abs=1e-4)
    assert survey.source_centres_CD is not None
    counts = survey.source_centres_CD.norm(dim=1)
    assert ((counts > 3) & (counts <= 11.001)).all()  # 11 images of each class are trained on, of unit length each
    seen = torch.cat(_Noted.seen)
    assert len(seen) > 0
    assert (seen % 2 == 0).all()


@pytest.mark.parametrize("mode", ["per_domain", "dsbn"])
def test_the_centres_of_the_source_are_those_by_its_own_statistics(
    mode: str, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    surveys = 0
    survey_of = Labeller.survey

    def watched(self: Labeller, cycle: int, stage: int, source: Any, between: Any) -> Survey:
        nonlocal surveys
        surveys += 1
        survey = survey_of(self, cycle, stage, source, between)
        network = self.method.network.eval()
        centres = []
        for statistics in (SOURCE, TARGET):
            with torch.no_grad(), network.rows_of(domain=statistics):
                views = [next(iter(self.views.test_batches(SOURCE, pool, len(pool)))) for pool in source]
                features = [network.features(view_NCHW) for view_NCHW in views]
            centres.append(torch.stack([(rows / rows.norm(dim=1, keepdim=True)).sum(0) for rows in features]))
        assert survey.source_centres_CD is not None
        assert torch.allclose(survey.source_centres_CD, centres[SOURCE], atol=1e-4)
        assert not torch.allclose(survey.source_centres_CD, centres[TARGET], atol=0.1)
        return survey

    monkeypatch.setattr(Labeller, "survey", watched)
    certvol.adapt(*folders, out=tmp_path / "run", **tiny(method__name="can", model__norm=mode, training__cycles=2))
    assert surveys == 2


def test_stages_start_without_momentum(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without: list[int] = []
    step = Stepper.step

    def watched(self: Stepper, plan: Any, index: int, place: int, progress: float, adapting: bool, rate: float) -> Any:
        if adapting and not self.optimizer.state:
            without.append(place)
        return step(self, plan, index, place, progress, adapting, rate)

    monkeypatch.setattr(Stepper, "step", watched)
    settings = tiny(method__name="rsda_dann", method__rounds=2, training__cycles=2, training__cycle_steps=2)
    settings["training.fresh_optimizer"] = False  # which is about the first stage alone
    certvol.adapt(*folders, out=tmp_path / "run", **settings)
    assert without == [4, 8]  # the first stage goes on with that of pretraining


def test_stages_start_from_the_pretrained_weights_with_labels_of_the_stage_before(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[int, float, bool]] = []
    step = Stepper.step
    surveyed: list[int] = []
    by_method = Labeller.by_method

    def watched_labels(self: Labeller, survey: Survey) -> Labelled:
        surveyed.append(survey.stage)
        return by_method(self, survey)

    def watched(self: Stepper, plan: Any, index: int, place: int, progress: float, adapting: bool, rate: float) -> Any:
        if adapting:
            now = self.method.network.classifier.output.weight.detach()
            start = read_tensors(tmp_path / "run" / "pretrained.safetensors")["network.classifier.output.weight"]
            begun.append((place, progress, torch.equal(now, start)))
            assert rate == pytest.approx(0.01 / (1 + 10 * progress) ** 0.75)
        return step(self, plan, index, place, progress, adapting, rate)

    monkeypatch.setattr(Stepper, "step", watched)
    monkeypatch.setattr(Labeller, "by_method", watched_labels)
    settings = tiny(method__name="rsda_dann", method__rounds=2, training__cycles=2, training__cycle_steps=2)
    run = certvol.adapt(*folders, out=tmp_path / "run", **settings).path
    assert surveyed == [0, 1, 2]
    assert [place for place, _, pretrained in begun if pretrained] == [0, 4, 8]
    assert [progress for _, progress, _ in begun] == [0, 0.25, 0.5, 0.75] * 3
    tables = without_prefix("tables", _newest_state(run))
    assert tables["in_rounds"].tolist() == [1.0] * 36


def test_labels_of_other_images_in_a_checkpoint_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """A run folder may come from anywhere."""
    from certvol.errors import RunFailed
    from certvol.training.checkpoint import Checkpoints, State

    with pytest.raises(Interrupted):
        certvol.adapt(*folders, out=tmp_path / "run", stop_signal=StopAt(15), **tiny(method__name="ubr2s"))
    kept = Checkpoints(tmp_path / "run" / "checkpoint")
    state, _ = kept.load()
    assert state is not None
    for name, broken in (("labelled", torch.full((36,), 7)), ("tables.mean", torch.zeros(5, 3))):
        kept.save(State({**state.tensors, name: broken}, state.facts))
        kept.save(State({**state.tensors, name: broken}, state.facts))
        with pytest.raises(RunFailed, match="not one of this run"):
            certvol.adapt(resume=tmp_path / "run")
