"""The contract between the trainer and pseudo-label rules: their input and their labels."""

import dataclasses
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
from certvol.methods import basic
from certvol.methods._base import Labelled, Survey
from certvol.nn.norm import SOURCE, TARGET
from certvol.settings import TrainingConfig, list_settings, setting
from certvol.training import pseudo_labels
from certvol.training.pseudo_labels._base import Chunk, PseudoLabelRule
from certvol.training.pseudo_labels._labeller import Labeller
from certvol.training.step import Stepper
from support.images import tiny
from support.methods import CLASSES, make_method
from support.run_folders import weights
from support.stop_at import StopAt

RULES = pseudo_labels.discover()


@pytest.mark.parametrize("name", RULES)
def test_every_rule_gives_a_label_per_image_and_declares_its_settings(name: str) -> None:
    rule_class = RULES[name]
    assert rule_class.summary
    assert dataclasses.is_dataclass(rule_class.Config)
    rule = rule_class(rule_class.Config(), TrainingConfig(mc_passes=3))
    method = make_method("basic").eval()
    features_ND = torch.rand(9, method.network.info.dim)
    with torch.inference_mode():
        probabilities_NC = rule.probabilities(Chunk(method, features_ND, seed=0))
    assert probabilities_NC.shape == (9, CLASSES)
    assert probabilities_NC.sum(1).tolist() == pytest.approx([1.0] * 9, abs=1e-4)
    if rule.labels_whole_target:
        generator = torch.Generator().manual_seed(0)
        source_ND, source_N = torch.rand(12, features_ND.shape[1]), torch.arange(12) % CLASSES
        survey = Survey(features_ND, probabilities_NC, None, 0, generator, 0, source_ND, source_N)
        labels_N = rule.label_target(survey)
    else:
        labels_N = rule.labels(probabilities_NC)
    assert labels_N.shape == (9,)
    assert labels_N.dtype == torch.int64
    assert ((labels_N >= -1) & (labels_N < CLASSES)).all()


CASES: list[dict[str, str]] = [
    {},
    {"model__train": "head", "training__batches": "plain"},
    {"training__labelling": "full", "training__label_view": "augmented"},
    {"method__name": "can"},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changed"),
    [
        (name, changed)
        for name, rule in RULES.items()
        for changed in CASES[: 2 if rule.labels_whole_target else 4]
    ],
)
def test_every_rule_trains_on_images_and_features_and_resumes_exactly(
    name: str, changed: dict[str, str], folders: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = tiny(training__pseudo_labels=name, training__mc_passes=3, **changed)
    whole = certvol.adapt(*folders, out=tmp_path / "whole", **settings).path
    with pytest.raises(Interrupted):
        certvol.adapt(*folders, out=tmp_path / "parts", stop_signal=StopAt(16), **settings)
    parts = certvol.adapt(resume=tmp_path / "parts").path
    for file in ("model.safetensors", "history.jsonl"):
        assert weights(parts, file) == weights(whole, file), file


class _NearestSource(PseudoLabelRule):
    """Labels every image as the nearest source image, and leaves out the first `skipped` images."""

    summary = "label of the nearest source image"
    labels_whole_target = True
    uses_source = True
    surveys: list[Survey] = []  # noqa: RUF012

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config:
        skipped: int = setting(0, at_least=0, help="Images that are left out.")

    def label_target(self, survey: Survey) -> torch.Tensor:
        self.surveys.append(survey)
        assert survey.source_features_SD is not None
        assert survey.source_labels_S is not None
        nearest_N = torch.cdist(survey.features_ND, survey.source_features_SD).argmin(1)
        labels_N = survey.source_labels_S[nearest_N].clone()
        labels_N[: self.config.skipped] = -1
        return labels_N


@pytest.mark.parametrize("batches", ["balanced", "plain"])
def test_a_rule_may_label_the_whole_target_from_the_features_of_both_domains(
    batches: str, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = {**RULES, "nearest_source": _NearestSource}
    monkeypatch.setattr(pseudo_labels, "discover", lambda: rules)
    _NearestSource.surveys.clear()
    settings = tiny(
        training__pseudo_labels="nearest_source",
        pseudo_labels__skipped=30,
        training__batches=batches,
        training__checkpoint_seconds=0,
        training__cycles=2,
    )
    run = certvol.adapt(*folders, out=tmp_path / "run", **settings).path
    assert len(_NearestSource.surveys) == 2
    survey = _NearestSource.surveys[0]
    assert survey.features_ND.shape == (36, 128)
    assert survey.source_features_SD is not None
    assert survey.source_features_SD.shape == (33, 128)  # one image of each class is held out
    assert survey.source_labels_S is not None
    assert np.bincount(survey.source_labels_S.numpy()).tolist() == [11, 11, 11]
    newest = sorted((run / "checkpoint").glob("state-*"))[-1]
    labels_N = load_file(newest)["labelled"]
    assert (labels_N[:30] == -1).all()
    assert (labels_N[30:] >= 0).all()
    assert "skipped: 30" in (run / "config.yaml").read_text()
    assert len(certvol.load(run, "cpu").classes) == 3  # prediction needs no rules


def test_settings_of_a_rule_are_listed_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pseudo_labels, "discover", lambda: {"nearest_source": _NearestSource})
    rows = list_settings({}, pseudo_labels.config_classes())
    assert "pseudo_labels.skipped" in [name for name, *_ in rows]
    given = {"training.pseudo_labels": "nearest_source", "pseudo_labels.skipped": -1}
    with pytest.raises(UserError, match="should not be negative"):
        certvol.api.resolve_settings(settings=given)
    with pytest.raises(UserError, match="unknown pseudo-label rule `argmin`"):
        certvol.api.resolve_settings(settings={"training.pseudo_labels": "argmin"})


def test_mc_dropout_on_an_augmented_view_is_deterministic(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = tiny(
        training__pseudo_labels="mc_dropout",
        training__label_view="augmented",
        training__fresh_optimizer=True,
    )
    first, second = (certvol.adapt(*folders, out=tmp_path / name, **settings).path for name in "ab")
    assert weights(first) == weights(second)


def _labelled(run: Path) -> list[int]:
    """Return how many images each cycle labelled."""
    lines = map(json.loads, (run / "timing.jsonl").read_text().splitlines())
    return [line["labelled"] for line in lines if "labelled" in line]


def test_full_labelling_labels_everything(folders: tuple[Path, Path], tmp_path: Path) -> None:
    run = certvol.adapt(*folders, out=tmp_path / "run", **tiny(training__labelling="full"))
    labelled = _labelled(run.path)
    assert labelled == [36, 36, 36]


def test_a_method_can_label_the_whole_target(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from certvol.methods.cvp import Method

    monkeypatch.setattr(Method, "labels_whole_target", True)
    monkeypatch.setattr("certvol.device.CPU_EVALUATION_BATCH", 6)
    run = certvol.adapt(*folders, out=tmp_path / "run", **tiny(training__batch_size=8))
    assert _labelled(run.path) == [36, 36, 36]


def test_labelling_on_demand_ends_early_and_a_largest_share_earlier(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("certvol.device.CPU_EVALUATION_BATCH", 6)
    settings = tiny(training__cycle_steps=1, training__pretrain_steps=60)
    run = certvol.adapt(*folders, out=tmp_path / "run", **settings)
    labelled = _labelled(run.path)
    assert all(count < 36 for count in labelled)
    capped = certvol.adapt(
        *folders, out=tmp_path / "capped", **{**settings, "training.labelling_share": 0.1}
    )
    assert _labelled(capped.path) == [4, 4, 4]


def test_plain_batches_label_exactly_what_they_draw(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labelled: list[int] = []
    label_images = Labeller.label_images

    def watched(self: Labeller, cycle: int, images_N: Any, between: Any) -> Any:
        labelled.append(len(images_N))
        return label_images(self, cycle, images_N, between)

    drawn: dict[int, set[int]] = {}
    step: Any = Stepper.step

    def watched_step(self: Stepper, plan: Any, index: int, *rest: Any) -> Any:
        if rest[2]:
            images = plan.images_SN[index, plan.num_source_S[index] :].tolist()
            drawn.setdefault(len(labelled), set()).update(images)
        return step(self, plan, index, *rest)

    monkeypatch.setattr(Labeller, "label_images", watched)
    monkeypatch.setattr(Stepper, "step", watched_step)
    certvol.adapt(
        *folders, out=tmp_path / "run", **tiny(training__batches="plain", training__batch_size=12)
    )
    assert (
        labelled == [len(images) for images in drawn.values()] == [24, 24, 24]
    )  # 4 steps of 6, of 36 images


def test_labels_of_the_whole_target_depend_only_on_the_images(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """The same images in a flat folder under other names give the same bytes."""
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, file in enumerate(
        sorted(folders[1].rglob("*.png"), key=lambda path: (path.name, path.parent.name))
    ):
        shutil.copy(file, flat / f"{number}.png")
    runs = [
        certvol.adapt(
            folders[0], target, out=tmp_path / f"run-{target.name}", **tiny(method__name="can")
        ).path
        for target in (folders[1], flat)
    ]
    assert weights(runs[0]) == weights(runs[1])
    assert weights(runs[0], "history.jsonl") == weights(runs[1], "history.jsonl")


class _EverySecond(basic.Method):
    """Labels every second target image and notes its number."""

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
    monkeypatch.setattr(basic, "Method", _EverySecond)
    _EverySecond.surveys.clear()
    _EverySecond.seen.clear()
    certvol.adapt(
        *folders, out=tmp_path / "run", **tiny(method__name="basic", training__batches=batches)
    )
    assert len(_EverySecond.surveys) == 3  # one per cycle
    survey = _EverySecond.surveys[0]
    assert survey.features_ND.shape == (36, 128)
    assert survey.probabilities_NC.sum(1).tolist() == pytest.approx([1.0] * 36, abs=1e-4)
    assert survey.source_sums_CD is not None
    counts = survey.source_sums_CD.norm(dim=1)
    assert (
        (counts > 3) & (counts <= 11.001)
    ).all()  # 11 images of each class are trained on, of unit length each
    seen = torch.cat(_EverySecond.seen)
    assert len(seen) > 0
    assert (seen % 2 == 0).all()


@pytest.mark.parametrize("mode", ["per_domain", "dsbn"])
def test_the_centres_of_the_source_use_its_own_statistics(
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
                views = [
                    next(iter(self.views.test_batches(SOURCE, pool, len(pool)))) for pool in source
                ]
                features = [network.features(view_NCHW) for view_NCHW in views]
            centres.append(
                torch.stack([(rows / rows.norm(dim=1, keepdim=True)).sum(0) for rows in features])
            )
        assert survey.source_sums_CD is not None
        assert torch.allclose(survey.source_sums_CD, centres[SOURCE], atol=1e-4)
        assert not torch.allclose(survey.source_sums_CD, centres[TARGET], atol=0.1)
        return survey

    monkeypatch.setattr(Labeller, "survey", watched)
    certvol.adapt(
        *folders,
        out=tmp_path / "run",
        **tiny(method__name="can", model__norm=mode, training__cycles=2),
    )
    assert surveys == 2
