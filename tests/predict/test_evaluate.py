"""`certvol evaluate`: figures of a finished run on labelled data."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import certvol
from certvol.cli._main import run as cli
from certvol.data.feature_files import open_target_features
from certvol.predict.evaluate import target_labels
from support.reporter import RecordingReporter


def test_evaluate_agrees_with_the_files_of_the_run(
    labelled: certvol.Run, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    words = ["evaluate", str(labelled.path), "--data", str(root / "target"), "--json", str(out)]
    words.append("--oscillation")
    assert cli([*words, "--unknown", str(root / "source" / "sky")]) == 0
    found, written = (
        json.loads(out.read_text()),
        json.loads((labelled.path / "evaluation.json").read_text()),
    )
    assert set(written) <= set(found)
    assert found["confusion"] == written["confusion"]
    assert found["oscillation"]["total"] == pytest.approx(
        written["oscillation"]["total"], abs=0.005
    )
    for key in ("auroc", "aurc", "ece"):
        assert found[key] == pytest.approx(written[key], abs=1e-3), key
    assert found["unknown"]["images"] == 12
    assert set(found["unknown"]["auroc"]) == set(found["auroc"])
    printed = capsys.readouterr().out
    for words_of_a_table in (
        "AUROC",
        "to find errors, use --measure",
        "to find unknown classes, use --measure",
        "Pearson",
        "FPR at 95 % TPR",
        "oscillation",
        "AURC",
        "90 % kept",
    ):
        assert words_of_a_table in printed
    assert f"{found['auroc']['sigma']:.3f}" in printed


def test_evaluate_of_a_method_without_sigma(
    unlabelled: certvol.Run, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = certvol.evaluate(unlabelled.path, root / "target")
    assert found["correlations"] is None
    assert "sigma" not in found["auroc"]
    assert "oscillation" not in found
    assert cli(["evaluate", str(unlabelled.path), "--data", str(root / "target")]) == 0
    printed = capsys.readouterr().out
    assert "AUROC" in printed
    assert "Pearson" not in printed


def test_images_of_other_classes_are_left_out_and_counted(
    labelled: certvol.Run, root: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(root / "target", data)
    shutil.copytree(root / "target" / "sky", data / "mugs")
    found = certvol.evaluate(labelled.path, data)
    alone = certvol.evaluate(labelled.path, root / "target")
    assert found["adapted"] == alone["adapted"]
    assert found["other_classes"] == {"mugs": len(list((data / "mugs").iterdir()))}


def test_known_images_do_not_count_as_unknown(
    labelled: certvol.Run, root: Path, tmp_path: Path
) -> None:
    shutil.copytree(root / "target", tmp_path / "mixed")
    (tmp_path / "mixed" / "sky").rename(tmp_path / "mixed" / "moon")
    reporter = RecordingReporter()
    mixed = certvol.evaluate(
        labelled.path, tmp_path / "mixed", "cpu", reporter, unknown=tmp_path / "mixed"
    )
    assert any(text.startswith("24 of the 36 images") for text in reporter.warned)
    moon = certvol.evaluate(
        labelled.path, tmp_path / "mixed", "cpu", unknown=tmp_path / "mixed" / "moon"
    )
    assert mixed["unknown"]["images"] == 12
    assert mixed["unknown"]["auroc"] == pytest.approx(moon["unknown"]["auroc"], abs=1e-6)


def test_labels_of_a_file_that_changed_during_the_run_are_not_used(tmp_path: Path) -> None:
    file, reporter = tmp_path / "rows.npz", RecordingReporter()
    rows, labels = np.arange(12.0).reshape(6, 2), np.array(["a", "b", "b", "a", "b", "b"])
    np.savez(file, features=rows, labels=labels)
    target = open_target_features(file)
    found = target_labels(target, file, ["a", "b"], reporter)
    assert found is not None
    assert sorted(found.tolist()) == [0, 0, 1, 1, 1, 1]
    np.savez(file, features=rows[::-1], labels=labels[::-1])
    assert target_labels(target, file, ["a", "b"], reporter) is None
    assert any("changed since the run began" in text for text in reporter.warned)


def test_a_missing_unknown_folder_is_an_error(
    labelled: certvol.Run, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        cli(
            ["evaluate", str(labelled.path), "--data", str(root / "target"), "--unknown", "nowhere"]
        )
        == 2
    )
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.slow
def test_held_back_digits_are_less_certain(tmp_path: Path) -> None:
    """A run that never saw the digits 8 and 9 is less certain of them, by every measure."""
    from certvol.data.digits import write_digits

    source, target = write_digits(tmp_path / "digits", per_class=60)
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    for digit in "89":
        for folder in (source, target):
            place = unknown / digit if folder == target else tmp_path / f"unused-{digit}"
            (folder / digit).rename(place)
    settings: dict[str, Any] = {
        "augment.flip": False,
        "data.image_size": 16,
        "model.norm": "per_domain",
        "training.pretrain_steps": 150,
        "training.cycles": 5,
        "training.device": "cpu",
    }
    run = certvol.adapt(source, target, out=tmp_path / "run", preset="quick", **settings)
    found = certvol.evaluate(run.path, target, unknown=unknown)
    assert len(found["confusion"]["classes"]) == 8
    assert found["unknown"]["images"] == 354
    for name in ("sigma", "probability", "entropy", "logit", "logit_diff", "mcd_mu"):
        assert found["unknown"]["auroc"][name] > 0.6, (name, found["unknown"])
        assert found["unknown"]["fpr_at_95_tpr"][name] < 0.95, (name, found["unknown"])
