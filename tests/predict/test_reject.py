"""Thresholds without labels, and the folder of rejected images."""

import os
from pathlib import Path

import numpy as np
import pytest

from certvol.cli._main import run as cli
from certvol.errors import UserError
from certvol.predict import reject as rejection
from certvol.predict.forward import Outputs
from certvol.scores.uncertainty import LABEL_FREE, MEASURES
from support.run_folders import read_table


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli(list(words)) == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return next(line for line in error.splitlines() if line.startswith("certvol: "))


@pytest.mark.parametrize("measure", LABEL_FREE)
def test_any_measure_can_set_the_coverage(measure: str, root: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.csv"
    words = ["predict", str(root / "run"), str(root / "target"), "--out", str(out)]
    words += ["--coverage", "0.75"]
    assert cli([*words, "--measure", measure]) == 0
    rows = read_table(out)
    sign = 1 if MEASURES[measure].more_is_certain else -1
    accepted, rejected = (
        [sign * float(row[measure]) for row in rows if row["accepted"] == word]
        for word in ("true", "false")
    )
    assert 26 <= len(accepted) <= 28
    assert min(accepted) > max(rejected)


@pytest.mark.parametrize(
    ("measure", "up"), [("sigma", True), ("entropy", False), ("mcd_sigma", False)]
)
def test_min_certainty_is_in_the_measures_own_units(
    measure: str, up: bool, root: Path, tmp_path: Path
) -> None:
    values = sorted(float(row[measure]) for row in read_table(root / "run" / "measures.csv"))
    middle = (values[17] + values[18]) / 2
    out = tmp_path / "p.csv"
    words = ["predict", str(root / "run"), str(root / "target"), "--out", str(out)]
    words += ["--measure", measure]
    assert cli([*words, "--min-certainty", str(middle)]) == 0
    for row in read_table(out):
        assert (row["accepted"] == "true") == ((float(row[measure]) > middle) == up)


def test_a_chosen_measure_is_a_column(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.csv"
    words = ["predict", str(root / "run"), str(root / "target"), "--out", str(out)]
    assert cli([*words, "--measure", "entropy"]) == 0
    assert list(read_table(out)[0]) == ["path", "label", "probability", "sigma", "entropy"]
    by_run = {row["path"]: row for row in read_table(root / "run" / "measures.csv")}
    for row in read_table(out):
        expected = by_run[str(Path(row["path"]).relative_to(root / "target"))]
        assert row["label"] == expected["prediction"]
        for name in ("entropy", "probability", "sigma"):
            assert float(row[name]) == pytest.approx(float(expected[name]), abs=1e-4)


@pytest.mark.parametrize("name", [None, "auto"])
def test_the_usual_measure_depends_on_the_backbone(name: str | None) -> None:
    assert rejection.choose_measure(name, True, True) == "sigma"
    for has_sigma, frozen in ((True, False), (False, True), (False, False)):
        assert rejection.choose_measure(name, has_sigma, frozen) == "probability"


def test_a_method_without_sigma_rejects_by_probability(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p.csv"
    words = ["predict", str(root / "basic"), str(root / "target"), "--out", str(out)]
    words += ["--coverage", "0.5"]
    assert cli(words) == 0
    rows = read_table(out)
    assert sum(row["accepted"] == "true" for row in rows) == 18
    assert min(float(r["probability"]) for r in rows if r["accepted"] == "true") > max(
        float(r["probability"]) for r in rows if r["accepted"] == "false"
    )
    assert "has no sigma" in refused(capsys, *words, "--measure", "sigma")


def test_stored_thresholds_agree_with_coverage(root: Path) -> None:
    import json

    stored = json.loads((root / "run" / "evaluation.json").read_text())["thresholds"]
    for measure in LABEL_FREE:
        assert stored[measure]["0.9"] == rejection.choose_rule(root / "run", measure, 0.9).threshold


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--coverage", "0"], "above 0"),
        (["--coverage", "1.1"], "at most 1"),
        (["--coverage", "nan"], "above 0"),
        (["--min-certainty", "nan"], "a number"),
        (["--min-certainty", "1", "--coverage", "0.5"], "one of them"),
        (["--measure", "entropi", "--coverage", "0.5"], "did you mean `entropy`?"),
        (["--measure", "logit_gt", "--coverage", "0.5"], "unknown measure `logit_gt`"),
        (["--rejected-dir", "x"], "--coverage, --min-certainty or --max-error"),
    ],
)
def test_mistakes_are_explained_in_one_sentence(
    extra: list[str], words: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "p.csv"
    assert words in refused(
        capsys, "predict", str(root / "run"), str(root / "target"), "--out", str(out), *extra
    )
    assert not out.exists()


@pytest.mark.parametrize(
    "content",
    ["", "path,entropy\n", "path,entropy\na,b\n", "path,entropy\na,nan\n", 'entropy\n"x\n'],
)
def test_a_damaged_table_of_measures_is_refused(content: str, root: Path, tmp_path: Path) -> None:
    (tmp_path / "measures.csv").write_text(content)
    with pytest.raises(UserError, match=r"measures\.csv is damaged"):
        rejection.choose_rule(tmp_path, "entropy", 0.5)
    (tmp_path / "measures.csv").unlink()
    with pytest.raises(UserError, match="missing"):
        rejection.choose_rule(tmp_path, "entropy", 0.5)


def test_rejected_images_lie_in_order_of_certainty(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, folder = tmp_path / "p.csv", tmp_path / "look" / "here"
    words = ["predict", str(root / "run"), str(root / "target"), "--out", str(out)]
    words += ["--coverage", "0.75", "--measure", "sigma"]
    words += ["--rejected-dir", str(folder)]
    assert cli(words) == 0
    assert "9 rejected (sigma below" in capsys.readouterr().out
    rejected = [row for row in read_table(out) if row["accepted"] == "false"]
    expected = [row["path"] for row in sorted(rejected, key=lambda row: float(row["sigma"]))]
    index = read_table(folder / "index.csv")
    assert [row["path"] for row in index] == expected
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [*(row["file"] for row in index), "index.csv"]
    )
    assert [row["file"] for row in index] == [
        f"{n:04d}_{Path(path).name}" for n, path in enumerate(expected, 1)
    ]
    for row in index:
        assert (folder / row["file"]).read_bytes() == Path(row["path"]).read_bytes()
        assert not (folder / row["file"]).is_symlink()
    assert "not empty" in refused(capsys, *words)


def certain(values: list[float]) -> Outputs:
    return Outputs(np.ones((len(values), 1), np.float32), np.array(values, np.float32))


def test_names_of_copies_are_plain(tmp_path: Path) -> None:
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
    measured = certain([float(number) for number in range(len(names))])
    rejection.collect(folder, places, ["=label"], measured, "sigma", np.zeros(len(names), bool))
    index = read_table(folder / "index.csv")
    for number, row in enumerate(index):
        assert (folder / row["file"]).read_text() == str(number)
        assert all(c.isascii() and (c.isalnum() or c in "._-") for c in row["file"])
        assert len(row["file"]) < 130
        assert row["label"] == "'=label"


def test_an_image_that_cannot_be_copied_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("certvol.predict.reject.shutil.copyfile", full)
    with pytest.raises(UserError, match=r"cannot copy a\.png .* No space left"):
        rejection.collect(tmp_path, ["a.png"], ["x"], certain([1.0]), "sigma", np.zeros(1, bool))


def test_a_file_as_rejected_dir_is_refused_before_any_work(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    words = ["predict", str(root / "run"), str(root / "target"), "--out", str(tmp_path / "p.csv")]
    words += ["--coverage", "0.5"]
    assert "cannot use" in refused(capsys, *words, "--rejected-dir", str(tmp_path / "file"))
    assert not (tmp_path / "p.csv").exists()
    assert os.listdir(tmp_path) == ["file"]  # noqa: PTH208


def test_the_list_of_rejected_images_does_not_replace_the_predictions(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["predict", str(root / "run"), str(root / "target"), "--coverage", "0.5"]
    words += ["--rejected-dir", str(tmp_path / "look"), "--out", str(tmp_path / "look/index.csv")]
    assert "is the list of rejected images" in refused(capsys, *words)
    assert not (tmp_path / "look").exists()


def test_the_folder_of_rejected_images_may_not_lie_among_the_inputs(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    with pytest.raises(UserError, match="lies inside"):
        rejection.check_folder(tmp_path / "images" / "look", [str(tmp_path / "images")])
    rejection.check_folder(tmp_path / "look", [str(tmp_path / "images")])
