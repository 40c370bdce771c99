"""The check of files of features."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from certvol.cli._main import run
from certvol.data.check import check
from certvol.errors import UserError
from support.findings import CONFIG, texts, unexpected
from support.images import write_domain

RNG = np.random.default_rng(0)


ROWS = {
    "source": RNG.normal(size=(12, 4)).astype(np.float32),
    "target": RNG.normal(size=(9, 4)).astype(np.float32),
}


LABELS = np.array(["ant", "bee", "cat"] * 4)


def written(folder: Path, which: str, **changed: Any) -> Path:
    arrays: dict[str, Any] = {
        "features": ROWS[which],
        "paths": np.array([f"{which}{i}" for i in range(len(ROWS[which]))]),
    }
    if which == "source":
        arrays["labels"] = LABELS
    arrays |= changed
    np.savez(
        folder / f"{which}.npz",
        **{name: array for name, array in arrays.items() if array is not None},
    )
    return folder / f"{which}.npz"


def test_clean_files_have_no_findings(tmp_path: Path) -> None:
    report = check(written(tmp_path, "source"), written(tmp_path, "target"), CONFIG)
    assert report.source_counts == {"ant": 4, "bee": 4, "cat": 4}
    assert report.target_count == 9
    assert unexpected(report) == []
    assert report.can_adapt


@pytest.mark.parametrize(
    ("which", "changed", "said"),
    [
        ("source", {"labels": None}, "source: .* has no labels"),
        ("source", {"labels": np.array(["ant"] * 12)}, "source: .* has only one class"),
        ("source", {"features": np.full((12, 4), np.nan)}, "source: .* not finite"),
        ("source", {"features": None}, "source: .* has no array `features`"),
        ("target", {"features": np.zeros((0, 4))}, "target: .* should be numbers of shape"),
        (
            "target",
            {"features": np.ones((9, 5)), "paths": None},
            "have 4 dimensions, those of the target 5",
        ),
        ("target", {"labels": np.ones((9, 2))}, "target: `labels`"),
    ],
)
def test_a_file_that_adapt_would_refuse_is_an_error_and_the_other_is_still_read(
    which: str, changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    places = {
        name: written(tmp_path, name, **(changed if name == which else {}))
        for name in ("source", "target")
    }
    report = check(places["source"], places["target"], CONFIG)
    assert not report.can_adapt
    (error,) = texts(report, "error")
    assert re.search(said, error)
    assert (
        report.target_count == 9 if which == "source" else sum(report.source_counts.values()) == 12
    )


def test_features_of_other_backbones_damaged_and_missing_files_are_reported(tmp_path: Path) -> None:
    source = written(tmp_path, "source", about=np.array("a"))
    target = written(tmp_path, "target", about=np.array("b"))
    assert "made by a, those of the target by b" in texts(check(source, target, CONFIG), "error")[0]
    target.write_bytes(target.read_bytes()[:100])
    assert "damaged" in texts(check(source, target, CONFIG), "error")[0]
    target.unlink()
    with pytest.raises(UserError, match="there is no file"):
        check(source, target, CONFIG)


def test_repeated_rows_and_rows_in_both_are_reported(tmp_path: Path) -> None:
    both = np.concatenate([ROWS["target"][:5], ROWS["target"][:2], ROWS["source"][3:5]])
    report = check(written(tmp_path, "source"), written(tmp_path, "target", features=both), CONFIG)
    assert report.target_duplicates == [["target0", "target5"], ["target1", "target6"]]
    assert report.in_both == [("source3", "target7"), ("source4", "target8")]
    assert [each.text.split(" (")[0] for each in unexpected(report)] == [
        "target: repeated content: 2",
        "content in both source and target: 2",
    ]
    assert report.can_adapt


def test_imbalance_names_and_target_labels_of_features_are_reported(tmp_path: Path) -> None:
    labels = np.array(["Ant"] + ["ant"] * 11)
    target = written(tmp_path, "target", labels=np.array(["ant"] * 9))
    report = check(written(tmp_path, "source", labels=labels), target, CONFIG)
    assert "with only one image" in texts(report, "warning")[0]
    assert "imbalanced" in texts(report, "warning")[1]
    assert "differ only in" in texts(report, "warning")[2]
    assert "every row has the label" in texts(report, "note")[0]


def test_a_file_of_features_beside_a_folder_is_an_error(tmp_path: Path) -> None:
    report = check(written(tmp_path, "source"), write_domain(tmp_path / "images"), CONFIG)
    assert texts(report, "error") == [
        f"{tmp_path}/source.npz holds features, but the other domain is not a .npz file; "
        "use features for both"
    ]
    assert sum(report.source_counts.values()) == 12


def test_the_command_takes_files_of_features(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = written(tmp_path, "source"), written(tmp_path, "target")
    assert run(["check", "--source", str(source), "--target", str(target)]) == 0
    said = capsys.readouterr().out
    assert "all 3 classes" in said
    assert "rows" in said
    assert "adaptation can start" in said
    written(tmp_path, "source", labels=None)
    assert run(["check", "--source", str(source), "--target", str(target)]) == 2
    assert "adaptation cannot start" in capsys.readouterr().out
    assert run(["check", "--source", str(tmp_path / "none.npz"), "--target", str(target)]) == 2
    assert "there is no file" in capsys.readouterr().err
