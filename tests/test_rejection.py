"""Thresholds without labels, and the folder of images to look at."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import certvol
from certvol import rejection
from certvol.analysis import Measured
from certvol.cli import run as cli
from certvol.errors import UserError
from certvol.uncertainty import LABEL_FREE, MEASURES
from images import tiny, write_domain


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("rejection")
    write_domain(root / "source")
    write_domain(root / "target", shift=60, seed=1)
    certvol.adapt(root / "source", root / "target", out=root / "run", **tiny())
    certvol.adapt(root / "source", root / "target", out=root / "basic", **tiny(method__name="basic"))
    return root


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli(list(words)) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return next(line for line in error.splitlines() if line.startswith("certvol: "))


@pytest.mark.parametrize("measure", LABEL_FREE)
def test_coverage_by_any_measure(measure: str, root: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.csv"
    words = ["predict", str(root / "run"), str(root / "target"), "--out", str(out), "--coverage", "0.75"]
    assert cli([*words, "--measure", measure]) == 0
    rows = table(out)
    sign = 1 if MEASURES[measure].more_is_certain else -1
    accepted, rejected = (
        [sign * float(row[measure]) for row in rows if row["accepted"] == word] for word in ("true", "false")
    )
    assert 26 <= len(accepted) <= 28
    assert min(accepted) > max(rejected)


@pytest.mark.parametrize(("measure", "up"), [("sigma", True), ("entropy", False), ("mcd_sigma", False)])
def test_min_certainty_is_in_the_measures_own_units(measure: str, up: bool, root: Path, tmp_path: Path) -> None:
    values = sorted(float(row[measure]) for row in table(root / "run" / "measures.csv"))
    middle = (values[17] + values[18]) / 2
    out = tmp_path / "p.csv"
    words = ["predict", str(root / "run"), str(root / "target"), "--out", str(out), "--measure", measure]
    assert cli([*words, "--min-certainty", str(middle)]) == 0
    for row in table(out):
        assert (row["accepted"] == "true") == ((float(row[measure]) > middle) == up)


def test_a_measure_alone_is_a_column(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.csv"
    words = ["predict", str(root / "run"), str(root / "target"), "--out", str(out)]
    assert cli([*words, "--measure", "entropy"]) == 0
    assert list(table(out)[0]) == ["path", "label", "probability", "sigma", "entropy"]
    by_run = {row["path"]: row for row in table(root / "run" / "measures.csv")}
    for row in table(out):
        expected = by_run[str(Path(row["path"]).relative_to(root / "target"))]
        assert row["label"] == expected["prediction"]
        for name in ("entropy", "probability", "sigma"):
            assert float(row[name]) == pytest.approx(float(expected[name]), abs=1e-4)


def test_a_method_without_sigma_rejects_by_probability(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p.csv"
    words = ["predict", str(root / "basic"), str(root / "target"), "--out", str(out), "--coverage", "0.5"]
    assert cli(words) == 0
    rows = table(out)
    assert sum(row["accepted"] == "true" for row in rows) == 18
    assert min(float(r["probability"]) for r in rows if r["accepted"] == "true") > max(
        float(r["probability"]) for r in rows if r["accepted"] == "false"
    )
    assert "has no sigma" in refused(capsys, *words, "--measure", "sigma")


def test_stored_thresholds_are_those_that_reject(root: Path) -> None:
    import json

    stored = json.loads((root / "run" / "evaluation.json").read_text())["thresholds"]
    for measure in LABEL_FREE:
        assert stored[measure]["0.9"] == rejection.target_threshold(root / "run", measure, 0.9)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--coverage", "0"], "above 0"),
        (["--coverage", "1.1"], "at most 1"),
        (["--coverage", "nan"], "above 0"),
        (["--min-certainty", "nan"], "a number"),
        (["--min-certainty", "1", "--coverage", "0.5"], "one of them"),
        (["--measure", "entropi", "--coverage", "0.5"], "did you mean `entropy`?"),
        (["--measure", "logit_gt", "--coverage", "0.5"], "no measure `logit_gt`"),
        (["--rejected-dir", "x"], "--coverage or --min-certainty"),
    ],
)
def test_mistakes_get_one_sentence(
    extra: list[str], words: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p.csv"
    assert words in refused(capsys, "predict", str(root / "run"), str(root / "target"), "--out", str(out), *extra)
    assert not out.exists()


@pytest.mark.parametrize(
    "content", ["", "path,entropy\n", "path,entropy\na,b\n", "path,entropy\na,nan\n", 'entropy\n"x\n']
)
def test_a_damaged_table_of_measures_is_refused(content: str, root: Path, tmp_path: Path) -> None:
    (tmp_path / "measures.csv").write_text(content)
    with pytest.raises(UserError, match=r"measures\.csv is damaged"):
        rejection.target_threshold(tmp_path, "entropy", 0.5)
    (tmp_path / "measures.csv").unlink()
    with pytest.raises(UserError, match="missing"):
        rejection.target_threshold(tmp_path, "entropy", 0.5)


def test_rejected_images_lie_in_order_of_certainty(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, folder = tmp_path / "p.csv", tmp_path / "look" / "here"
    words = ["predict", str(root / "run"), str(root / "target"), "--out", str(out), "--coverage", "0.75"]
    words += ["--rejected-dir", str(folder)]
    assert cli(words) == 0
    assert "9 rejected (sigma below" in capsys.readouterr().out
    rejected = [row for row in table(out) if row["accepted"] == "false"]
    expected = [row["path"] for row in sorted(rejected, key=lambda row: float(row["sigma"]))]
    index = table(folder / "index.csv")
    assert [row["path"] for row in index] == expected
    assert sorted(path.name for path in folder.iterdir()) == sorted([*(row["file"] for row in index), "index.csv"])
    assert [row["file"] for row in index] == [f"{n:04d}_{Path(path).name}" for n, path in enumerate(expected, 1)]
    for row in index:
        assert (folder / row["file"]).read_bytes() == Path(row["path"]).read_bytes()
        assert not (folder / row["file"]).is_symlink()
    assert "not empty" in refused(capsys, *words)


def certain(values: list[float]) -> Measured:
    return Measured(
        np.zeros(len(values), np.int64), {"sigma": np.array(values, np.float32)}, np.empty((0, 0), np.float32)
    )


def test_names_are_sanitised_and_nothing_is_overwritten(tmp_path: Path) -> None:
    names = [
        "a b.png",
        "../x.png",
        "<script>.png",
        "é" * 90 + ".png",
        "-rf.png",
        "no suffix",
        ".hidden",
        "new\nline.png",
    ]
    places = []
    for number, name in enumerate(names):
        place = tmp_path / "images" / str(number) / name.replace("../", "")
        place.parent.mkdir(parents=True)
        place.write_text(str(number))
        places.append(str(place))
    folder = tmp_path / "rejected"
    rejection.check_folder(folder)
    (folder / "0001_a_b.png").write_text("precious")  # appeared meanwhile
    measured = certain([float(number) for number in range(len(names))])
    rejection.collect(folder, places, ["=label"], measured, "sigma", np.zeros(len(names), bool))
    assert (folder / "0001_a_b.png").read_text() == "precious"
    assert (folder / "0001-2_a_b.png").read_text() == "0"
    index = table(folder / "index.csv")
    for number, row in enumerate(index):
        assert (folder / row["file"]).read_text() == str(number)
        assert all(c.isascii() and (c.isalnum() or c in "._-") for c in row["file"])
        assert len(row["file"]) < 130
        assert row["label"] == "'=label"


def test_a_link_takes_the_place_of_what_cannot_be_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("certvol.rejection.shutil.copyfileobj", full)
    monkeypatch.chdir(tmp_path)
    rejection.check_folder(Path("look"))
    rejection.collect(Path("look"), ["a.png"], ["x"], certain([1.0]), "sigma", np.zeros(1, bool))
    assert (tmp_path / "look" / "0001_a.png").is_symlink()
    assert (tmp_path / "look" / "0001_a.png").samefile(tmp_path / "a.png")


def test_a_place_that_is_no_folder_is_refused_before_any_work(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    words = ["predict", str(root / "run"), str(root / "target"), "--out", str(tmp_path / "p.csv"), "--coverage", "0.5"]
    assert "cannot use" in refused(capsys, *words, "--rejected-dir", str(tmp_path / "file"))
    assert not (tmp_path / "p.csv").exists()
    assert os.listdir(tmp_path) == ["file"]  # noqa: PTH208
