"""A run obeys its target prior, and everything that uses its model agrees."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from safetensors.torch import load_file

import certvol
from certvol.data.target_prior import ABSENT
from certvol.errors import Interrupted, UserError
from certvol.methods import discover, mcc
from certvol.runs.tables import read_column
from certvol.settings import Config
from certvol.sklearn import BasicClassifier
from support.images import HUES, tiny
from support.reporter import RecordingReporter
from support.stop_at import StopAt


def _adapt(folders: tuple[Path, Path], out: Path, **settings: Any) -> Any:
    reporter = RecordingReporter()
    run = certvol.adapt(*folders, out=out, reporter=reporter, **tiny(**settings))
    return run, reporter


@pytest.mark.parametrize("rule", ["argmax", "cluster"])
@pytest.mark.parametrize("method", ["cvp", "shot"])
def test_absent_classes_are_neither_trained_on_nor_predicted(
    rule: str, method: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = {"method__name": method, "training__pseudo_labels": rule}
    run, _ = _adapt(folders, tmp_path / "run", data__target_classes="leaf,sky", **settings)
    assert set(read_column(run.path / "predictions.csv", "label")) <= {"leaf", "sky"}
    for which in ("delivered", "pretrained"):
        model = certvol.load(run.path, "cpu", which)
        found = model.predict(sorted((folders[1] / "apple").iterdir()))
        assert set(found.labels) <= {"leaf", "sky"}
        assert found.probabilities[:, sorted(HUES).index("apple")].max() == 0


def test_the_shift_is_stored_with_the_model_and_evaluation_uses_it(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    prior = tmp_path / "prior.csv"
    prior.write_text("class,share\napple,8\nleaf,1\n")
    run, _ = _adapt(folders, tmp_path / "run", data__target_prior=str(prior))
    prior.unlink()  # a finished run needs no file of its user's
    shift_C = load_file(run.path / "model.safetensors")["prior_shift_C"]
    assert shift_C.tolist() == pytest.approx([np.log(8 / 3), np.log(1 / 3), ABSENT], abs=1e-6)
    figures = certvol.evaluate(run.path, folders[1], "cpu")
    assert figures["adapted"] == run.metrics["adapted"]
    assert figures["source_only"] == run.metrics["source_only"]
    assert figures["adapted"]["per_class"]["sky"] == 0


def test_classes_that_are_ruled_out_do_not_judge_the_model(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = {"training__pretrain_steps": 60, "data__holdout": 0.5}
    whole, _ = _adapt(folders, tmp_path / "whole", **settings)
    part, _ = _adapt(folders, tmp_path / "part", data__target_classes="leaf,sky", **settings)
    assert whole.verdict["source"]["images"] == 18
    assert part.verdict["source"]["images"] == 12
    assert part.verdict["source"]["before"] > 0.9
    assert max(part.verdict["temperature"].values()) < 10


def test_a_validator_without_images_of_the_allowed_classes_is_refused(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    source = Path(shutil.copytree(folders[0], tmp_path / "source"))
    for number in range(4, 12):
        (source / "sky" / f"{number}.png").unlink()
    settings = {"guard__select": "source_accuracy", "data__target_classes": "sky"}
    with pytest.raises(UserError, match="none of the 1 classes has 5 images"):
        _adapt((source, folders[1]), tmp_path / "run", **settings)


UNEVEN = np.array([12, 6, 3]) / 21


@pytest.mark.parametrize(
    ("method", "settings", "before", "after"),
    [
        ("cvp", {}, None, None),
        ("cvp", {"training__batches": "plain"}, UNEVEN, UNEVEN),
        ("mcc", {}, None, UNEVEN),
        ("mcc", {"training__batches": "balanced"}, None, None),
        ("rsda_dann", {"method__rounds": 1}, None, UNEVEN),
        ("shot", {}, None, None),
        ("coral", {}, None, UNEVEN),
        ("rwa", {"method__steps": 3}, None, None),
    ],
)
def test_the_shift_divides_by_the_shares_that_each_phase_trained_with(
    method: str,
    settings: dict[str, Any],
    before: Any,
    after: Any,
    folders: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    source = tmp_path / "source"
    shutil.copytree(folders[0], source)
    for name, most in (("leaf", 6), ("sky", 3)):
        for file in sorted((source / name).iterdir())[most:]:
            file.unlink()
    more: dict[str, Any] = {**settings, "data__holdout": 0.0, "guard__action": "warn"}
    run, _ = _adapt(
        (source, folders[1]),
        tmp_path / "run",
        method__name=method,
        data__target_prior="balanced",
        **more,
    )
    even = np.full(3, 1 / 3)
    for which, shares in (("pretrained", before), ("model", after)):
        shift_C = load_file(run.path / f"{which}.safetensors")["prior_shift_C"]
        expected = np.log(even / (even if shares is None else shares))
        assert shift_C.tolist() == pytest.approx(expected, abs=1e-6), which
    figures = certvol.evaluate(run.path, folders[1], "cpu")
    for name in ("adapted", "source_only"):
        assert figures[name] == run.metrics[name]
    if method == "mcc":
        again = certvol.adapt(from_run=run.path, out=tmp_path / "again", training={"cycles": 1})
        for which in ("pretrained", "model"):
            found = load_file(again.path / f"{which}.safetensors")["prior_shift_C"]
            assert found.tolist() == pytest.approx(expected, abs=1e-6), which


def test_adaptation_on_uneven_rows_does_not_count_the_sources_shares_twice() -> None:
    """Classes overlap at a distance of 2, and neither domain is shifted: the best is 0.84."""

    class Unaligned(BasicClassifier):
        _name = "mcc"
        _method: ClassVar[Any] = mcc.Method

        def _config(self, dim: int, seed: int, rate: float) -> Config:
            config = super()._config(dim, seed, rate)
            method, guard = mcc.Method.Config(weight=0.0), replace(config.guard, action="warn")
            return replace(config, method=method, guard=guard)

    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1, 0, 1], [900, 100, 500, 500])
    rows = rng.normal(size=(2000, 1)) + 2 * labels[:, None]
    given = np.where(np.arange(2000) < 1000, labels, -1)
    right = {}
    for prior in ("balanced", "unknown"):
        model = Unaligned(target_prior=prior, random_state=0)
        right[prior] = (model.fit(rows, given).predict(rows[1000:]) == labels[1000:]).mean()
    assert right["balanced"] > 0.81
    assert right["unknown"] < 0.77, "the batches are uneven"


def test_without_a_prior_nothing_is_stored(folders: tuple[Path, Path], tmp_path: Path) -> None:
    run, _ = _adapt(folders, tmp_path / "run")
    assert "prior_shift_C" not in load_file(run.path / "model.safetensors")


def test_the_oscillation_is_that_of_the_decisions(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    run, _ = _adapt(folders, tmp_path / "run", data__target_classes="sky")
    found = certvol.evaluate(run.path, folders[1], "cpu", oscillation=True)
    assert found["oscillation"]["total"] == 0  # one class has no boundary


@pytest.mark.slow
def test_a_stopped_run_with_a_prior_ends_with_the_same_bytes(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    prior = tmp_path / "prior.csv"
    prior.write_text("class,share\napple,3\nleaf,2\nsky,1\n")
    settings = tiny(data__target_prior=str(prior), training__class_power=0.5)
    whole = certvol.adapt(*folders, out=tmp_path / "whole", **settings).path
    parts = tmp_path / "parts"
    with pytest.raises(Interrupted):
        certvol.adapt(*folders, out=parts, stop_signal=StopAt(18), **settings)
    prior.write_text("class,share\napple,1\nleaf,2\nsky,1\n")
    with pytest.raises(UserError, match="the prior changed since the run"):
        certvol.adapt(resume=parts)
    prior.write_text("class,share\nsky,1\nleaf,2\napple,3\n")
    settings_file = parts / "config.yaml"
    text = settings_file.read_text()
    settings_file.write_text(text.replace(f"target_prior: {prior}", "target_prior: unknown"))
    with pytest.raises(UserError, match="the prior changed since the run"):
        certvol.adapt(resume=parts)
    settings_file.write_text(text)
    certvol.adapt(resume=parts)
    for file in ("model.safetensors", "predictions.csv", "metrics.json"):
        assert (whole / file).read_bytes() == (parts / file).read_bytes(), file


def test_a_wrong_prior_is_warned_about_and_a_right_one_is_not(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    settings = {"training__pretrain_steps": 60}
    _, wrong = _adapt(folders, tmp_path / "wrong", data__target_classes="sky", **settings)
    _, right = _adapt(folders, tmp_path / "right", data__target_prior="balanced", **settings)
    assert [text for text in wrong.warned if "contradicts" in text]
    assert not [text for text in right.warned if "contradicts" in text]


@pytest.mark.parametrize("method", ["rwa", "adrem", "coral", "prda", "jda", "gtda"])
@pytest.mark.parametrize("allowed", ["leaf,sky", "leaf"])
def test_a_fit_in_closed_form_does_not_see_classes_that_are_ruled_out(
    method: str, allowed: str, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: Any
) -> None:
    seen: list[set[int]] = []
    kind = discover()[method]
    fit = kind.fit_features
    monkeypatch.setattr(
        kind,
        "fit_features",
        lambda self, *rows: (seen.append(set(rows[1].tolist())), fit(self, *rows))[1],
    )
    run, _ = _adapt(folders, tmp_path / "run", method__name=method, data__target_classes=allowed)
    assert seen == [{sorted(HUES).index(name) for name in allowed.split(",")}]
    assert set(read_column(run.path / "predictions.csv", "label")) <= set(allowed.split(","))
