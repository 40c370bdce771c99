"""`certvol predict` takes any images and says which to reject."""

import csv
import json
from pathlib import Path

import pytest
from PIL import Image

import certvol
from certvol.cli._main import run
from support.commands import adapt_words, refused


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_predict_takes_folders_files_and_globs(
    finished: Path, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    target = folders[1]
    words = [str(target / "leaf"), str(target / "sky" / "0.png"), str(target / "apple" / "1*.png")]
    assert run(["predict", str(finished), *words, "--out", str(tmp_path / "p.csv")]) == 0
    rows = rows_of(tmp_path / "p.csv")
    assert len(rows) == 12 + 1 + 3
    expected = {row["path"]: row for row in rows_of(finished / "predictions.csv")}
    for row in rows:
        before = expected[str(Path(row["path"]).relative_to(target))]
        assert row["label"] == before["label"]
        assert float(row["probability"]) == pytest.approx(float(before["probability"]), abs=1e-4)
        assert float(row["sigma"]) == pytest.approx(float(before["sigma"]), abs=1e-4)


def test_coverage_rejects_the_least_certain(
    finished: Path, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "p.csv"
    words = ["predict", str(finished), str(folders[1]), "--out", str(out)]
    words += ["--measure", "sigma", "--coverage"]
    assert run([*words, "0.75"]) == 0
    rows = rows_of(out)
    accepted = [float(row["sigma"]) for row in rows if row["accepted"] == "true"]
    rejected = [float(row["sigma"]) for row in rows if row["accepted"] == "false"]
    assert 26 <= len(accepted) <= 28
    assert min(accepted) >= max(rejected)
    assert run([*words, "1"]) == 0
    assert "false" not in out.read_text()


def test_files_that_are_not_images_are_skipped(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.jpg").write_text("no image")
    Image.new("RGB", (9, 9)).save(tmp_path / "b.png")
    words = ["predict", str(finished)]
    assert run([*words, str(tmp_path), "--out", str(tmp_path / "p.csv")]) == 0
    assert "1 unreadable" in capsys.readouterr().out
    assert (tmp_path / "p.csv").read_text().count("\n") == 2
    only_broken = [*words, str(tmp_path / "a.jpg"), "--out", str(tmp_path / "q.csv")]
    assert "none of the 1 files can be read" in refused(capsys, *only_broken)


def test_the_pretrained_model_predicts_on_purpose(
    finished: Path, folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["predict", str(finished), str(folders[1])]
    for use in ("delivered", "pretrained"):
        assert run([*words, "--use", use, "--out", str(tmp_path / f"{use}.csv")]) == 0
    paths = [row["path"] for row in rows_of(tmp_path / "pretrained.csv")]
    expected = certvol.load(finished, which="pretrained").predict(paths)
    found = rows_of(tmp_path / "pretrained.csv")
    assert [row["label"] for row in found] == expected.labels
    assert [float(row["probability"]) for row in found] == pytest.approx(
        expected.probabilities.max(axis=1).tolist(), abs=6e-5
    )
    assert found != rows_of(tmp_path / "delivered.csv")
    coverage = ["--use", "pretrained", "--coverage", "0.9", "--out", str(tmp_path / "p.csv")]
    assert "give --min-certainty" in refused(capsys, *words, *coverage)


def test_the_pretrained_model_of_a_frozen_backbone_predicts(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """pretrained.safetensors leaves the backbone out; model.safetensors holds it."""
    settings = adapt_words(*folders, tmp_path / "run", model__train="head", training__cycles=2)
    assert run(settings) == 0
    out = tmp_path / "p.csv"
    words = ["predict", str(tmp_path / "run"), str(folders[1]), "--use", "pretrained"]
    assert run([*words, "--out", str(out)]) == 0
    right = [Path(row["path"]).parent.name == row["label"] for row in rows_of(out)]
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert sum(right) / len(right) == pytest.approx(metrics["source_only"]["accuracy"])


def test_an_image_that_is_named_twice_is_predicted_once(
    finished: Path, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folders[1])
    (tmp_path / "again").symlink_to(folders[1] / "leaf")
    words = ["leaf", "./leaf", "sky/../leaf", "leaf/0.png", str(tmp_path / "again")]
    assert run(["predict", str(finished), *words, "--out", str(tmp_path / "p.csv")]) == 0
    paths = [row["path"] for row in rows_of(tmp_path / "p.csv")]
    assert sorted(paths) == sorted(f"leaf/{number}.png" for number in range(12))


def test_a_link_to_an_image_keeps_its_own_row(
    finished: Path, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for name in ("a.png", "b.png"):
        (images / name).symlink_to(folders[1] / "leaf" / "0.png")
    assert run(["predict", str(finished), str(images), "--out", str(tmp_path / "p.csv")]) == 0
    assert len(rows_of(tmp_path / "p.csv")) == 2
